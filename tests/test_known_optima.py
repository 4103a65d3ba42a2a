"""Known optima against naive enumeration and each other, and the search against known optima."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import search_gap
from benchmarks.known_optima.cp_sat import cp_sat_optimum
from benchmarks.known_optima.exhaustive import affordable_ways, exhaustive_optimum
from benchmarks.known_optima.gaps import (
    Goal,
    below,
    family_objective,
    gap,
    problem_digest,
    reference_optimum,
    searched,
)
from benchmarks.known_optima.problems import ADDITIVE, FAMILIES, FUSED, ROOMY_FILL, TIGHT_FILL, Family, is_tight
from benchmarks.known_optima.reference import PROVED, Ways, finer_ways, placement_from, reference_ways
from torchrec_neuroshard.costs.additive_simulator import Objective, simulate, single_shard_costs
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import COLUMN_WISE, WIDTH_MULTIPLE, ShardingProblem, TableOptions

SMALL = {False: Family("small", additive=False, tables=(2, 3), ranks=(2, 3)),
         True: Family("small", additive=True, tables=(2, 3), ranks=(2, 3))}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> CostModel:
    return CostModel.load("cpu")


def naive_optimum(problem: ShardingProblem, objective: Objective, ways: Ways | None = None) -> float:
    """The least cost over all placements, one after another."""
    simulator = simulate(problem, objective)
    ranks = range(problem.cluster.world_size)
    choices = [
        [
            [(table, width, rank) for width, rank in zip(widths, homes)]
            for widths in splits
            for homes in itertools.permutations(ranks, len(widths))
        ]
        for table, splits in enumerate(reference_ways(problem) if ways is None else ways)
    ]
    best = math.inf
    for chosen in itertools.product(*choices):
        placement = placement_from(problem, itertools.chain.from_iterable(chosen))
        if not check_placement(problem, placement):
            best = min(best, simulator.cost(placement).total_ms)
    return best


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("additive", [False, True])
def test_enumeration_agrees_with_one_placement_after_another(model: CostModel, additive: bool, seed: int) -> None:
    family = SMALL[additive]
    problem = family.problem(seed)
    objective = family_objective(family, problem, model)
    optimum = exhaustive_optimum(problem, objective)
    assert optimum.total_ms == pytest.approx(naive_optimum(problem, objective), rel=PROVED)
    assert optimum.proved and optimum.placement is not None
    assert check_placement(problem, optimum.placement) == []
    priced = simulate(problem, objective).cost(optimum.placement).total_ms
    assert priced == pytest.approx(optimum.total_ms, rel=PROVED)


@pytest.mark.parametrize("seed", [5, 9])
def test_enumeration_of_finer_splits(model: CostModel, seed: int) -> None:
    """With cuts in three among them, some equal and some not."""
    problem = SMALL[False].problem(seed)
    problem = replace(problem, options=tuple(replace(options, min_width=WIDTH_MULTIPLE) for options in problem.options))
    ways = finer_ways(problem, 4)
    assert all(set(known) < set(finer) or len(finer) < 4 for known, finer in zip(reference_ways(problem), ways))
    objective = family_objective(FUSED, problem, model)
    optimum = exhaustive_optimum(problem, objective, ways)
    assert optimum.total_ms == pytest.approx(naive_optimum(problem, objective, ways), rel=PROVED)


def test_enumeration_tells_ranks_apart_that_differ(model: CostModel) -> None:
    problem = FUSED.problem(24)  # 3 tables on 2 ranks
    capacity = problem.cluster.capacity.copy()
    capacity[1] *= 0.4
    apart = replace(problem, cluster=replace(problem.cluster, capacity=capacity, local_world_size=1))
    objective = family_objective(FUSED, apart, model)
    assert exhaustive_optimum(apart, objective).total_ms == pytest.approx(naive_optimum(apart, objective), rel=PROVED)


@pytest.mark.parametrize("seed", range(8))
def test_enumeration_agrees_with_cp_sat(model: CostModel, seed: int) -> None:
    problem = FUSED.problem(seed)
    objective = single_shard_costs(problem, model)
    proved = cp_sat_optimum(problem, objective)
    assert proved.proved and proved.placement is not None
    assert check_placement(problem, proved.placement) == []
    assert proved.total_ms == pytest.approx(exhaustive_optimum(problem, objective).total_ms, rel=PROVED)
    finest = cp_sat_optimum(problem, objective, unit=WIDTH_MULTIPLE)
    assert finest.proved and finest.placement is not None
    assert check_placement(problem, finest.placement) == []
    assert finest.total_ms <= proved.total_ms * (1 + PROVED)
    assert finest.total_ms <= exhaustive_optimum(problem, objective, affordable_ways(problem)).total_ms * (1 + PROVED)


def test_all_splits_of_few_tables_are_enumerated(model: CostModel) -> None:
    problem = FUSED.problem(24)  # 3 tables on 2 ranks
    objective = single_shard_costs(problem, model)
    assert affordable_ways(problem) == finer_ways(problem, 128 // WIDTH_MULTIPLE)
    every = exhaustive_optimum(problem, objective, affordable_ways(problem))
    proved = cp_sat_optimum(problem, objective, unit=WIDTH_MULTIPLE)
    assert every.total_ms == pytest.approx(proved.total_ms, rel=PROVED)


def test_the_placements_priced_are_those_of_the_simulator(model: CostModel) -> None:
    """No placement drawn at random is better than the optimum, and the optimum is not below what it costs."""
    rng = np.random.default_rng(0)
    for seed in (4, 6, 14):  # pipelines and modules differ
        problem = FUSED.problem(seed)
        objective = family_objective(FUSED, problem, model)
        simulator, optimum = simulate(problem, objective), exhaustive_optimum(problem, objective)
        for _ in range(100):
            pieces = []
            for table, splits in enumerate(reference_ways(problem)):
                widths = splits[int(rng.integers(len(splits)))]
                pieces += [(table, w, int(r)) for w, r in zip(widths, rng.permutation(problem.cluster.world_size))]
            placement = placement_from(problem, pieces)
            if not check_placement(problem, placement):
                assert simulator.cost(placement).total_ms >= optimum.total_ms * (1 - PROVED)


def test_that_nothing_fits_is_known(model: CostModel) -> None:
    problem = FUSED.problem(1)
    problem = replace(problem, cluster=replace(problem.cluster, capacity=problem.cluster.capacity * 0.85))
    for family in FAMILIES:
        objective = family_objective(family, problem, model)
        optimum = reference_optimum(problem, objective)
        assert optimum.placement is None and optimum.proved and math.isinf(optimum.total_ms)
        assert searched(problem, objective) is None


def test_a_search_cut_short_is_not_proved(model: CostModel) -> None:
    problem = ADDITIVE.problem(6)
    optimum = cp_sat_optimum(problem, single_shard_costs(problem, model), unit=WIDTH_MULTIPLE, limit=0.02)
    assert not optimum.proved
    assert optimum.bound_ms <= optimum.total_ms


def test_tables_that_enumeration_cannot_tell_groups_of_are_refused(model: CostModel) -> None:
    problem = FUSED.problem(0)
    options = (TableOptions((COLUMN_WISE,), WIDTH_MULTIPLE), *problem.options[1:])
    with pytest.raises(ValueError, match="table_wise and column_wise"):
        exhaustive_optimum(replace(problem, options=options), model)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_problems_are_as_described(family: Family) -> None:
    for seed in range(16):
        problem, again = family.problem(seed), family.problem(seed)
        assert problem.tables == again.tables and (problem.cluster.capacity == again.cluster.capacity).all()
        needed = sum(problem.shard_memory(t, of.embedding_dim)[1] for t, of in enumerate(problem.tables))
        low, high = TIGHT_FILL if is_tight(seed) else ROOMY_FILL
        assert low - 1e-6 <= needed / problem.cluster.capacity[:, 1].sum() <= high + 1e-6
        assert family.tables[0] <= len(problem.tables) <= family.tables[1]
        assert family.ranks[0] <= problem.cluster.world_size <= family.ranks[1]
        for of, splits in zip(problem.tables, reference_ways(problem)):  # all cuts that the reference knows are allowed
            assert len(splits) == (3 if of.embedding_dim % 16 == 0 else 2)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_search_comes_close_to_known_optima(model: CostModel, family: Family) -> None:
    gaps = []
    for seed in range(12):
        problem = family.problem(seed)
        objective = family_objective(family, problem, model)
        optimum, found = reference_optimum(problem, objective), searched(problem, objective)
        assert optimum.proved
        assert found is not None, f"seed {seed}: the search found no placement that fits"
        gaps.append(gap(found.cost.total_ms, optimum.total_ms))
    assert Goal().met_by(gaps), [f"{100 * one:.2f} %" for one in gaps]


def test_gaps_forgive_rounding_only() -> None:
    assert gap(1.0 + 0.5 * PROVED, 1.0) == 0.0 and not below(1.0 - 0.5 * PROVED, 1.0)
    assert gap(1.01, 1.0) == pytest.approx(0.01) and below(0.99, 1.0) and gap(0.99, 1.0) == 0.0
    assert Goal().met_by([0.0, 0.0, 0.01, 0.0]) and not Goal().met_by([0.0, 0.04, 0.0])
    assert not Goal().met_by([0.0, math.inf, 0.0])


def test_the_benchmark_resumes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "gaps.jsonl"
    arguments = ["--problems", "2", "--cost-model", "cpu", "--store", str(store)]
    assert search_gap.main([*arguments, "--minutes", "0"]) == 0
    assert "4 of 4 problems are not solved yet" in capsys.readouterr().err
    assert search_gap.main(arguments) == 0
    content, printed = store.read_bytes(), capsys.readouterr().out
    assert len(content.splitlines()) == 12  # two optima and a search for each problem
    assert "fused" in printed and "additive" in printed and "goal" in printed
    assert search_gap.main([*arguments, "--minutes", "0"]) == 0
    assert store.read_bytes() == content and capsys.readouterr().out == printed
    assert search_gap.main(["--problems", "1", "--cost-model", "no such model", "--store", str(store)]) == 2


def test_the_digest_follows_prices_and_memory(model: CostModel) -> None:
    problem = FUSED.problem(2)
    objective = family_objective(FUSED, problem, model)
    digest = problem_digest(problem, objective)
    assert digest == problem_digest(FUSED.problem(2), objective)
    larger = replace(problem, batch_size=2 * problem.batch_size)
    roomier = replace(problem, cluster=replace(problem.cluster, capacity=2 * problem.cluster.capacity))
    assert len({digest, *(problem_digest(other, objective) for other in (larger, roomier))}) == 3
