"""The benchmarks of searches: the paper's search in both forms, greedy baselines, tasks, comparisons."""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import search_comparison, tight_memory
from benchmarks.greedy_baselines import BALANCED, greedy_baseline, random_baseline
from benchmarks.paper_search import PaperSearchConfig, PaperSearchResult, paper_search
from benchmarks.paper_search_costs import OBJECTIVES, GroupQueries, GroupTable, Objective, PlanObjective
from benchmarks.paper_tasks import DIMS, GLOBAL_BATCH_SIZE, LIMITS, RANK_BYTES, paper_task, weights_only_problem
from benchmarks.search_comparison import code_fingerprint, main, model_fingerprint
from benchmarks.search_comparison_summary import comparison, latest
from benchmarks.tight_memory import KINDS, has_plan, run_task, size_first_halving, tight_task
from tests.problems import random_problem, untrained_model
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.additive import AdditiveGroupModel
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import TABLE_WISE, Pipeline, ShardingProblem, Table, TableOptions
from torchrec_neuroshard.search import SearchConfig, find_placement

ANALYTIC = "analytic/generic_cpu"
SMALL = PaperSearchConfig(levels=2, beam_width=2, proposals=2, grid=4)
SHORT = SearchConfig(levels=1, repack_rounds=0)


def tables(*dims: int, rows: int = 1000, pooling: float = 8.0) -> tuple[Table, ...]:
    access = AccessDistribution.zipf(rows, 0.0)
    return tuple(Table(f"t{index}", rows, dim, pooling, access=access) for index, dim in enumerate(dims))


def roomy(*dims: int, ranks: int = 2) -> ShardingProblem:
    return weights_only_problem(tables(*dims), ranks, 1e9)


def additive_model() -> CostModel:
    """Costs of shards add up, so that the balanced plan is the best one."""
    model = CostModel.analytic("generic_cpu")
    return replace(model, groups=AdditiveGroupModel(model.groups))


def homes(result: PaperSearchResult) -> list[tuple[int, int, int, int]]:
    assert result.placement is not None
    return [(s.table, s.offset, s.width, s.rank) for s in result.placement.shards]


# The paper's search


def test_a_table_wider_than_the_cap_is_halved() -> None:
    problem, model = roomy(128), additive_model()
    found = paper_search(problem, model)
    assert found.column_plan == (0,)
    assert homes(found) == [(0, 0, 64, 0), (0, 64, 64, 1)]
    # Whole, it is wider than 1.5 times the mean of 64 columns, so nothing may be placed.
    assert paper_search(problem, model, PaperSearchConfig(levels=0)).placement is None


def test_three_equal_tables_on_two_ranks_are_balanced_by_one_halving() -> None:
    problem, model = roomy(64, 64, 64), additive_model()
    found = paper_search(problem, model, PaperSearchConfig(levels=1))
    assert found.column_plan == (0,)
    widths = np.zeros(2)
    for _, _, width, rank in homes(found):
        widths[rank] += width
    assert widths.tolist() == [96, 96]
    whole = paper_search(problem, model, PaperSearchConfig(levels=0))
    assert found.objective_ms < whole.objective_ms and whole.column_plan == ()
    # Under a cap of 1.3 x 96 columns no rank takes two whole tables.
    assert paper_search(problem, model, PaperSearchConfig(levels=0, grid_span=1.3)).placement is None


def test_halving_respects_widths_and_types() -> None:
    problem, model = roomy(128, 12), additive_model()
    for options in (TableOptions((TABLE_WISE,), 4), replace(problem.options[0], min_width=128)):
        fixed = replace(problem, options=(options, problem.options[1]))
        assert paper_search(fixed, model).placement is None  # neither 128 whole nor 12 in halves of 6
    coarse = replace(problem, options=(replace(problem.options[0], min_width=64), problem.options[1]))
    found = paper_search(coarse, model)
    assert found.column_plan == (0,) and check_placement(coarse, found.placement) == []  # type: ignore[arg-type]


def test_ranks_hold_one_shard_of_a_table_unless_freed() -> None:
    problem, model = random_problem(3, tables=4, ranks=2, fill=0.4, min_width=4), untrained_model()
    found = paper_search(problem, model)
    assert found.placement is not None
    pairs = [(shard.table, shard.rank) for shard in found.placement.shards]
    assert len(set(pairs)) == len(pairs)
    config = replace(SMALL, siblings_share_ranks=True)
    free = [paper_search(problem, model, replace(config, batched=batched)) for batched in (False, True)]
    assert free[0].placement == free[1].placement is not None


