"""Checkpoints written under one plan load under another, with ``torch.distributed.checkpoint``.

Weights: under any other plan, whatever the sharding types and the widths of column splits; replicas too.
``load`` writes into the tensors of ``state_dict()``, which are the model's own, and that is all there is to do.

Optimizer state: under the same plan always. Under another plan element-wise state (Adagrad) reshards like weights, and
row-wise state (row-wise Adagrad) where neither plan splits the table's columns.

What cannot work, and is TorchRec's doing (1.6 to 1.9):

* ``model.load_state_dict(state)`` of *sharded* tensors when a table's column shards differ in width: TorchRec views
  every rank's shard as if it were as wide as the table's first, and raises "size mismatch". It is not needed after
  ``load``; and an unsharded state dict can be loaded with it.
* Row-wise state of a column split under another number of column shards: each shard keeps its own momentum, and their
  sizes do not match; ``load`` raises. Under as many shards of other widths sizes do match: nothing can tell.
* State of a table that moves to or from ``data_parallel``: it is another optimizer's, under another name.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from distributed import run_ranks
from parity import Bags, Collections, PlacedTable, ShardedModel, largest_difference, local_parts, plan_of, sharders_of
from torch.distributed.checkpoint.api import CheckpointException

from torchrec_neuroshard.problem import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE

RANKS = 2
TABLES: dict[str, tuple[int, int]] = {"a": (90, 128), "b": (91, 64), "c": (40, 32), "d": (50, 48), "e": (30, 48)}
Placing = tuple[str, tuple[tuple[int, int], ...]]

FIRST: dict[str, Placing] = {
    "a": (COLUMN_WISE, ((1, 96), (0, 32))),
    "b": (ROW_WISE, ()),
    "c": (DATA_PARALLEL, ()),
    "d": (TABLE_WISE, ((0, 48),)),
    "e": (ROW_WISE, ()),
}
# Every table lies otherwise.
OTHER: dict[str, Placing] = {
    "a": (ROW_WISE, ()),
    "b": (COLUMN_WISE, ((0, 16), (1, 48))),
    "c": (TABLE_WISE, ((1, 32),)),
    "d": (DATA_PARALLEL, ()),
    "e": (TABLE_WISE, ((1, 48),)),
}
# Every table but the replicated one lies otherwise.
RESHARDED: dict[str, Placing] = {
    **OTHER,
    "c": FIRST["c"],
    "d": (ROW_WISE, ()),
}


def collections(placing: dict[str, Placing]) -> Collections:
    return {"user": tuple(PlacedTable(name, *TABLES[name], (f"f_{name}",), *placing[name]) for name in TABLES)}


def sharded_model(placing: dict[str, Placing], optimizer: str, seed: int) -> ShardedModel:
    torch.manual_seed(seed)
    tables, sharders = collections(placing), sharders_of(optimizer)
    plan = plan_of(tables, Bags(tables, "meta"), sharders, RANKS)
    return ShardedModel(tables, plan, sharders, optimizer)


def weights_of(model: ShardedModel) -> dict[str, torch.Tensor]:
    """This rank's parts of all tables by name, copied."""
    state = model.dmp.state_dict()
    return {
        name: torch.cat([shard.tensor for shard in tensor.local_shards()] or [torch.empty(0)])
        if hasattr(tensor, "local_shards")
        else tensor.detach().clone()
        for name, tensor in state.items()
    }


def difference(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first if first[name].numel())


def load(folder: str, model: ShardedModel, optimizer: bool) -> None:
    state: dict[str, Any] = {"model": model.dmp.state_dict()}
    if optimizer:
        assert model.dense is not None
        state.update(fused=model.dmp.fused_optimizer.state_dict(), dense=model.dense.state_dict())
    checkpoint.load(state, checkpoint_id=folder)
    if optimizer:
        model.dmp.fused_optimizer.load_state_dict(state["fused"])
        model.dense.load_state_dict(state["dense"])  # type: ignore[union-attr]


def fused_state(model: ShardedModel, tables: str) -> dict[str, dict[str, Any]]:
    """The fused optimizer's state of some tables; a rank without a shard of one has none."""
    names = {f"bags.user.embedding_bags.{table}.weight" for table in tables}
    return {name: state for name, state in model.dmp.fused_optimizer.state_dict()["state"].items() if name in names}


