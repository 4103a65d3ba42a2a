"""Plans train as the unsharded model does: every mix of types, on two ranks of one host and four ranks of two hosts.

Fused Adagrad, like SGD, updates a table as the unsharded one. Row-wise Adagrad does so per shard only: a column split
changes its updates, which the reference therefore computes shard by shard (a row block is no split in that sense).
"""

from __future__ import annotations

from typing import Any

import pytest
from distributed import run_ranks
from parity import HOST_TYPES, Collections, PlacedTable, plan_of, torchrec_plan_of, train_beside_reference
from torch import nn
from torchrec.distributed.types import ShardingPlan, ShardingType

from torchrec_neuroshard.problem import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE

TABLE_ROW_WISE, GRID_SHARD = ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value
RANKS = 2
TOLERANCE = 1e-5
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad")

# Two collections that share a table name: each mixes all four types, with uneven splits and uneven last row blocks.
MIXED: Collections = {
    "user": (
        PlacedTable("uneven", 90, 128, ("a",), COLUMN_WISE, ((1, 96), (0, 32))),
        PlacedTable("one_shard", 40, 32, ("b", "c"), COLUMN_WISE, ((0, 32),)),
        PlacedTable("whole", 60, 16, ("d",), TABLE_WISE, ((1, 16),)),
        PlacedTable("rows", 91, 64, ("e",), ROW_WISE),
        PlacedTable("copies", 30, 24, ("f",), DATA_PARALLEL),
    ),
    "weighted_item": (
        PlacedTable("uneven", 50, 48, ("a",), COLUMN_WISE, ((0, 12), (1, 36))),
        PlacedTable("rows", 33, 20, ("b", "c"), ROW_WISE),
        PlacedTable("whole", 25, 64, ("d",), TABLE_WISE, ((0, 64),)),
        PlacedTable("copies", 20, 8, ("e",), DATA_PARALLEL),
    ),
}


def held_on(rank: int, collections: Collections, local_world_size: int) -> int:
    """Shards and replicas that a rank has to hold."""
    count = 0
    for table in (table for tables in collections.values() for table in tables):
        owner = rank // local_world_size if table.kind in HOST_TYPES else rank
        count += sum(where == owner for where, _ in table.pieces) if table.pieces else 1
    return count


def mixed_worker(rank: int) -> dict[str, dict[str, float]]:
    def plan_for(model: nn.Module, sharders: list[Any]) -> ShardingPlan:
        return plan_of(MIXED, model, sharders, RANKS)

    results = {optimizer: train_beside_reference(rank, RANKS, MIXED, optimizer, plan_for) for optimizer in OPTIMIZERS}
    results["whole_rows"] = train_beside_reference(
        rank, RANKS, MIXED, "rowwise_adagrad", plan_for, steps=1, whole_rows=True
    )
    return results


@pytest.fixture(scope="module")
def mixed() -> list[dict[str, dict[str, float]]]:
    return run_ranks(mixed_worker, RANKS)


def check_parity(result: dict[str, float]) -> None:
    assert result["outputs"] < TOLERANCE
    assert result["weights"] < TOLERANCE
    assert result["moved"] > 1e-3  # every step changed every table


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_types_in_two_collections_train_as_the_unsharded_tables(
    mixed: list[dict[str, dict[str, float]]], optimizer: str
) -> None:
    for rank, results in enumerate(mixed):
        check_parity(results[optimizer])
        assert results[optimizer]["held"] == held_on(rank, MIXED, RANKS)


def test_a_column_split_changes_row_wise_adagrad(mixed: list[dict[str, dict[str, float]]]) -> None:
    for results in mixed:
        assert results["whole_rows"]["outputs"] < TOLERANCE  # before the first step
        assert results["whole_rows"]["weights"] > 1e-3


# Two hosts of two ranks: rows within a host; columns over hosts, rows within each. TorchRec runs grid_shard with uneven
# widths, hosts in any order, and several column blocks on one host if these are equally wide.
HOSTS: Collections = {
    "user": (
        PlacedTable("host_rows", 91, 64, ("a", "b"), TABLE_ROW_WISE, ((1, 64),)),
        PlacedTable("host_rows_too", 40, 32, ("c",), TABLE_ROW_WISE, ((0, 32),)),
        PlacedTable("grid", 63, 80, ("d",), GRID_SHARD, ((1, 64), (0, 16))),
        PlacedTable("rows", 57, 16, ("e",), ROW_WISE),
        PlacedTable("columns", 45, 48, ("f",), COLUMN_WISE, ((2, 16), (1, 24), (0, 8))),
        PlacedTable("whole", 25, 8, ("g",), TABLE_WISE, ((3, 8),)),
        PlacedTable("copies", 20, 12, ("h",), DATA_PARALLEL),
    ),
    "weighted_item": (
        PlacedTable("host_rows", 30, 16, ("a",), TABLE_ROW_WISE, ((1, 16),)),
        PlacedTable("grid", 41, 24, ("b",), GRID_SHARD, ((0, 8), (1, 8), (0, 8))),
    ),
}


def hosts_worker(rank: int) -> dict[str, dict[str, float]]:
    def plan_for(model: nn.Module, sharders: list[Any]) -> ShardingPlan:
        return torchrec_plan_of(HOSTS, 4, 2)

    return {
        optimizer: train_beside_reference(rank, 4, HOSTS, optimizer, plan_for, steps=2)
        for optimizer in ("adagrad", "rowwise_adagrad")
    }


def test_types_that_cut_rows_within_hosts_train_as_the_unsharded_tables() -> None:
    for rank, results in enumerate(run_ranks(hosts_worker, 4, local_world_size=2)):
        for result in results.values():
            check_parity(result)
            assert result["held"] == held_on(rank, HOSTS, 2)