def test_the_problem_without_tables_and_the_one_without_room() -> None:
    empty = weights_only_problem((), 2, 1e9)
    assert paper_search(empty, additive_model()).total_ms == 0.0
    full = weights_only_problem(tables(64, 64), 2, 100.0)
    for batched in (False, True):
        found = paper_search(full, additive_model(), replace(SMALL, batched=batched))
        assert found.placement is None and found.objective_ms == found.total_ms == np.inf


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("seed", range(4))
def test_batched_and_single_queries_make_the_same_plan(seed: int, objective: Objective) -> None:
    pipeline = Pipeline.NONE if seed % 2 else Pipeline.SPARSE_DIST
    fill = (0.3, 0.85)[seed // 2]
    problem = random_problem(seed, tables=8, ranks=3, fill=fill, min_width=4, modules=1 + seed % 2, pipeline=pipeline)
    model = untrained_model(seed)
    single, batched = (
        paper_search(problem, model, replace(SMALL, objective=objective, batched=each)) for each in (False, True)
    )
    assert batched.placement == single.placement
    assert batched.column_plan == single.column_plan
    assert batched.objective_ms == single.objective_ms
    assert batched.calls < single.calls / 5
    if batched.placement is not None:
        assert check_placement(problem, batched.placement) == []
        of = PlanObjective(problem, model, objective).of(batched.placement)
        assert batched.objective_ms == pytest.approx(of, rel=1e-4)


def test_batched_and_single_queries_agree_for_a_trained_model() -> None:
    model = CostModel.load("amd_epyc_l2_512k_l3_32m")
    config = PaperSearchConfig(levels=2, beam_width=2, proposals=2, grid=3)
    problem = paper_task(4, 1)
    single, batched = (paper_search(problem, model, replace(config, batched=each)) for each in (False, True))
    assert batched.placement == single.placement is not None
    assert batched.objective_ms == single.objective_ms
    again = paper_search(problem, model, config)
    assert replace(again, seconds=0.0) == replace(batched, seconds=0.0)


def test_more_search_is_never_worse() -> None:
    problem, model = random_problem(5, tables=8, ranks=3, min_width=4), untrained_model(5)
    costs = [paper_search(problem, model, replace(SMALL, levels=levels)).objective_ms for levels in range(4)]
    assert costs == sorted(costs, reverse=True)


def test_the_papers_objective_is_compute_plus_collectives_of_the_slowest_rank() -> None:
    problem, model = random_problem(1, tables=8, ranks=4, fill=0.3), untrained_model(1)
    placement = find_placement(problem, model, SHORT).placement
    cost = PlanSimulator(problem, model).cost(placement)
    dims = np.zeros((1, 4))
    for shard in placement.shards:
        dims[0, shard.rank] += shard.width * problem.tables[shard.table].num_features
    cluster = problem.cluster
    collectives = model.collectives.on_links(cluster.intra_host_gbps, cluster.inter_host_gbps)
    batch = np.full(1, float(problem.batch_size))
    delays = cost.forward_ms[None] - cost.forward_ms.min()
    forward = collectives.per_rank(batch, dims, np.zeros(1, dtype=bool), 4, delays)[0]
    backward = collectives.per_rank(batch, dims, np.ones(1, dtype=bool), 4)[0]
    expected = (cost.compute_ms + forward + backward).max()
    assert PlanObjective(problem, model, "paper").of(placement) == pytest.approx(expected)
    assert PlanObjective(problem, model, "simulator").of(placement) == pytest.approx(cost.total_ms)
    with pytest.raises(ValueError, match="paper or simulator"):
        PlanObjective(problem, model, "other")  # type: ignore[arg-type]


def test_groups_are_numbered_by_what_they_hold() -> None:
    problem = random_problem(2, tables=3)
    simulator = PlanSimulator(problem, untrained_model())
    queries = GroupQueries(simulator)
    kinds = queries.kinds([(0, 16), (1, 16), (2, 16)])
    table, empty = GroupTable(simulator, queries), np.zeros(2, dtype=np.int64)
    one = table.add(empty, kinds[:2])
    both = table.add(one, kinds[1::-1])  # the same two shards in either order
    assert both[0] == both[1] and queries.calls == 2
    exact = queries.group_ms(sorted(kinds[:2].tolist()))
    assert table.ms(both)[0] == pytest.approx(exact, rel=1e-5)
    table.make_exact(both)
    assert table.ms(both)[0].tolist() == exact.tolist()


# Greedy baselines


def test_greedy_baselines_balance_their_quantity() -> None:
    sizes = tables(32, 16, 16, 8)
    problem = weights_only_problem(sizes, 2, 1e9)
    placement = greedy_baseline(problem, "greedy_dim")
    assert placement is not None
    assert [shard.rank for shard in placement.shards] == [0, 1, 1, 0]  # on a tie the first rank
    # By size and by lookups other tables come first.
    mixed = (Table("long", 1_000_000, 8, 1.0), Table("hot", 10, 8, 100.0), Table("wide", 100, 64, 1.0))
    problem = weights_only_problem(mixed, 2, 1e9)
    orders = {name: np.argsort(-BALANCED[name](problem)).tolist() for name in BALANCED}
    assert orders["greedy_size"] == [0, 2, 1]
    assert orders["greedy_dim"][0] == 2
    assert orders["greedy_lookups"] == [1, 2, 0]
    assert BALANCED["greedy_size_lookups"](problem).tolist() == pytest.approx([8 * 6, 800 * 1, 64 * 2])


def test_greedy_baselines_go_where_there_is_room_or_give_up() -> None:
    one = 4 * 1000 * 32.0
    problem = weights_only_problem(tables(32, 32, 32, 32), 2, 2 * one)
    for name in BALANCED:
        placement = greedy_baseline(problem, name)
        assert placement is not None and check_placement(problem, placement) == []
        assert greedy_baseline(weights_only_problem(tables(32, 32, 32, 32), 2, 1.9 * one), name) is None
    full = weights_only_problem(tables(32, 32, 32), 2, 1.5 * one)
    assert random_baseline(full, 0) is None
    assert random_baseline(problem, 7) == random_baseline(problem, 7)
    assert len({random_baseline(roomy(*[8] * 12), seed) for seed in range(5)}) == 5


# Tasks


@pytest.mark.parametrize("world_size", sorted(LIMITS))
def test_tasks_keep_the_papers_limits(world_size: int) -> None:
    counts = []
    for index in range(25):
        problem = paper_task(world_size, index)
        limits = LIMITS[world_size]
        counts.append(len(problem.tables))
        assert limits.fewest_tables <= len(problem.tables) <= limits.most_tables
        assert {table.embedding_dim for table in problem.tables} <= set(DIMS)
        total = sum(problem.shard_memory(t, table.embedding_dim)[1] for t, table in enumerate(problem.tables))
        assert total == sum(4 * t.num_embeddings * t.embedding_dim for t in problem.tables) <= limits.total_bytes
        assert problem.cluster.capacity.tolist() == [[0.0, float(RANK_BYTES)]] * world_size
        assert problem.global_batch_size == GLOBAL_BATCH_SIZE
        assert all(option.min_width == 4 for option in problem.options)
    assert min(counts) < 40 < max(counts)


def test_tasks_are_the_same_for_good() -> None:
    shapes = [
        [(t.num_embeddings, t.embedding_dim, t.pooling_factor) for t in paper_task(world_size, index).tables]
        for world_size in sorted(LIMITS)
        for index in range(10)
    ]
    assert hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16] == "c01e092fb6d09570"
    tight = [tight_task(index).problem for index in range(14)]
    shapes = [[(t.num_embeddings, t.embedding_dim, t.pooling_factor) for t in problem.tables] for problem in tight]
    assert hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16] == "ebcf1de118bb021c"
    with pytest.raises(ValueError, match="4 or 8 ranks"):
        paper_task(3, 0)
    with pytest.raises(ValueError, match="counted from 0"):
        paper_task(4, -1)


