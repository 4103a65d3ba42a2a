"""EmbeddingCollection, whose rows are returned one by one, and the other kinds of modules that are planned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_models import ANALYTIC, bag_collection, bag_config, cpu_topology
from test_planner_distributed import (
    LEARNING_RATE,
    LOCAL_BATCH,
    SGD,
    AllTypesSharder,
    columns_of,
    loss_of,
    random_batch,
    state_error,
)
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from tests.test_spread import SpreadMemory
from torchrec_neuroshard import NeuroShardPlanner, TableStats
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.costs.bucketize import bucketize_ms
from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator, kind_work
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    ROW_WISE,
    TABLE_WISE,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    Spread,
    TableOptions,
)

RANKS = 2
SEQUENCES: dict[str, tuple[int, list[str], str]] = {
    "whole": (91, ["a"], TABLE_WISE),
    "rows": (41, ["b", "c"], ROW_WISE),
    "columns": (50, ["d"], COLUMN_WISE),
    "columns_too": (35, ["e", "f"], COLUMN_WISE),
}


def sequence_config(name: str, rows: int, features: list[str], dim: int = 16) -> EmbeddingConfig:
    return EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features)


def sequences(*configs: EmbeddingConfig, device: str = "meta") -> EmbeddingCollection:
    return EmbeddingCollection(tables=list(configs), device=torch.device(device))


class SequenceAndBags(nn.Module):
    """A sequence model: history rows one by one, and pooled tables, of which one shares a feature with it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.history = sequences(
            *(sequence_config(name, rows, features) for name, (rows, features, _) in SEQUENCES.items()), device=device
        )
        self.bags = bag_collection(
            bag_config("bag", 91, 32, ["a"]), bag_config("bag_rows", 60, 16, ["g"]), device=device
        )

    def forward(self, features: Any) -> tuple[Any, Any]:
        return self.history(features), self.bags(features)


def values_of(output: tuple[Any, Any]) -> torch.Tensor:
    """All numbers of both outputs in one row, whatever order sharded modules have."""
    rows = output[0].wait() if hasattr(output[0], "wait") else output[0]
    bags = output[1].wait() if hasattr(output[1], "wait") else output[1]
    sequence = torch.cat([rows[key].values().flatten() for key in sorted(rows)])
    return torch.cat([sequence, columns_of(bags).flatten()])[None]


