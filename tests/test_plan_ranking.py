"""Ranking of whole plans: what is drawn, what is kept, the figures, and one small run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import plan_ranking
from benchmarks.measure_plans import PlanMeasurement, near_bottleneck
from benchmarks.plan_ranking import WORKLOADS, main, run_round
from benchmarks.plan_ranking_plans import (
    BASELINES,
    LARGEST_BYTES,
    PlanMaker,
    greedy_placement,
    random_placement,
    ranking_problem,
)
from benchmarks.plan_ranking_records import (
    RankingCase,
    RankingRecords,
    case_key,
    case_record,
    round_record,
)
from benchmarks.plan_ranking_summary import (
    MeasuredCase,
    meets_goal,
    model_heads,
    predicted_bottlenecks,
    rank_all,
    tau_of_rounds,
    tau_within,
)
from benchmarks.rank_costs import rank_work
from benchmarks.skewed_workloads import SAMPLES_PER_RANK, skewed_workload
from benchmarks.sources import load_source, samples_per_rank
from tests.problems import untrained_model
from torchrec_neuroshard.costs.features import ShardFeatures, ShardWork, shard_features
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure import probe
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import Placement
from torchrec_neuroshard.workload import Workload, WorkloadError

ANALYTIC = "analytic/generic_cpu"
TABLES = [
    {"name": "a", "num_embeddings": 300, "embedding_dim": 32, "pooling_factor": 4, "alpha": 0.6},
    {"name": "b", "num_embeddings": 50, "embedding_dim": 16, "pooling_factor": 2, "alpha": 0.2},
    {"name": "c", "num_embeddings": 900, "embedding_dim": 64, "pooling_factor": 1, "alpha": 0.9},
]


def small_file(folder: Path, **fields: Any) -> str:
    path = folder / "small.json"
    path.write_text(json.dumps({"name": "small", "batch_size": 64, "tables": TABLES, **fields}))
    return str(path)


def small_case(folder: Path, plans: int = 4) -> tuple[RankingCase, str]:
    source = small_file(folder)
    made = PlanMaker(source, 2, 0, ANALYTIC, CostModel.analytic("generic_cpu")).make(BASELINES, plans, folder)
    return RankingCase(load_source(source), 2, 32, 0, made, {"name": ANALYTIC, "provenance": "analytic"}), source


def measured(case: RankingCase, label: str, ms: float, process: str) -> dict[str, Any]:
    return round_record(case, label, PlanMeasurement({0: ms, 1: ms / 2}, 0.0, 0.0), 0, 0, process)


def by_rank(placement: Placement, ranks: int) -> list[set[int]]:
    return [{shard.table for shard in placement.shards if shard.rank == rank} for rank in range(ranks)]


@pytest.mark.parametrize("split", [False, True])
def test_random_plans_are_feasible_and_all_different(split: bool) -> None:
    problem = ranking_problem(skewed_workload(1), 8, SAMPLES_PER_RANK)
    rng = np.random.default_rng(0)
    plans = [random_placement(problem, rng, split) for _ in range(5)]
    for plan in plans:
        assert check_placement(problem, plan) == []
        assert len({(shard.table, shard.rank) for shard in plan.shards}) == len(plan.shards)
        assert (len(plan.shards) > len(problem.tables)) == split
    assert len(set(plans)) == 5


def test_greedy_plans_balance_what_they_are_given() -> None:
    problem = ranking_problem(skewed_workload(1), 2, SAMPLES_PER_RANK)
    weights = np.ones(len(problem.tables))
    weights[:3] = 100.0, 60.0, 50.0  # the largest alone, the next two together
    plan = greedy_placement(problem, weights)
    assert check_placement(problem, plan) == []
    first, second = by_rank(plan, 2)
    assert 0 in first and {1, 2} <= second
    assert abs(weights[sorted(first)].sum() - weights[sorted(second)].sum()) <= 1.0


def test_plans_of_a_workload_are_different_and_reproducible(tmp_path: Path) -> None:
    made = PlanMaker("skewed:2", 4, 3, ANALYTIC, CostModel.analytic("generic_cpu")).make(BASELINES, 8, tmp_path)
    assert list(made)[:3] == list(BASELINES)
    assert [label for label in made if label.startswith("random")] == [
        "random_whole_0", "random_split_1", "random_whole_2", "random_split_3", "random_whole_4"
    ]  # fmt: skip
    again = PlanMaker("skewed:2", 4, 3, ANALYTIC, CostModel.analytic("generic_cpu")).make(BASELINES, 8, tmp_path)
    assert {k: p.plan_id for k, p in again.items()} == {k: p.plan_id for k, p in made.items()}
    other = PlanMaker("skewed:2", 4, 4, ANALYTIC, CostModel.analytic("generic_cpu")).make(BASELINES, 8, tmp_path)
    assert other["greedy_size"].placement == made["greedy_size"].placement
    assert other["random_whole_0"].placement != made["random_whole_0"].placement


def test_plans_that_run_the_same_groups_count_once(tmp_path: Path) -> None:
    source = small_file(tmp_path, tables=TABLES[:1])
    maker = PlanMaker(source, 2, 0, ANALYTIC, CostModel.analytic("generic_cpu"))
    made = maker.make(("greedy_size", "greedy_lookups"), 12, tmp_path)
    assert "greedy_lookups" not in made and not any("whole" in label for label in made)
    workload = load_source(source)
    groups = {
        frozenset(tuple(shard.dim for group in rank for shard in group.shards) for rank in work.groups)
        for work in (rank_work(workload, planned.placement, 2, 32) for planned in made.values())
    }
    assert len(groups) == len(made) > 2


def test_workloads_that_cannot_be_drawn_from_are_refused(tmp_path: Path) -> None:
    constrained = Workload.parse({"tables": [{**TABLES[0], "constraint": {"sharding_types": ["table_wise"]}}]})
    with pytest.raises(WorkloadError, match="constraints"):
        ranking_problem(constrained, 2, 32)
    rows = LARGEST_BYTES // (2 * 4 * 64) + 1  # Adagrad's state is as large as the weights
    large = Workload.parse({"optimizer": "adagrad", "tables": [{"num_embeddings": rows, "embedding_dim": 64}]})
    with pytest.raises(WorkloadError, match="12.0 GiB; at most 12"):
        ranking_problem(large, 2, 32)


def test_the_workloads_can_be_ranked_on_8_ranks() -> None:
    sources = [*WORKLOADS, str(Path(WORKLOADS[-1]).parent / "nv_synthetic_tiny.json")]
    for source in sources:
        workload = load_source(source)
        ranking_problem(workload, 8, samples_per_rank(workload, 8))
    assert len(WORKLOADS) >= 5


def test_predictions_are_those_of_the_groups_that_are_measured(tmp_path: Path) -> None:
    case, _ = small_case(tmp_path, 5)
    model = untrained_model()
    predicted = predicted_bottlenecks(case, model)
    for ms, planned in zip(predicted, case.plans.values()):
        work = rank_work(case.workload, planned.placement, 2, 32)
        assert ms == pytest.approx(max(sum(_group_ms(group, model) for group in rank) for rank in work.groups))
    assert list(model_heads(model)) == ["mean head"]
    model.ensemble = untrained_model(1).groups  # type: ignore[assignment]
    heads = model_heads(model)
    assert list(heads) == ["mean head", "ensemble"]
    assert (predicted_bottlenecks(case, heads["mean head"]) == predicted).all()
    assert (predicted_bottlenecks(case, heads["ensemble"]) != predicted).all()


def _group_ms(group: GroupSpec, model: CostModel) -> float:
    features: ShardFeatures = shard_features(
        ShardWork(
            rows=shard.rows,
            dim=shard.dim,
            pooling_factor=shard.pooling_factor,
            num_features=shard.num_features,
            batch_size=group.batch_size,
            element_bytes=4,
            weighted=group.weighted,
            optimizer=group.optimizer,
            access=shard.distribution(),
        )
        for shard in group.shards
    )
    return float(model.groups.predict(model.groups.contributions(features).sum(axis=0, keepdims=True)).sum())


def test_figures_by_hand() -> None:
    """Two workloads of four and three plans; the second is ranked upside down."""
    rounds = np.asarray([[10.0, 40.0], [11.0, 44.0], [12.0, 48.0], [20.0, 80.0]])  # geometric means 20, 22, 24, 40
    good = MeasuredCase("good", ("a", "b", "c", "d"), rounds)
    bad = MeasuredCase("bad", ("a", "b", "c"), np.asarray([[1.0], [2.0], [4.0]]))
    # Of six pairs, (a, b) is the wrong way round: tau = (5 - 1) / 6.
    ranking = rank_all([good, bad], [np.asarray([24.0, 21.0, 30.0, 40.0]), np.asarray([3.0, 2.0, 1.0])])
    first, second = ranking.cases
    assert (first.plans, first.rounds, second.rounds) == (4, 2, 1)
    assert first.kendall_tau == pytest.approx(4 / 6, abs=1e-4) and second.kendall_tau == -1.0
    assert (first.first, first.best) == ("b", "a") and (second.first, second.best) == ("c", "a")
    assert first.regret == pytest.approx(0.1) and second.regret == pytest.approx(3.0)
    assert first.regret_high == pytest.approx(0.1) and second.regret_high is None  # both rounds say the same
    assert first.plan_ms["b"] == {"predicted": 21.0, "measured": pytest.approx(22.0)}
    assert ranking.tau_mean == pytest.approx((4 / 6 - 1) / 2, abs=1e-4)
    assert ranking.tau_within == pytest.approx((4 - 3) / (6 + 3), abs=1e-4)
    # All 12 pairs between the workloads are right: (12 + 4 - 3) of 21.
    assert ranking.tau_all == pytest.approx(13 / 21, abs=1e-4)
    assert ranking.regret_mean == pytest.approx(1.55) and ranking.regret_max == pytest.approx(3.0)
    # Errors: 4/20, 1/22, 6/24, 0, and 2, 0, 3/4.
    assert ranking.median_ape == pytest.approx(0.2)
    assert ranking.plans == 7 and not meets_goal(ranking)
    assert first.rounds_tau == ranking.rounds_tau_mean == 1.0 and second.rounds_tau is None


def test_ties_count_neither_way() -> None:
    # Three pairs; the prediction ties one, the measurement another: one agreement over sqrt(2 x 2).
    assert tau_within([np.asarray([1.0, 1.0, 2.0])], [np.asarray([1.0, 3.0, 3.0])]) == pytest.approx(0.5)
    assert tau_within([np.asarray([1.0, 1.0])], [np.asarray([1.0, 2.0])]) is None


def test_rounds_that_contradict_each_other_say_so() -> None:
    assert tau_of_rounds(np.asarray([[1.0, 2.0], [2.0, 1.0]])) == -1.0
    assert tau_of_rounds(np.asarray([[1.0], [2.0]])) is None


def test_a_perfect_model_meets_the_goal() -> None:
    cases = [MeasuredCase(f"{n}", tuple("abcdef"), np.arange(1.0, 7.0)[:, None] * (1 + n)) for n in range(5)]
    perfect = [case.measured_ms for case in cases]
    assert meets_goal(rank_all(cases, perfect))
    assert not meets_goal(rank_all(cases[:4], perfect[:4]))
    wrong_first = [ms.copy() for ms in perfect]
    wrong_first[2][0] = wrong_first[2][1] + 0.01  # the second best, twice as slow, comes first
    assert not meets_goal(rank_all(cases, wrong_first))


def test_only_whole_rounds_count(tmp_path: Path) -> None:
    case, source = small_case(tmp_path)
    labels = list(case.plans)
    records = [case_record(case, source)]
    records += [measured(case, label, 1.0 + number, "first") for number, label in enumerate(labels)]
    records += [measured(case, label, 9.0, "killed") for label in labels[:-1]]
    records += [measured(case, label, 3.0 + number, "second") for number, label in enumerate(reversed(labels))]
    found = RankingRecords(json.loads(json.dumps(records)))
    (read,) = found.cases.values()
    assert read.key == case.key == case_key(source, 2, 0)
    assert read.plans.keys() == case.plans.keys() and read.plan_ids == case.plan_ids
    assert read.workload.tables[0].access is not None
    assert found.complete(read) == 2
    last = len(labels) - 1
    assert found.bottleneck_ms(read)[0].tolist() == [1.0, 3.0 + last]
    assert found.first_times(read)[labels[1]] == {0: 2.0, 1: 1.0}


def test_a_case_of_other_tables_is_refused(tmp_path: Path) -> None:
    case, source = small_case(tmp_path)
    record = case_record(case, source)
    changed = {**record, "workload_file": {**record["workload_file"], "batch_size": 128}}
    with pytest.raises(RecordError, match="not those that were measured"):
        RankingRecords([changed])
    with pytest.raises(RecordError, match="cannot be read"):
        RankingRecords([{**record, "plans": {"greedy_size": {}}}])


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds in this process, with a small probe and without the pauses that wait for a quiet machine."""

    def run(command: list[str], env: dict[str, str]) -> SimpleNamespace:
        assert command[:3] == [sys.executable, "-m", "benchmarks.plan_ranking"] and env["OMP_NUM_THREADS"] == "1"
        return SimpleNamespace(returncode=main(command[3:]))

    monkeypatch.setattr(plan_ranking.subprocess, "run", run)
    for name, value in (("_PAUSES_SECONDS", {"cpu": ()}), ("_MINIMUM_HISTORY", 2), ("_ROWS", 1 << 12)):
        monkeypatch.setattr(probe, name, value)