# Tight memory


def test_size_first_halving_splits_only_what_it_must() -> None:
    column = 4 * 1000.0
    problem = weights_only_problem(tables(64, 32), 2, 48 * column)
    placement = size_first_halving(problem)
    assert placement is not None and check_placement(problem, placement) == []
    assert [(s.table, s.width) for s in placement.shards] == [(0, 32), (0, 32), (1, 16), (1, 16)]
    assert size_first_halving(weights_only_problem(tables(64, 32), 2, 64 * column)) is not None
    # 12 columns only halve to 6, which no TBE takes; as 8 + 4 they would fit.
    odd = weights_only_problem(tables(12), 2, 8 * column)
    assert size_first_halving(odd) is None and has_plan(odd, 10.0) is True


def test_integer_programming_tells_whether_a_plan_exists() -> None:
    column = 4 * 1000.0
    assert has_plan(weights_only_problem(tables(8, 8, 8), 2, 12 * column), 10.0) is True
    assert has_plan(weights_only_problem(tables(8, 8, 8), 2, 11.9 * column), 10.0) is False  # pieces of 4 columns
    halves = weights_only_problem(tables(16, 16, 16), 2, 24 * column)
    coarse = replace(halves, options=tuple(replace(option, min_width=16) for option in halves.options))
    assert has_plan(halves, 10.0) is True and has_plan(coarse, 10.0) is False


