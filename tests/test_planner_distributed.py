"""Plans under DistributedModelParallel on two gloo ranks; each spawn runs several checks, as start-up dominates."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_models import (
    ANALYTIC,
    TwoCollections,
    bag_collection,
    bag_config,
    bag_sharders,
    cpu_topology,
    plan_json,
)
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, PlannerErrorType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import NeuroShardPlanner, TableStats
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.sharding_plan import sharding_plan
from torchrec_neuroshard.problem import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE, Placement, Shard

RANKS = 2
LOCAL_BATCH = 12
LEARNING_RATE = 0.3
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE}

# rows, dim, features, shards as (rank, width) in column order
TABLES: dict[str, tuple[int, int, list[str], str, list[tuple[int, int]]]] = {
    "uneven": (90, 128, ["a"], COLUMN_WISE, [(1, 96), (0, 32)]),
    "three": (70, 128, ["b", "c"], COLUMN_WISE, [(0, 64), (1, 32), (0, 32)]),
    "one_rank": (50, 64, ["d"], COLUMN_WISE, [(1, 32), (1, 32)]),
    "whole": (40, 32, ["e"], COLUMN_WISE, [(0, 32)]),
    "plain": (60, 16, ["f"], TABLE_WISE, [(0, 16)]),
    "plain_too": (30, 24, ["g"], TABLE_WISE, [(1, 24)]),
}
# Tables that lie on both ranks, beside one that does not: rows that do not divide evenly, several features.
SPREAD_TABLES: dict[str, tuple[int, int, list[str], str, list[tuple[int, int]]]] = {
    "rows": (91, 64, ["a"], ROW_WISE, []),
    "rows_too": (40, 16, ["b", "c"], ROW_WISE, []),
    "copies": (50, 32, ["e", "f"], DATA_PARALLEL, []),
    "split": (70, 32, ["g"], COLUMN_WISE, [(1, 16), (0, 16)]),
}


def random_batch(rank: int, rows_of: dict[str, int], weighted: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 + rank)
    lengths, values = [], []
    for rows in rows_of.values():
        counts = torch.randint(0, 5, (LOCAL_BATCH,), generator=generator)
        lengths.append(counts)
        values.append(torch.randint(0, rows, (int(counts.sum()),), generator=generator))
    ids = torch.cat(values)
    return KeyedJaggedTensor(
        keys=list(rows_of),
        values=ids,
        lengths=torch.cat(lengths),
        weights=torch.rand(ids.numel(), generator=generator) if weighted else None,
    )


def columns_of(output: Any) -> torch.Tensor:
    """[samples, columns] of all features by name: sharded modules order features by sharding type."""
    return torch.cat([output[key] for key in sorted(output.keys())], dim=1)


def loss_of(columns: torch.Tensor) -> torch.Tensor:
    coefficients = torch.linspace(-1.0, 1.0, columns.shape[1])
    return (columns * coefficients).sum() + 0.5 * (columns**2).sum()


def state_error(sharded: nn.Module, reference: dict[str, torch.Tensor], copy: bool = False) -> tuple[float, int]:
    """Largest difference of this rank's shards to the reference's weights, and their number; or copies them in."""
    worst, count = 0.0, 0
    for name, tensor in sharded.state_dict().items():
        if not hasattr(tensor, "local_shards"):  # a replica
            if copy:
                tensor.copy_(reference[name])
            worst = max(worst, float((tensor - reference[name]).abs().max()))
            count += 1
            continue
        for shard in tensor.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            expected = reference[name][row : row + rows, column : column + columns]
            if copy:
                shard.tensor.copy_(expected)
            worst = max(worst, float((shard.tensor - expected).abs().max()))
            count += 1
    return worst, count


class AllTypesSharder(EmbeddingBagCollectionSharder):
    """Offers row_wise on a CPU too, where TorchRec can run it and does not offer it."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [*super().sharding_types(compute_device_type), ROW_WISE]