@pytest.mark.usefixtures("hurried")
def test_a_round_measures_every_plan_and_later_ones_the_slow_ranks(tmp_path: Path) -> None:
    case, source = small_case(tmp_path)
    store = tmp_path / "store.jsonl"
    with MeasurementStore(store) as records:
        records.append(case_record(case, source))
    for number in range(2):
        run_round(store, case.key, source, number)
    found = RankingRecords(read_records(store))
    assert found.complete(case) == 2 and found.bottleneck_ms(case).shape == (len(case.plans), 2)
    rounds = [record for record in read_records(store) if record["kind"] == "ranking_round"]
    labels, first = list(case.plans), rounds[: len(case.plans)]
    assert [record["planner"] for record in rounds] == [*labels, *labels[1:], labels[0]]
    for record in first:
        assert record["bottleneck_ms"] == max(record["rank_ms"].values()) > 0
    slow = {label: near_bottleneck(times) for label, times in found.first_times(case).items()}
    for record in rounds[len(labels) :]:
        assert sorted(map(int, record["rank_ms"])) == slow[record["planner"]]


@pytest.mark.usefixtures("hurried")
def test_from_end_to_end_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = tmp_path / "store.jsonl", tmp_path / "out.json"
    arguments = ["--workload", small_file(tmp_path), "--world-size", "2", "--store", str(store), "--plans", "4"]
    arguments += ["--planners", "greedy_lookups", "--cost-model", ANALYTIC, "--json", str(out)]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "greedy_lookups" in shown and "goal: tau" in shown
    lines = store.read_text().splitlines()
    assert len(lines) == 5
    assert main(arguments) == 0  # plans and measures nothing again
    assert store.read_text().splitlines() == lines
    figures = json.loads(out.read_text())["heads"]["mean head"]
    assert figures["plans"] == 4 and not figures["meets_goal"]
    # A round that was cut short is measured again as a whole.
    store.write_text("\n".join(lines[:-1]) + "\n" + lines[-1][:40])
    assert main(arguments) == 0
    again = store.read_text().splitlines()
    assert again[:4] == lines[:4] and len(again) == 8
    # Another model is judged on the same measurements; the store alone is enough.
    (tmp_path / "small.json").unlink()
    model = untrained_model()
    model.ensemble = untrained_model(1).groups  # type: ignore[assignment]
    monkeypatch.setattr(plan_ranking, "resolve_cost_model", lambda *_: model)
    assert main(["--summary", "--store", str(store), "--json", str(out)]) == 0
    judged = json.loads(out.read_text())["heads"]
    assert list(judged) == ["mean head", "ensemble"]
    for head in judged.values():
        assert head["cases"][0]["plan_ms"].keys() == figures["cases"][0]["plan_ms"].keys()


def test_bad_input_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "none.jsonl")
    assert main(["--summary", "--store", store, "--cost-model", ANALYTIC]) == 2
    assert "measure first" in capsys.readouterr().err
    arguments = ["--workload", small_file(tmp_path), "--world-size", "3", "--store", store, "--cost-model", ANALYTIC]
    assert main(arguments) == 2
    assert "does not divide over 3 ranks" in capsys.readouterr().err
    assert main(["--summary", "--store", store, "--cost-model", str(tmp_path / "absent")]) == 2
    assert "no cost model" in capsys.readouterr().err
    assert not Path(store).exists()
