"""From placements to the fused groups of each rank."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.measure.plan_groups import rank_groups
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    Table,
    TableOptions,
)


def _problem(*tables: Table, world_size: int = 2) -> ShardingProblem:
    return ShardingProblem(
        tables=tables,
        options=tuple(TableOptions((TABLE_WISE, COLUMN_WISE), 4) for _ in tables),
        cluster=Cluster(world_size, world_size, "cpu", np.full((world_size, 2), 1e12)),
        batch_size=32,
        memory=lambda table, width: (0.0, 4.0 * tables[table].num_embeddings * width),
    )


def test_one_group_per_rank_and_key_on_the_global_batch() -> None:
    zipf = AccessDistribution.zipf(500, 1.1)
    problem = _problem(
        Table("a", 500, 64, 7.0, num_features=2, access=zipf), Table("b", 100, 16), Table("c", 100, 16, module="other")
    )
    placement = Placement(
        (Shard(0, 0, 36, 0), Shard(0, 36, 20, 1), Shard(0, 56, 8, 0), Shard(1, 0, 16, 0), Shard(2, 0, 16, 0)),
        (COLUMN_WISE, COLUMN_WISE, COLUMN_WISE),
    )
    first, second = rank_groups(problem, placement)
    # Two shards of one table on one rank are two tables of its TBE; another module has a TBE of its own.
    assert [[(s.rows, s.dim) for s in group.shards] for group in first] == [
        [(500, 36), (500, 8), (100, 16)],
        [(100, 16)],
    ]
    assert [[(s.rows, s.dim) for s in group.shards] for group in second] == [[(500, 20)]]
    assert all(group.batch_size == 64 for group in [*first, *second])
    shard = first[0].shards[0]
    assert (shard.pooling_factor, shard.num_features) == (7.0, 2)
    np.testing.assert_allclose(shard.distribution().masses, zipf.masses)
    np.testing.assert_allclose(first[0].shards[2].distribution().masses, AccessDistribution.population(100).masses)


def test_sharding_type_optimizer_and_data_type_part_groups() -> None:
    problem = _problem(
        Table("a", 100, 16),
        Table("b", 100, 16),
        Table("c", 100, 16, optimizer="adagrad"),
        Table("d", 100, 16, data_type="fp16"),
        Table("e", 100, 16, weighted=True),
    )
    placement = Placement(
        tuple(Shard(table, 0, 16, 0) for table in range(5)), (TABLE_WISE, COLUMN_WISE, *[TABLE_WISE] * 3)
    )
    first, second = rank_groups(problem, placement)
    assert second == []
    assert sorted((g.optimizer, g.data_type, g.weighted) for g in first) == [
        ("adagrad", "fp32", False),
        ("sgd", "fp16", False),
        ("sgd", "fp32", False),
        ("sgd", "fp32", False),
        ("sgd", "fp32", True),
    ]
    assert len({g.seed for g in first}) == 5


def test_types_that_are_not_whole_columns_are_refused() -> None:
    problem = _problem(Table("a", 100, 16))
    with pytest.raises(ValueError, match="table a is row_wise"):
        rank_groups(problem, Placement((Shard(0, 0, 16, 0),), ("row_wise",)))