def parity_worker(rank: int, weighted: bool, spread: bool = False) -> dict[str, Any]:
    torch.manual_seed(7)
    chosen = SPREAD_TABLES if spread else TABLES
    configs = [bag_config(name, rows, dim, features) for name, (rows, dim, features, _, _) in chosen.items()]
    reference = bag_collection(*configs, weighted=weighted, device="cpu")
    meta = bag_collection(*configs, weighted=weighted)
    sharders: list[Any] = [AllTypesSharder(fused_params=SGD)]
    tables = collect_tables(meta, sharders, None, "cpu", LOCAL_BATCH)
    shards = []
    for index, (_, _, _, _, pieces) in enumerate(chosen.values()):
        offset = 0
        for owner, width in pieces:
            shards.append(Shard(index, offset, width, owner))
            offset += width
    placement = Placement(tuple(shards), tuple(kind for _, _, _, kind, _ in chosen.values()))
    plan = sharding_plan(tables, placement, cpu_topology(RANKS), LOCAL_BATCH)
    sharded = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    with torch.no_grad():
        state_error(sharded, reference.state_dict(), copy=True)

    rows_of = {feature: rows for rows, _, features, _, _ in chosen.values() for feature in features}
    output = columns_of(sharded(random_batch(rank, rows_of, weighted)).wait())
    expected = [columns_of(reference(random_batch(r, rows_of, weighted))) for r in range(RANKS)]
    output_error = float((output - expected[rank]).abs().max().detach())
    loss_of(output).backward()
    with torch.no_grad():  # replicas have no fused optimizer
        for parameter in sharded.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad

    # TorchRec averages gradients over ranks; the reference sees the batches of all of them.
    (sum(loss_of(columns) for columns in expected) / RANKS).backward()
    before = {name: weight.clone() for name, weight in reference.state_dict().items()}
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    moved = min(float((w - before[name]).abs().max()) for name, w in reference.state_dict().items())
    weight_error, count = state_error(sharded, reference.state_dict())
    return {
        "output": output_error,
        "weights": weight_error,
        "shards": count,
        "moved": moved,
    }