def test_tight_tasks_are_tight_and_plans_are_checked() -> None:
    model = CostModel.analytic("generic_cpu")
    for index in range(len(KINDS)):
        task = tight_task(index)
        weights = sum(t.num_embeddings * t.embedding_dim * 4 for t in task.problem.tables)
        assert 0.93 <= task.fill <= 0.99
        assert weights / task.problem.cluster.capacity.sum() == pytest.approx(task.fill)
        assert 10 <= len(task.problem.tables) <= 60 and 2 <= task.problem.cluster.world_size <= 16
        result = run_task(task, model, prove_seconds=0.0)
        assert not result.faults and result.solved["find_placement"] == result.solved["feasible_placement"]
    giants = [tight_task(index).problem for index in range(KINDS.index("giants"), 10 * len(KINDS), len(KINDS))]
    larger = [
        max(t.num_embeddings * t.embedding_dim * 4 for t in problem.tables) > problem.cluster.capacity[0, 1]
        for problem in giants
    ]
    assert sum(larger) > len(larger) / 2


def test_tight_memory_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sub" / "tight.json"
    arguments = ["--tasks", "2", "--first", "5", "--cost-model", ANALYTIC, "--json", str(out)]
    assert tight_memory.main(arguments) == 0
    results = json.loads(out.read_text())
    assert [result["index"] for result in results] == [5, 6]
    assert "2 tasks" in capsys.readouterr().out
    assert tight_memory.main(["--cost-model", str(tmp_path)]) == 2
    capsys.readouterr()
    # A wrong plan is never counted as solved.
    monkeypatch.setattr(tight_memory, "check_placement", lambda *_: ["crooked"])
    assert tight_memory.main(["--tasks", "1", "--cost-model", ANALYTIC, "--prove-seconds", "0"]) == 1
    assert "crooked" in capsys.readouterr().out


# The comparison


def record(method: str, task: int, ms: float | None, seconds: float = 1.0, model: str = "m") -> dict[str, Any]:
    found = {} if ms is None else {"total_ms": ms, "paper_objective_ms": 2 * ms}
    return {
        "kind": "search_comparison",
        "world_size": 4,
        "task": task,
        "method": method,
        "model": model,
        "feasible": ms is not None,
        "wall_seconds": seconds,
        "cpu_seconds": seconds,
        **found,
    }


def test_comparison_counts_and_ratios() -> None:
    ours = [record("a", 0, 9.0), record("a", 1, 10.0), record("a", 2, 10.0), record("a", 3, None), record("a", 4, 5.0)]
    theirs = [record("b", task, ms, 4.0) for task, ms in enumerate((10.0, 10.0, 8.0, 7.0, None))]
    results = latest([record("b", 0, 1.0, model="older"), record("b", 1, 99.0), *ours, *theirs])
    figures = comparison(results[4]["a"], results[4]["b"])
    assert (figures["only_ours"], figures["only_theirs"], figures["neither"]) == ([4], [3], [])
    assert figures["speedup"] == 4.0
    for cost in ("total_ms", "paper_objective_ms"):
        of = figures[cost]
        assert (of["lower"], of["equal"], of["higher"]) == (1, 1, 1)
        assert of["quantiles"] == [0.9, 0.95, 1.0, 1.125, 1.25]
        assert of["geometric_mean"] == pytest.approx((0.9 * 1.25) ** (1 / 3), abs=1e-4)
        assert of["worst"] == {2: 1.25}


