"""The search against independent checks, exhaustive enumeration and its own guarantees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.problems import WeightMemory, random_problem, untrained_model, whole_table_placements
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    InfeasibleError,
    Pipeline,
    ShardingProblem,
    TableOptions,
)
from torchrec_neuroshard.search import SearchConfig, find_placement
from torchrec_neuroshard.search.beam import Scored, beam_search, score
from torchrec_neuroshard.search.feasibility import feasible_placement, first_fit_decreasing
from torchrec_neuroshard.search.greedy import place_candidates
from torchrec_neuroshard.search.splits import divide, split_table, whole_tables

SLOW_DATA = [HealthCheck.too_slow]


@settings(max_examples=30, deadline=None, suppress_health_check=SLOW_DATA)
@given(
    seed=st.integers(0, 10_000),
    tables=st.integers(1, 20),
    ranks=st.integers(1, 6),
    fill=st.floats(0.2, 0.9),
    min_width=st.sampled_from([4, 16, 32, 128]),
    modules=st.integers(1, 2),
    pipeline=st.sampled_from(list(Pipeline)),
)
def test_every_placement_passes_the_independent_check(
    seed: int, tables: int, ranks: int, fill: float, min_width: int, modules: int, pipeline: Pipeline
) -> None:
    problem = random_problem(seed, tables, ranks, fill, min_width, modules, pipeline)
    try:
        result = find_placement(problem, untrained_model(), SearchConfig(levels=3))
    except InfeasibleError as error:
        assert error.needed[1] > 0
        return
    assert check_placement(problem, result.placement) == []
    again = PlanSimulator(problem, untrained_model()).cost(result.placement)
    assert result.cost.total_ms == pytest.approx(again.total_ms)
    homes = [(shard.table, shard.rank) for shard in result.placement.shards]
    assert len(set(homes)) == len(homes)  # TorchRec cannot slice two shards of a table on one rank


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pipeline", [Pipeline.SPARSE_DIST, Pipeline.NONE])
def test_close_to_the_exhaustive_optimum_of_whole_tables(seed: int, pipeline: Pipeline) -> None:
    problem = random_problem(seed, tables=6, ranks=3, fill=0.3, min_width=1024, pipeline=pipeline)
    model = untrained_model(seed)
    simulator = PlanSimulator(problem, model)
    optimum = min(
        simulator.cost(placement).total_ms
        for placement in whole_table_placements(problem)
        if not check_placement(problem, placement)
    )
    found = find_placement(problem, model).cost.total_ms
    assert found >= optimum * (1 - 1e-9)
    assert found <= optimum * 1.03


def test_never_worse_than_its_greedy_start() -> None:
    for seed in range(4):
        problem = random_problem(seed, tables=20, ranks=4)
        model = untrained_model()
        greedy = place_candidates(PlanSimulator(problem, model), [whole_tables(problem)], SearchConfig())[0]
        assert find_placement(problem, model).cost.total_ms <= greedy.total_ms * (1 + 1e-9)


def test_greedy_agrees_with_the_simulator() -> None:
    from torchrec_neuroshard.search.feasibility import placement_of

    problem, model = random_problem(3, tables=15, ranks=4, modules=2), untrained_model()
    simulator = PlanSimulator(problem, model)
    splits = whole_tables(problem)
    finer = split_table(problem, splits, next(t for t in range(15) if problem.splittable(t)))
    assert finer is not None
    for candidate, placed in zip((splits, finer), place_candidates(simulator, [splits, finer], SearchConfig())):
        assert simulator.cost(placement_of(problem, candidate, placed.ranks)).total_ms == pytest.approx(placed.total_ms)


def test_batched_greedy_equals_one_candidate_at_a_time() -> None:
    problem, model = random_problem(5, tables=15, ranks=4), untrained_model()
    simulator, config = PlanSimulator(problem, model), SearchConfig()
    candidates = [whole_tables(problem)]
    for table in range(8):
        finer = split_table(problem, candidates[0], table)
        if finer is not None:
            candidates.append(finer)
    together = place_candidates(simulator, candidates, config)
    for candidate, placed in zip(candidates, together):
        alone = place_candidates(simulator, [candidate], config)[0]
        assert alone.total_ms == pytest.approx(placed.total_ms)
        assert alone.ranks.tolist() == placed.ranks.tolist()


def test_hot_table_is_split_when_that_balances() -> None:
    problem = random_problem(1, tables=8, ranks=8, fill=0.1)
    tables = [replace(t, embedding_dim=128, pooling_factor=2.0) for t in problem.tables]
    tables[0] = replace(tables[0], pooling_factor=150.0, num_embeddings=1_000_000, access=None)
    problem = ShardingProblem(
        tuple(tables), problem.options, replace(problem.cluster, capacity=problem.cluster.capacity * 50), 256,
        WeightMemory(tuple(tables)),
    )  # fmt: skip
    result = find_placement(problem, untrained_model())
    assert sum(s.table == 0 for s in result.placement.shards) > 1
    assert set(result.placement.sharding_types) == {COLUMN_WISE}  # unsplit tables join the split ones' TBE


def test_tables_that_may_not_be_split_stay_whole() -> None:
    problem = random_problem(2, tables=6, ranks=3, fill=0.2)
    options = [TableOptions((TABLE_WISE,), 4) for _ in problem.tables]
    options[0] = TableOptions((COLUMN_WISE,), 4)
    problem = replace(problem, options=tuple(options))
    placement = find_placement(problem, untrained_model()).placement
    assert placement.sharding_types[1:] == (TABLE_WISE,) * 5
    assert placement.sharding_types[0] == COLUMN_WISE
    assert check_placement(problem, placement) == []


def test_tight_memory_is_packed_by_uneven_cuts() -> None:
    solved = 0
    for seed in range(10):
        problem = random_problem(seed, tables=8, ranks=4, fill=0.97, min_width=4)
        placement = feasible_placement(problem)
        assert check_placement(problem, placement) == []
        solved += first_fit_decreasing(problem, whole_tables(problem)) is None
    assert solved > 0  # some of them need cuts


def test_five_tables_that_fit_only_in_pairs() -> None:
    problem = random_problem(0, tables=5, ranks=2, min_width=1024)
    sizes = [500, 500, 400, 400, 200]
    tables = tuple(
        replace(t, num_embeddings=size * 1000, embedding_dim=250 * 4 // 4, access=None)
        for t, size in zip(problem.tables, sizes)
    )

    def memory(table: int, width: int) -> tuple[float, float]:
        return 0.0, sizes[table] * width / 250.0

    capacity = np.zeros((2, 2))
    capacity[:, 1] = 1001.0
    options = tuple(TableOptions((TABLE_WISE, COLUMN_WISE), 20) for _ in tables)
    problem = ShardingProblem(tables, options, replace(problem.cluster, capacity=capacity), 256, memory)
    assert check_placement(problem, find_placement(problem, untrained_model()).placement) == []


def test_infeasible_problems_say_what_is_missing() -> None:
    problem = random_problem(0, tables=6, ranks=2, fill=1.5)
    with pytest.raises(InfeasibleError, match="in all") as caught:
        find_placement(problem, untrained_model())
    assert caught.value.needed[1] > caught.value.available[1] > 0
    narrow = random_problem(0, tables=3, ranks=4, fill=1.2, min_width=128)
    with pytest.raises(InfeasibleError, match="does not fit on any rank") as caught:
        find_placement(narrow, untrained_model())
    assert caught.value.table is not None


def test_timeout_still_returns_a_plan() -> None:
    problem = random_problem(0, tables=40, ranks=8)
    result = find_placement(problem, untrained_model(), SearchConfig(timeout_seconds=1e-6))
    assert check_placement(problem, result.placement) == []


def test_no_tables_and_one_rank() -> None:
    problem = random_problem(0, tables=3, ranks=1)
    assert {s.rank for s in find_placement(problem, untrained_model()).placement.shards} == {0}
    empty = replace(problem, tables=(), options=())
    assert find_placement(empty, untrained_model()).placement.shards == ()


def test_zero_pooling_is_a_cost_of_launches_only() -> None:
    problem = random_problem(0, tables=4, ranks=2, fill=0.3)
    tables = tuple(replace(t, pooling_factor=0.0) for t in problem.tables)
    problem = replace(problem, tables=tables, memory=WeightMemory(tables))
    result = find_placement(problem, untrained_model())
    assert np.isfinite(result.cost.total_ms) and result.cost.total_ms > 0


def test_beam_keeps_its_best_and_logs_every_level() -> None:
    problem, model = random_problem(7, tables=10, ranks=6, fill=0.2), untrained_model()
    levels: list[tuple[int, float]] = []
    kept = beam_search(
        PlanSimulator(problem, model),
        score(PlanSimulator(problem, model), [whole_tables(problem)], SearchConfig(levels=4)),
        SearchConfig(levels=4),
        lambda: False,
        lambda level, scored: levels.append((level, scored.total_ms)),
    )
    assert all(isinstance(scored, Scored) for scored in kept)
    totals = [total for _, total in levels]
    assert totals == sorted(totals, reverse=True)
    assert kept[0].total_ms == totals[-1]


@given(st.integers(1, 64).map(lambda n: 4 * n), st.integers(1, 256), st.floats(0.05, 0.95))
def test_divide_respects_the_narrowest_width(width: int, min_width: int, share: float) -> None:
    pieces = divide(width, min_width, share)
    if pieces is None:
        assert width < 2 * min_width + 8
    else:
        assert sum(pieces) == width
        assert all(piece >= min_width and piece % 4 == 0 for piece in pieces)


def test_same_placement_in_any_process() -> None:
    script = (
        "import json, torch; torch.set_num_threads(1)\n"
        "from tests.problems import random_problem, untrained_model\n"
        "from torchrec_neuroshard.search import find_placement\n"
        "r = find_placement(random_problem(11, tables=20, ranks=5), untrained_model())\n"
        "print(json.dumps([[s.table, s.offset, s.width, s.rank] for s in r.placement.shards]))\n"
    )
    outputs = []
    for hash_seed in ("0", "77"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )
        outputs.append(json.loads(run.stdout.splitlines()[-1]))
    assert outputs[0] == outputs[1]