def momentum_error(folder: str, model: ShardedModel, tables: str) -> float:
    """Loads the fused state of tables into a model of another plan; largest difference to the saved whole state."""
    state = fused_state(model, tables)
    checkpoint.load({"fused": {"state": state}}, checkpoint_id=folder)
    worst = 0.0
    for name, tensors in state.items():
        for key, tensor in tensors.items():
            whole = torch.full(tuple(tensor.size()), torch.nan)
            # Each rank reads what it needs: no_dist, as ranks hold different tables.
            checkpoint.load({"fused": {"state": {name: {key: whole}}}}, checkpoint_id=folder, no_dist=True)
            assert float(whole.max()) > 0.0
            for shard in tensor.local_shards():
                where = tuple(
                    slice(offset, offset + size)
                    for offset, size in zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes)
                )
                worst = max(worst, float((shard.tensor - whole[where]).abs().max()))
    return worst


def checkpoint_worker(rank: int, folder: str, optimizer: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    saved = sharded_model(FIRST, optimizer, seed=1)
    for step in range(2):
        saved.step(rank, step)
    assert saved.dense is not None
    checkpoint.save(
        {
            "model": saved.dmp.state_dict(),
            "fused": saved.dmp.fused_optimizer.state_dict(),
            "dense": saved.dense.state_dict(),
        },
        checkpoint_id=folder,
    )
    whole = {name: torch.full(tuple(t.size()), torch.nan) for name, t in saved.dmp.state_dict().items()}
    checkpoint.load({"model": whole}, checkpoint_id=folder, no_dist=True)
    results["saved"] = largest_difference(saved.dmp.state_dict(), whole)
    output = saved.step(rank, 2)

    again = sharded_model(FIRST, optimizer, seed=2)
    results["fresh"] = largest_difference(again.dmp.state_dict(), whole)
    load(folder, again, optimizer=False)
    results["same_plan"] = largest_difference(again.dmp.state_dict(), whole)
    again.step(rank, 2)
    results["without_optimizer"] = difference(weights_of(again), weights_of(saved))
    load(folder, again, optimizer=True)
    results["resumed_output"] = float((again.step(rank, 2) - output).abs().max())
    results["resumed"] = difference(weights_of(again), weights_of(saved))

    other = sharded_model(OTHER, optimizer, seed=3)
    load(folder, other, optimizer=False)
    results["other_plan"] = largest_difference(other.dmp.state_dict(), whole)
    results["other_output"] = float((other.step(rank, 2) - output).abs().max())

    # TorchRec's load_state_dict: of this plan's sharded state, and of the unsharded one.
    try:
        other.dmp.load_state_dict(other.dmp.state_dict())
        results["sharded_state_dict"] = "loaded"
    except RuntimeError as error:
        results["sharded_state_dict"] = str(error)
    other.dmp.load_state_dict(whole)
    results["whole_state_dict"] = largest_difference(other.dmp.state_dict(), whole)

    resharded = sharded_model(RESHARDED, optimizer, seed=4)
    results["momentum"] = momentum_error(folder, resharded, "de")
    for table in "ab":
        try:
            results[f"momentum_{table}"] = momentum_error(folder, resharded, table)
        except CheckpointException as error:
            results[f"momentum_{table}"] = str(error)
    results["parts"] = sum(1 for _ in local_parts(other.dmp.state_dict(), whole))
    return results


@pytest.fixture(scope="module", params=["adagrad", "rowwise_adagrad"])
def outcome(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("checkpoint"))
    return request.param, run_ranks(checkpoint_worker, RANKS, folder, request.param)


def test_weights_load_under_the_same_and_another_plan(outcome: tuple[str, list[dict[str, Any]]]) -> None:
    for result in outcome[1]:
        assert result["fresh"] > 0.01
        assert result["saved"] == result["same_plan"] == result["other_plan"] == result["whole_state_dict"] == 0.0
        assert result["other_output"] < 1e-5


def test_training_resumes_with_the_optimizers_state(outcome: tuple[str, list[dict[str, Any]]]) -> None:
    for result in outcome[1]:
        assert result["without_optimizer"] > 1e-3
        assert result["resumed_output"] == result["resumed"] == 0.0


def test_optimizer_state_reshards_unless_row_wise_state_meets_a_column_split(
    outcome: tuple[str, list[dict[str, Any]]],
) -> None:
    optimizer, results = outcome
    for result in results:
        assert result["momentum"] == 0.0
        for table in "ab":  # columns to rows, rows to columns
            if optimizer == "adagrad":
                assert result[f"momentum_{table}"] == 0.0
            else:
                assert "Size mismatch" in result[f"momentum_{table}"]


def test_load_state_dict_of_uneven_column_shards_is_refused(outcome: tuple[str, list[dict[str, Any]]]) -> None:
    first, second = outcome[1]  # rank 0 holds the first shard of the table, by whose width all are viewed
    assert first["sharded_state_dict"] == "loaded"
    assert "size mismatch for embedding_bags.b.weight" in second["sharded_state_dict"]