def test_time_until_ours_has_a_plan_as_cheap() -> None:
    progress = [[0.01, 12.0], [0.1, 10.0], [0.5, 7.0]]
    ours = {task: {**record("a", task, 7.0), "progress": progress} for task in range(4)}
    theirs = {task: record("b", task, ms, 2.0) for task, ms in enumerate((12.0, 10.0, 9.0, 6.0))}
    # Reached after 0.01, 0.1 and 0.5 s, and never.
    found = comparison(ours, theirs)["to_their_plan"]
    assert found["quantiles"] == [0.0, 3.0, 12.0, 65.0, 200.0]
    assert (found["ten_times"], found["hundred_times"]) == (2, 1)


def test_the_comparison_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = functools.partial(PaperSearchConfig, levels=1, proposals=2, grid=2)
    monkeypatch.setattr(search_comparison, "PaperSearchConfig", short)
    monkeypatch.setattr(search_comparison, "SearchConfig", lambda **_: SHORT)
    store, out = tmp_path / "store.jsonl", tmp_path / "out.json"
    arguments = ["--tasks", "1", "--first", "1", "--cost-model", ANALYTIC, "--store", str(store), "--json", str(out)]
    assert main([*arguments, "--unbatched", "1"]) == 0
    said = capsys.readouterr().out
    assert "paper_unbatched makes the plan of paper on 1 of 1 tasks" in said
    lines = store.read_text().splitlines()
    assert len(lines) == len(search_comparison.METHODS) + 1
    figures = json.loads(out.read_text())
    assert figures["world_sizes"]["4"]["against"]["paper"]["tasks"] == 1
    for entry in read_records(store):
        assert entry["feasible"] and entry["total_ms"] > 0 and entry["paper_objective_ms"] > 0
    # Nothing is searched again; a torn line, and what is new, are.
    assert main(arguments) == 0
    assert store.read_text().splitlines() == lines
    store.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:50])
    assert main([*arguments, "--unbatched", "1"]) == 0
    assert len(store.read_text().splitlines()) == len(lines)
    assert main(["--summary", "--store", str(store)]) == 0
    assert "4 ranks" in capsys.readouterr().out


def test_ours_is_given_a_share_of_the_papers_time(tmp_path: Path) -> None:
    store, out = tmp_path / "store.jsonl", tmp_path / "out.json"
    arguments = ["--tasks", "1", "--first", "1", "--cost-model", ANALYTIC, "--store", str(store), "--json", str(out)]
    assert main([*arguments, "--methods", "paper", "neuroshard_fifth", "--ours", "neuroshard_fifth"]) == 0
    found = {entry["method"]: entry for entry in read_records(store)}
    limited = found["neuroshard_fifth"]
    assert 0 < limited["limit_seconds"] < found["paper"]["wall_seconds"]
    assert limited["wall_seconds"] < limited["limit_seconds"] + 0.5  # a moment of another program apart
    assert json.loads(out.read_text())["world_sizes"]["4"]["against"]["paper"]["tasks"] == 1


def test_fingerprints_tell_methods_and_models_apart() -> None:
    assert code_fingerprint("paper") == code_fingerprint("paper_unbatched") != code_fingerprint("neuroshard")
    models = [untrained_model(0), untrained_model(1), CostModel.analytic("generic_cpu")]
    assert len({model_fingerprint(model) for model in models}) == 3
    assert model_fingerprint(untrained_model(1)) == model_fingerprint(models[1])


def test_bad_input_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "none.jsonl")
    assert main(["--summary", "--store", missing]) == 2
    assert "search first" in capsys.readouterr().err
    assert main(["--cost-model", str(tmp_path / "absent"), "--store", missing]) == 2
    assert "no cost model" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text("not a record\n")
    assert main(["--store", str(other), "--cost-model", ANALYTIC, "--methods", "random"]) == 2
    for wrong in (["--tasks", "0"], ["--first", "-1"], ["--world-size", "3"]):
        with pytest.raises(SystemExit):
            main(wrong)