@pytest.mark.parametrize("weighted", [False, True])
def test_uneven_splits_train_as_the_unsharded_tables(weighted: bool) -> None:
    results = run_ranks(parity_worker, RANKS, weighted)
    owned = [sum(owner == rank for *_, pieces in TABLES.values() for owner, _ in pieces) for rank in range(RANKS)]
    for rank, result in enumerate(results):
        assert result["output"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-3  # the step changed every table
        assert result["shards"] == owned[rank]


@pytest.mark.parametrize("weighted", [False, True])
def test_tables_on_all_ranks_train_as_the_unsharded_ones(weighted: bool) -> None:
    for result in run_ranks(parity_worker, RANKS, weighted, True):
        assert result["output"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-3
        assert result["shards"] == len(SPREAD_TABLES)


def spread_worker(rank: int) -> dict[str, Any]:
    """Plans with our planner where row-wise and replicas are allowed, and trains a step."""
    hot = bag_config("hot", 20_000, 64, ["a"])
    model = bag_collection(hot, bag_config("tiny", 12, 16, ["b"]), bag_config("plain", 500, 32, ["c"]))
    constraints = {"tiny": ParameterConstraints(sharding_types=["data_parallel"])}
    stats = TableStats({"hot": 400.0, "tiny": 1.0, "plain": 1.0})
    planner = NeuroShardPlanner(
        topology=cpu_topology(RANKS),
        batch_size=LOCAL_BATCH,
        constraints=constraints,
        cost_model=ANALYTIC,
        table_stats=stats,
        column_split="never",
        stats=[],
    )
    sharders: list[Any] = [AllTypesSharder(fused_params=SGD)]
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    loss_of(columns_of(sharded(random_batch(rank, {"a": 20_000, "b": 12, "c": 500})).wait())).backward()
    assert planner.report is not None
    return {"plan": plan_json_types(plan), "report": planner.report.to_json(), "text": str(planner.report)}


def plan_json_types(plan: Any) -> dict[str, tuple[str, str]]:
    return {name: (e.sharding_type, e.compute_kernel) for module in plan.plan.values() for name, e in module.items()}


def test_the_planner_spreads_a_hot_table_and_what_a_constraint_replicates() -> None:
    first, second = run_ranks(spread_worker, RANKS)
    assert first == second
    assert first["plan"]["hot"] == ("row_wise", "fused")
    assert first["plan"]["tiny"] == ("data_parallel", "dense")
    assert first["plan"]["plain"][0] in ("table_wise", "column_wise", "row_wise")
    shards = first["report"]["tables"]["hot"]["shards"]
    assert [(shard["rank"], shard["offset"][0], shard["size"]) for shard in shards] == [
        (0, 0, [10_000, 64]),
        (1, 10_000, [10_000, 64]),
    ]
    assert len(first["report"]["tables"]["tiny"]["shards"]) == RANKS
    notes = first["report"]["notes"]
    assert any(note.startswith("Table 'hot' is row_wise: ") and " ms on " in note for note in notes)


class TwoCollectionsForward(TwoCollections):
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        user = self.sparse["user"](features).values()
        item = self.item(features).values()
        return self.over(torch.cat([user[:, :2], item[:, :2]], dim=1)) + user.sum() + item.sum()


def planner_worker(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    stats = TableStats({"sparse.user.a": 30.0, "b": 5.0, "item.a": 2.0, "c": 10.0})
    # Topology detected, and each rank asks for another split: what rank 0 says must hold.
    planner = NeuroShardPlanner(
        batch_size=LOCAL_BATCH,
        cost_model=ANALYTIC,
        table_stats=stats,
        column_split="any" if rank == 0 else "never",
        stats=[],
    )
    model = TwoCollectionsForward()
    sharders = bag_sharders(SGD)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    assert planner.report is not None
    results["plan"] = plan_json(plan)
    results["report"] = planner.report.to_json()
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    held = [isinstance(module, EmbeddingBagCollection) for module in sharded.modules()]
    rows_of = {"u0": 2000, "u1": 500, "u2": 500, "i0": 3000, "i1": 800}
    loss = sharded(random_batch(rank, rows_of)).sum()
    loss.backward()
    results["loss"] = float(loss)
    results["unsharded_left"] = sum(held)

    def failing(**arguments: Any) -> tuple[str, str, str, float]:
        begun = time.monotonic()
        try:
            NeuroShardPlanner(topology=cpu_topology(RANKS, ddr_mib=1), stats=[], **arguments).collective_plan(
                TwoCollections()
            )
        except PlannerError as error:
            return type(error).__name__, error.error_type.name, str(error), time.monotonic() - begun
        raise AssertionError("a plan was found")

    big = {"batch_size": 100_000, "cost_model": ANALYTIC}
    results["too_big"] = failing(**big)
    results["bad_model"] = failing(batch_size=1, cost_model="no_such_model")
    # After the failures the group still works.
    again = NeuroShardPlanner(batch_size=LOCAL_BATCH, cost_model=ANALYTIC, table_stats=stats, stats=[])
    results["after"] = plan_json(again.collective_plan(TwoCollections()))
    return results


@pytest.fixture(scope="module")
def planned() -> list[dict[str, Any]]:
    return run_ranks(planner_worker, RANKS)


def test_every_rank_gets_rank_zeros_plan_and_report(planned: list[dict[str, Any]]) -> None:
    assert planned[0]["plan"] == planned[1]["plan"]
    assert planned[0]["report"] == planned[1]["report"]
    assert planned[0]["report"]["world_size"] == RANKS
    assert planned[0]["after"] == planned[1]["after"]


def test_the_plan_trains_under_dmp(planned: list[dict[str, Any]]) -> None:
    for result in planned:
        assert result["unsharded_left"] == 0
        assert result["loss"] == result["loss"]  # not NaN


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("too_big", PlannerErrorType.INSUFFICIENT_STORAGE, "insufficient storage"),
        ("bad_model", PlannerErrorType.OTHER, "no_such_model"),
    ],
)
def test_when_rank_zero_cannot_plan_all_ranks_raise(
    planned: list[dict[str, Any]], case: str, kind: PlannerErrorType, words: str
) -> None:
    for result in planned:
        _, error_type, message, seconds = result[case]
        assert error_type == kind.name
        assert words in message
        assert seconds < 60
    assert planned[0][case][2] == planned[1][case][2]
