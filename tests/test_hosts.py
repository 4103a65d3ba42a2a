"""Tables that stay within a host, table-row-wise, table-column-wise and by grid: layout, costs, search and plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_models import ANALYTIC, bag_collection, bag_config
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from torchrec.distributed.types import ModuleSharder

from tests.problems import random_problem, untrained_model
from tests.test_spread import SpreadMemory, check_search
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.bucketize import bucketize_ms
from torchrec_neuroshard.costs.features import segment_sums, shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.row_wise import row_wise_work
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    GRID_SHARD,
    ROW_WISE,
    SPREAD_TYPES,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Placement,
    ShardingProblem,
    Spread,
    Table,
    TableOptions,
)
from torchrec_neuroshard.search import find_placement


def on_hosts(
    problem: ShardingProblem, ranks_per_host: int, kinds: tuple[str, ...], link_gbps: float = 1.0
) -> ShardingProblem:
    """The problem with its ranks on several hosts, and tables that may be of these types."""
    ranks = problem.cluster.world_size
    return replace(
        problem,
        options=tuple(TableOptions(kinds, option.min_width) for option in problem.options),
        memory=SpreadMemory(problem.tables, ranks, ranks_per_host),
        cluster=replace(problem.cluster, local_world_size=ranks_per_host, inter_host_gbps=link_gbps),
    )


@pytest.mark.parametrize(("rows", "dim"), [(100, 128), (7, 64), (1, 32)])
def test_blocks_are_cut_as_torchrec_cuts_them(rows: int, dim: int) -> None:
    parameter = torch.empty(rows, dim, device="meta")
    spreads = {
        ROW_WISE: Spread(ROW_WISE),
        TABLE_ROW_WISE: Spread(TABLE_ROW_WISE, ((dim, 2),)),
        GRID_SHARD: Spread(GRID_SHARD, ((dim // 2, 2), (dim // 2, 0))),
        TABLE_COLUMN_WISE: Spread(TABLE_COLUMN_WISE, ((dim // 2, 3), (dim // 2, 2))),
    }
    for kind, spread in spreads.items():
        sizes, offsets = calculate_shard_sizes_and_offsets(parameter, 4, 2, kind, col_wise_shard_dim=dim // 2)
        blocks = spread.blocks(rows, dim, world_size=4, ranks_per_host=2)
        assert [[block.rows, block.width] for block in blocks] == sizes
        # Where a block is empty, TorchRec's offset may lie behind the last row.
        assert [[block.first_row, block.offset] for block in blocks if block.rows] == [
            offset for offset, size in zip(offsets, sizes) if size[0]
        ]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    tables=st.integers(1, 10),
    hosts=st.integers(1, 3),
    per_host=st.integers(1, 3),
    left_over=st.integers(0, 1),
    fill=st.floats(0.2, 0.97),
    kinds=st.sets(st.sampled_from((TABLE_WISE, "column_wise", *SPREAD_TYPES)), min_size=1),
)
def test_every_placement_passes_the_independent_check(
    seed: int, tables: int, hosts: int, per_host: int, left_over: int, fill: float, kinds: set[str]
) -> None:
    problem = random_problem(seed, tables, hosts * per_host + left_over, fill)
    check_search(on_hosts(problem, per_host, tuple(sorted(kinds))), seed)


def hot_table() -> Table:
    return Table("hot", 4_000_000, 64, 200.0, access=AccessDistribution.zipf(4_000_000, 0.6), module="ebc0")


def test_table_row_wise_costs_are_those_of_its_hosts_blocks_and_two_collectives() -> None:
    base = random_problem(3, tables=1, ranks=4)
    problem = on_hosts(replace(base, tables=(hot_table(),)), 2, (TABLE_ROW_WISE,))
    model = untrained_model()
    spread = Spread(TABLE_ROW_WISE, ((64, 2),))
    simulator = PlanSimulator(problem, model)
    cost = simulator.cost(Placement((), (TABLE_ROW_WISE,), (spread,)))
    z = model.groups.contributions(shard_features(row_wise_work(problem.tables[0], 2, problem.global_batch_size)))
    expected = model.groups.predict(segment_sums(z, np.arange(2), 2)).sum(axis=1)
    assert cost.compute_ms.tolist()[:2] == [0.0, 0.0]
    assert cost.compute_ms[2:] == pytest.approx(expected)
    collectives = model.collectives.on_links(problem.cluster.intra_host_gbps, problem.cluster.inter_host_gbps)
    within = collectives.reduce_scatter(problem.batch_size * 2, np.asarray([64.0]), 2, 2)[0]
    across = collectives.all_to_all(problem.batch_size, np.asarray([[0.0, 64.0]]), False, 1)[0]
    sorting = bucketize_ms(HARDWARE["generic_cpu"], problem.batch_size * 200.0, problem.batch_size, 2)
    assert cost.forward_comms_ms == pytest.approx(np.full(4, within + across + sorting))


def test_over_a_slow_link_hot_tables_are_cut_within_their_hosts() -> None:
    base = random_problem(3, tables=8, ranks=4, fill=0.3)
    base = replace(
        base,
        tables=(*base.tables, hot_table(), replace(hot_table(), name="hot_too")),
        options=(*base.options, base.options[0], base.options[0]),
        cluster=replace(base.cluster, capacity=base.cluster.capacity * 40),
    )
    model = untrained_model()
    slow = on_hosts(base, 2, (TABLE_WISE, ROW_WISE, TABLE_ROW_WISE), link_gbps=0.02)
    found = find_placement(slow, model)
    assert found.placement.sharding_types[-2:] == (TABLE_ROW_WISE, TABLE_ROW_WISE)
    assert {spread.pieces[0][1] for spread in found.placement.spreads[-2:] if spread} == {0, 2}
    everywhere = on_hosts(base, 2, (TABLE_WISE, ROW_WISE), link_gbps=0.02)
    assert found.cost.total_ms < find_placement(everywhere, model).cost.total_ms


@pytest.mark.parametrize("kind", [TABLE_ROW_WISE, GRID_SHARD, TABLE_COLUMN_WISE])
def test_plans_of_types_within_hosts_are_built_as_torchrecs(kind: str) -> None:
    """TorchRec's planner, given the same single type, cuts the table alike; ours runs through all its validators."""
    model = nn.Sequential(bag_collection(bag_config("t", 1_001, 256, ["a", "b"])))
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda")
    constraints = {"t": ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"], min_partition=128)}
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]
    ours = NeuroShardPlanner(topology, 64, constraints, cost_model=ANALYTIC, hardware="h100_sxm").plan(model, sharders)
    theirs = EmbeddingShardingPlanner(topology, 64, constraints=constraints).plan(model, sharders)
    mine, other = (plan.plan["0"]["t"] for plan in (ours, theirs))
    assert (mine.sharding_type, mine.compute_kernel) == (other.sharding_type, other.compute_kernel)

    def shape(sharding: Any) -> list[tuple[list[int], list[int]]]:
        return [(list(shard.shard_sizes), list(shard.shard_offsets)) for shard in sharding.sharding_spec.shards]

    assert shape(mine) == shape(other)
    hosts = {rank // 2 for rank in mine.ranks}
    assert len(mine.ranks) == len(other.ranks) and len(hosts) == (2 if kind == GRID_SHARD else 1)


def test_columns_within_a_host_are_cut_where_the_table_fits_on_no_rank() -> None:
    model = nn.Sequential(bag_collection(bag_config("t", 1_000_000, 256)))
    constraints = {
        "t": ParameterConstraints(sharding_types=["table_column_wise"], compute_kernels=["fused"], min_partition=64)
    }
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]

    def plan(gib: float) -> object:
        topology = Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=int(gib * 2**30))
        planner = NeuroShardPlanner(topology, 64, constraints, cost_model=ANALYTIC, hardware="h100_sxm")
        return planner.plan(model, sharders).plan["0"]["t"]

    sharding = plan(1.0)
    assert sharding.sharding_type == TABLE_COLUMN_WISE  # type: ignore[attr-defined]
    assert len(sharding.ranks) == 2 and len({rank // 2 for rank in sharding.ranks}) == 1  # type: ignore[attr-defined]
    with pytest.raises(PlannerError, match="table_column_wise it needs .* GiB of HBM"):
        plan(0.5)


def test_rows_are_not_cut_within_hosts_that_are_not_full() -> None:
    """TorchRec's run time takes three ranks of hosts of two for one host of three, and fails on cuts for two."""
    model = nn.Sequential(bag_collection(bag_config("t", 1_001, 64)))
    topology = Topology(world_size=3, local_world_size=2, compute_device="cuda")
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]

    def plan(kinds: list[str]) -> object:
        constraints = {"t": ParameterConstraints(sharding_types=kinds)}
        planner = NeuroShardPlanner(topology, 64, constraints, cost_model=ANALYTIC, hardware="h100_sxm")
        return planner.plan(model, sharders).plan["0"]["t"].sharding_type  # type: ignore[index]

    with pytest.raises(PlannerError, match="a multiple of a host's ranks"):
        plan([TABLE_ROW_WISE, GRID_SHARD])
    assert plan([TABLE_ROW_WISE, ROW_WISE]) == ROW_WISE


def test_columns_within_a_host_are_cut_to_balance_too() -> None:
    """A hot table that fits on a rank is cut over the ranks of its host; whole it would be the bottleneck."""
    configs = [bag_config("hot", 1_000_000, 256), *(bag_config(f"t{index}", 1_000, 16) for index in range(4))]
    model = nn.Sequential(bag_collection(*configs))
    topology = Topology(world_size=8, local_world_size=4, compute_device="cuda")
    sharders: list[ModuleSharder[nn.Module]] = [EmbeddingBagCollectionSharder()]  # type: ignore[list-item]
    for kinds in ([TABLE_COLUMN_WISE], [TABLE_WISE, TABLE_COLUMN_WISE]):
        constraints = {
            "hot": ParameterConstraints(
                sharding_types=kinds, compute_kernels=["fused"], pooling_factors=[100.0], min_partition=64
            )
        }
        planner = NeuroShardPlanner(topology, 512, constraints, cost_model="analytic/h100_sxm", hardware="h100_sxm")
        hot = planner.plan(model, sharders).plan["0"]["hot"]  # type: ignore[index]
        assert hot.sharding_type == TABLE_COLUMN_WISE
        assert len(set(hot.ranks)) == 4 and len({rank // 4 for rank in hot.ranks}) == 1