def sequence_worker(rank: int) -> dict[str, Any]:
    torch.manual_seed(7)
    reference, meta = SequenceAndBags("cpu"), SequenceAndBags("meta")
    sharders: list[Any] = [EmbeddingCollectionSharder(fused_params=SGD), AllTypesSharder(fused_params=SGD)]
    constraints = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=8)
        for name, kind in {**{n: k for n, (_, _, k) in SEQUENCES.items()}, "bag_rows": ROW_WISE}.items()
    }
    planner = NeuroShardPlanner(cpu_topology(RANKS), LOCAL_BATCH, constraints, cost_model=ANALYTIC)
    plan = planner.collective_plan(meta, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    with torch.no_grad():
        state_error(sharded, reference.state_dict(), copy=True)
    rows_of = {feature: rows for rows, features, _ in SEQUENCES.values() for feature in features} | {"g": 60}
    output = values_of(sharded(random_batch(rank, rows_of)))
    expected = [values_of(reference(random_batch(r, rows_of))) for r in range(RANKS)]
    output_error = float((output - expected[rank]).abs().max().detach())
    loss_of(output).backward()
    (sum(loss_of(values) for values in expected) / RANKS).backward()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter -= LEARNING_RATE * parameter.grad
    weight_error, _ = state_error(sharded, reference.state_dict())
    shards = {
        name: (entry.sharding_type, [tuple(s.shard_sizes) for s in entry.sharding_spec.shards])
        for name, entry in plan.plan["history"].items()  # type: ignore[attr-defined]
    }
    return {"output": output_error, "weights": weight_error, "shards": shards}


def test_sequences_train_as_the_unsharded_module_does() -> None:
    for result in run_ranks(sequence_worker, RANKS):
        assert result["output"] < 1e-5
        assert result["weights"] < 1e-5
        assert {name: kind for name, (kind, _) in result["shards"].items()} == {
            name: kind for name, (_, _, kind) in SEQUENCES.items()
        }
        assert result["shards"]["columns"][1] == [(50, 8), (50, 8)]


def test_sequences_of_unequal_widths_are_refused() -> None:
    """TorchRec's own planner makes such a plan, which fails at run time."""
    model = nn.Sequential(sequences(sequence_config("a", 100, ["x"]), sequence_config("b", 100, ["y"])))
    constraints = {
        name: ParameterConstraints(sharding_types=[COLUMN_WISE], min_partition=width)
        for name, width in {"a": 8, "b": 4}.items()
    }
    planner = NeuroShardPlanner(cpu_topology(2), 64, constraints, cost_model=ANALYTIC)
    with pytest.raises(PlannerError, match="'b' would be cut into column shards of 4 and table 'a' .* same min_part"):
        planner.plan(model, [EmbeddingCollectionSharder()])  # type: ignore[list-item]


def test_replicas_of_sequences_are_not_planned_on_a_cpu_where_they_fail() -> None:
    model = nn.Sequential(sequences(sequence_config("a", 100, ["x"])))
    constraints = {"a": ParameterConstraints(sharding_types=[DATA_PARALLEL])}
    sharders: list[Any] = [EmbeddingCollectionSharder()]
    with pytest.raises(PlannerError, match="no sharding type and compute kernel is left"):
        NeuroShardPlanner(cpu_topology(2), 64, constraints, cost_model=ANALYTIC).plan(model, sharders)
    cuda = Topology(2, "cuda", local_world_size=2)
    planner = NeuroShardPlanner(cuda, 64, constraints, cost_model="analytic/h100_sxm", hardware="h100_sxm")
    assert planner.plan(model, sharders).plan["0"]["a"].sharding_type == DATA_PARALLEL  # type: ignore[index]


def problem_of(model: nn.Module, lengths: float, ranks: int = 2) -> ShardingProblem:
    constraints = {"t": ParameterConstraints(pooling_factors=[lengths])}
    (entry,) = collect_tables(model, [EmbeddingCollectionSharder()], constraints, "cpu", 64)  # type: ignore[list-item]
    options = (TableOptions((TABLE_WISE, ROW_WISE, COLUMN_WISE), 8),)
    cluster = Cluster(ranks, ranks, "cpu", np.full((ranks, 2), 1e12))
    return ShardingProblem((entry.table,), options, cluster, 64, SpreadMemory((entry.table,), ranks))


def test_an_unpooled_table_costs_its_rows_not_its_bags() -> None:
    """Its TBE returns every row, and all of them travel: ids times columns for each sample."""
    model = CostModel.analytic("generic_cpu")
    problem = problem_of(sequences(sequence_config("t", 5_000, ["x"])), lengths=30.0)
    assert problem.tables[0].unpooled
    simulator = PlanSimulator(problem, model)
    cost = simulator.cost(Placement((Shard(0, 0, 16, 0),), (TABLE_WISE,)))
    work = kind_work(problem, [(0, 16)])
    assert work[0].pooling == "none"
    expected = model.groups.predict(model.groups.contributions(shard_features(work)))[0]
    assert (cost.forward_ms[0], cost.backward_ms[0]) == pytest.approx(tuple(expected))
    collectives = model.collectives.on_links(problem.cluster.intra_host_gbps, problem.cluster.inter_host_gbps)
    forward = collectives.all_to_all(64, np.asarray([[30.0 * 16, 0.0]]), False, 2)[0]
    assert cost.forward_comms_ms == pytest.approx(np.full(2, forward))


@pytest.mark.parametrize("spread", [Spread(ROW_WISE), Spread(COLUMN_WISE, ((8, 0), (8, 1)))])
def test_spread_sequences_send_what_their_ranks_looked_up(spread: Spread) -> None:
    model = CostModel.analytic("generic_cpu")
    problem = problem_of(sequences(sequence_config("t", 5_000, ["x"])), lengths=30.0)
    cost = PlanSimulator(problem, model).cost(Placement((), (spread.kind,), (spread,)))
    collectives = model.collectives.on_links(problem.cluster.intra_host_gbps, problem.cluster.inter_host_gbps)
    each = 30.0 * 16 / 2  # half of the rows, or half of the columns
    forward = collectives.all_to_all(64, np.asarray([[each, each]]), False, 2)[0]
    if spread.kind == ROW_WISE:
        forward += bucketize_ms(HARDWARE["generic_cpu"], 64 * 30.0, 64, 2)
    assert cost.forward_comms_ms == pytest.approx(np.full(2, forward), rel=1e-3)


def test_fused_collections_bring_their_own_optimizer() -> None:
    model = FusedEmbeddingBagCollection(
        tables=[bag_config("t", 1_000, 64)],
        optimizer_type=torch.optim.Adagrad,
        optimizer_kwargs={"lr": 0.1},
        device=torch.device("meta"),
    )
    (entry,) = collect_tables(nn.Sequential(model), [FusedEmbeddingBagCollectionSharder()], None, "cpu", 64)  # type: ignore[list-item]
    assert entry.table.optimizer == "adagrad"
    assert entry.optimizer.state_bytes(1_000, 64) == 1_000 * 64 * 4


def processed_model(rows: int = 100) -> nn.Module:
    collection = bag_collection(bag_config("t", rows, 64, ["f"]), bag_config("u", rows, 32, ["g"]), weighted=True)
    processors = {name: PositionWeightedModule(max_feature_length=8) for name in ("f", "g")}
    return nn.Sequential(FeatureProcessedEmbeddingBagCollection(collection, processors))


def test_feature_processed_collections_are_planned_without_cutting_rows_unasked() -> None:
    sharders: list[Any] = [FeatureProcessedEmbeddingBagCollectionSharder()]
    tables = collect_tables(processed_model(), sharders, None, "cuda", 64)
    assert [entry.table.weighted for entry in tables] == [True, True]
    assert all(ROW_WISE not in entry.sharding_types and TABLE_WISE in entry.sharding_types for entry in tables)
    named = {"t": ParameterConstraints(sharding_types=[ROW_WISE])}
    asked = {
        entry.name: entry.sharding_types for entry in collect_tables(processed_model(), sharders, named, "cuda", 64)
    }
    assert asked["t"] == (ROW_WISE,)
    plan = NeuroShardPlanner(cpu_topology(2), 64, cost_model=ANALYTIC).plan(processed_model(), sharders)
    assert set(plan.plan["0"]) == {"t", "u"}  # type: ignore[arg-type]


def test_statistics_are_measured_for_all_kinds() -> None:
    model = nn.ModuleList([sequences(sequence_config("s", 100, ["f"])), processed_model()])
    batch = random_batch(0, {"f": 100, "g": 100})
    stats = TableStats.from_batches([batch], model)
    assert set(stats.pooling_factors) == {"s", "t", "u"}


def test_an_optimizer_of_the_sharder_is_seen_on_sequences_too() -> None:
    sharders: list[Any] = [EmbeddingCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD})]
    (entry,) = collect_tables(sequences(sequence_config("t", 100, ["x"])), sharders, None, "cpu", 64)
    assert entry.table.optimizer == "adagrad"


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_sequences_without_ids_are_planned() -> None:
    """They send nothing, so that there are no columns to balance."""
    model = nn.Sequential(sequences(*(sequence_config(name, 100, [name]) for name in "abc")))
    constraints = {name: ParameterConstraints(pooling_factors=[0.0]) for name in "abc"}
    planner = NeuroShardPlanner(cpu_topology(2), 64, constraints, cost_model=ANALYTIC)
    plan = planner.plan(model, [EmbeddingCollectionSharder()])  # type: ignore[list-item]
    assert set(plan.plan["0"]) == {"a", "b", "c"}  # type: ignore[arg-type]
