"""Tables that lie on all ranks: row-wise and data-parallel ones in the simulator and the search."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.problems import WeightMemory, random_problem, untrained_model
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective, simulate
from torchrec_neuroshard.costs.bucketize import bucketize_ms
from torchrec_neuroshard.costs.features import segment_sums, shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.row_wise import row_wise_work
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    EVERYWHERE_TYPES,
    ROW_WISE,
    TABLE_WISE,
    InfeasibleError,
    Placement,
    ShardingProblem,
    Spread,
    Table,
    TableOptions,
)
from torchrec_neuroshard.search import SearchConfig, find_placement
from torchrec_neuroshard.search.lower_bound import lower_bound_ms
from torchrec_neuroshard.search.spread import _Trials


class SpreadMemory(WeightMemory):
    """Bytes of the weights alone, in host memory, wherever they lie."""

    def __init__(self, tables: tuple[Table, ...], ranks: int, ranks_per_host: int = 0) -> None:
        super().__init__(tables)
        self._ranks, self._ranks_per_host = ranks, ranks_per_host or ranks

    def spread(self, table: int, spread: Spread) -> np.ndarray:
        entry = self._tables[table]
        blocks = spread.blocks(entry.num_embeddings, entry.embedding_dim, self._ranks, self._ranks_per_host)
        return np.asarray([(0.0, 4.0 * block.rows * block.width) for block in blocks])


def with_all_types(problem: ShardingProblem) -> ShardingProblem:
    return replace(
        problem,
        options=tuple(
            TableOptions((*option.sharding_types, *EVERYWHERE_TYPES), option.min_width) for option in problem.options
        ),
        memory=SpreadMemory(problem.tables, problem.cluster.world_size),
    )


def check_search(problem: ShardingProblem, seed: int) -> None:
    """What the search finds passes the independent check and costs what it says, or there are numbers why not."""
    model = untrained_model(seed)
    try:
        result = find_placement(problem, model, SearchConfig(levels=2, repack_rounds=20))
    except InfeasibleError as error:
        assert error.needed[1] > 0
        return
    assert check_placement(problem, result.placement) == []
    assert PlanSimulator(problem, model).cost(result.placement).total_ms == pytest.approx(result.cost.total_ms)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    tables=st.integers(1, 14),
    ranks=st.integers(1, 6),
    fill=st.floats(0.2, 0.97),
    modules=st.integers(1, 2),
)
def test_every_placement_passes_the_independent_check(
    seed: int, tables: int, ranks: int, fill: float, modules: int
) -> None:
    check_search(with_all_types(random_problem(seed, tables, ranks, fill, 16, modules)), seed)


def hot_problem(ranks: int = 4, fill: float = 0.3) -> ShardingProblem:
    """A table that looks up far more than all others, whose columns cannot be cut."""
    base = random_problem(3, tables=8, ranks=ranks, fill=fill)
    hot = Table("hot", 4_000_000, 32, 300.0, access=AccessDistribution.zipf(4_000_000, 0.6), module="ebc0")
    tables = (*base.tables, hot)
    capacity = base.cluster.capacity * 40
    return with_all_types(
        replace(
            base,
            tables=tables,
            options=(*base.options, TableOptions((TABLE_WISE,), 32)),
            cluster=replace(base.cluster, capacity=capacity),
        )
    )


def test_a_hot_table_goes_row_wise_and_the_plan_is_better_for_it() -> None:
    problem = hot_problem()
    model = untrained_model()
    columns_only = replace(problem, options=tuple(TableOptions((TABLE_WISE,), 1024) for _ in problem.tables))
    found = find_placement(problem, model)
    assert found.placement.sharding_types[-1] == ROW_WISE
    assert found.cost.total_ms < 0.6 * find_placement(columns_only, model).cost.total_ms


def test_row_wise_costs_are_those_of_the_blocks_work() -> None:
    """One row-wise table alone: each rank's TBE does what row_wise_work says, and ranks meet at two collectives."""
    problem = hot_problem()
    model = untrained_model()
    (index,) = (i for i, table in enumerate(problem.tables) if table.name == "hot")
    only = replace(
        problem,
        tables=(problem.tables[index],),
        options=(problem.options[index],),
        memory=SpreadMemory((problem.tables[index],), 4),
    )
    cost = PlanSimulator(only, model).cost(Placement((), (ROW_WISE,)))
    work = row_wise_work(only.tables[0], 4, only.global_batch_size)
    z = model.groups.contributions(shard_features(work))
    expected = model.groups.predict(segment_sums(z, np.arange(4), 4))
    assert cost.compute_ms == pytest.approx(expected.sum(axis=1))
    collectives = model.collectives.on_links(only.cluster.intra_host_gbps, only.cluster.inter_host_gbps)
    forward = collectives.reduce_scatter(only.batch_size, np.asarray([32.0]), 4, 4)[0]
    sorting = bucketize_ms(HARDWARE["generic_cpu"], only.batch_size * 300.0, only.batch_size, 4)
    assert cost.forward_comms_ms == pytest.approx(np.full(4, forward + sorting))


def test_replicas_cost_every_rank_the_same_and_an_all_reduce() -> None:
    base = random_problem(0, tables=1, ranks=3)
    problem = with_all_types(base)
    simulator = PlanSimulator(problem, untrained_model())
    cost = simulator.cost(Placement((), (DATA_PARALLEL,)))
    assert cost.compute_ms == pytest.approx(np.full(3, cost.compute_ms[0]), rel=1e-5)
    assert cost.compute_ms[0] > 0
    assert cost.forward_comms_ms.tolist() == [0.0] * 3
    assert (cost.backward_comms_ms > 0).all()
    (shares,) = simulator.shares(Placement((), (DATA_PARALLEL,)), cost)
    assert shares.shape == (3, 5)
    assert shares[:, 0] == pytest.approx(cost.forward_ms)


def test_what_fits_no_rank_whole_goes_row_wise() -> None:
    problem = hot_problem()
    needed = problem.shard_memory(len(problem.tables) - 1, 32)[1]
    capacity = problem.cluster.capacity.copy()
    capacity[:, 1] = 0.6 * needed
    tight = replace(problem, cluster=replace(problem.cluster, capacity=capacity))
    found = find_placement(tight, untrained_model())
    assert found.placement.sharding_types[-1] == ROW_WISE
    assert check_placement(tight, found.placement) == []
    capacity[:, 1] = 0.2 * needed
    what = "'hot' does not fit: as row_wise or data_parallel it needs .* GiB of DDR"
    with pytest.raises(InfeasibleError, match=what) as error:
        find_placement(replace(problem, cluster=replace(problem.cluster, capacity=capacity)), untrained_model())
    assert error.value.needed[1] > error.value.available[1] > 0


def test_additive_costs_of_spread_tables_count_on_every_rank() -> None:
    problem = hot_problem(ranks=2)

    class Costs:
        def __call__(self, shards: list[tuple[int, int]]) -> np.ndarray:
            return np.asarray([[100.0 if table == 8 else 1.0, 0.0, 0.0, 0.0] for table, _ in shards])

        def spread(self, table: int, spread: Spread) -> np.ndarray:
            return np.full((2, 4), 10.0 if table == 8 and spread.kind == ROW_WISE else 50.0)

    objective = AdditiveObjective("given", Costs())
    found = find_placement(problem, objective)
    assert found.placement.sharding_types[-1] == ROW_WISE
    assert found.cost.total_ms == 40.0 + 4.0  # four parts of the row-wise table, and half of the eight others
    with pytest.raises(ValueError, match="no bound is known"):
        lower_bound_ms(simulate(problem, objective))


def test_trials_that_cannot_gain_are_left_out_without_changing_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = hot_problem()

    class Costs:
        def __call__(self, shards: list[tuple[int, int]]) -> np.ndarray:
            return np.asarray([[9.0 if table == 8 else 1.0 + table / 8, 0.0, 0.0, 0.0] for table, _ in shards])

        def spread(self, table: int, spread: Spread) -> np.ndarray:
            return np.full((4, 4), (2.5 if table == 8 else 0.7) / 4)

    objective, placed = AdditiveObjective("given", Costs()), []
    place = _Trials._place
    monkeypatch.setattr(_Trials, "_place", lambda self, kinds: placed.append(kinds) or place(self, kinds))
    found = find_placement(problem, objective)
    pruned = len(placed)
    monkeypatch.setattr(_Trials, "_hopeless", lambda *_: False)
    assert find_placement(problem, objective).placement == found.placement
    assert found.placement.sharding_types[-1] == ROW_WISE
    assert 0 < pruned < len(placed) - pruned


@pytest.mark.parametrize("seconds", [None, 0.001])
def test_many_tables_go_row_wise_where_nothing_else_fits(seconds: float | None) -> None:
    """Of equal tables of which a rank holds two, every third has to be cut by rows; however short the time."""
    tables = tuple(Table(f"t{i}", 50_000, 16, 1.0) for i in range(20))
    problem = with_all_types(random_problem(0, tables=20, ranks=8))
    problem = replace(
        problem,
        tables=tables,
        options=tuple(TableOptions((TABLE_WISE, ROW_WISE), 16) for _ in tables),
        memory=SpreadMemory(tables, 8),
    )
    capacity = np.zeros((8, 2))
    capacity[:, 1] = 4.0 * 50_000 * 16 * 2.6
    problem = replace(problem, cluster=replace(problem.cluster, capacity=capacity))
    found = find_placement(problem, untrained_model(), SearchConfig(timeout_seconds=seconds))
    assert check_placement(problem, found.placement) == []
    assert 4 <= found.placement.sharding_types.count(ROW_WISE)


def test_settings_that_make_no_sense_are_refused() -> None:
    for settings_ in ({"seed": -1}, {"grid": 2.5}, {"seed": None}, {"grid_span": float("nan")}, {"levels": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings_))):
            SearchConfig(**settings_)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout_seconds"):
        SearchConfig(timeout_seconds=float("nan"))


def test_no_table_is_cut_by_rows_that_would_leave_a_rank_without() -> None:
    """Five rows on four ranks are blocks of two, two, one and none."""
    problem = hot_problem()
    few = replace(problem.tables[-1], num_embeddings=5, access=AccessDistribution.zipf(5, 0.6))
    tables = (*problem.tables[:-1], few)
    problem = replace(problem, tables=tables, memory=SpreadMemory(tables, 4))
    assert find_placement(problem, untrained_model()).placement.sharding_types[-1] != ROW_WISE
