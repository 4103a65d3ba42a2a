"""Accuracy reports: what they say of models with known errors, and the ``evaluate`` command."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Iterable

import numpy as np
import pytest
from rich.console import Console

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.pool import is_held_out, sample_group
from torchrec_neuroshard.measure.probe import DISTURBED
from torchrec_neuroshard.measure.specs import COLLECTIVES, CollectiveSpec, GroupSpec, ShardSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.report.accuracy_bins import Times
from torchrec_neuroshard.report.accuracy_records import load_evaluation_records
from torchrec_neuroshard.report.accuracy_report import AccuracyReport, mean_dim
from torchrec_neuroshard.training.collective_data import collective_data, is_test_collective
from torchrec_neuroshard.training.dataset import group_data, split_groups
from torchrec_neuroshard.training.evaluate import group_accuracy, predict_collectives, predict_groups
from torchrec_neuroshard.training.train_groups import TrainingConfig, train_group_model

Record = dict[str, Any]
MACHINE = "made_up [/x]"  # would be broken markup in a terminal table


def summary(ms: float) -> dict[str, Any]:
    return {"median": ms, "p10": 0.95 * ms, "p90": 1.05 * ms, "samples": [ms]}


def group_record(spec: GroupSpec, forward_ms: float, backward_ms: float) -> Record:
    return {
        "kind": "group",
        "id": spec_id(spec),
        "spec": spec.to_json(),
        "device": "cpu",
        "hardware": {"name": MACHINE},
        "versions": {},
        "forward_ms": summary(forward_ms),
        "backward_ms": summary(backward_ms),
        "total_ms": summary(forward_ms + backward_ms),
        "lookups": spec.lookups,
    }


def collective_spec(index: int, ranks: int) -> CollectiveSpec:
    """Of every kind; 4 ranks are on two hosts."""
    rng = np.random.default_rng([7, index, ranks])
    name = COLLECTIVES[max(0, index % 6 - 2)]
    return CollectiveSpec(
        name,
        ranks,
        int(2 ** rng.uniform(5, 11)) if name != "all_reduce" else 1,
        tuple(4 * int(dim) for dim in rng.integers(1, 100, ranks if name == "all_to_all" else 1)),
        direction=("forward", "backward")[index % 2] if name == "all_to_all" else "forward",
        start_delays_ms=tuple(rng.exponential(2.0, ranks).round(3).tolist()) if index % 3 == 0 else (),
        seed=index,
        local_world_size=2 if ranks == 4 else 0,
    )


def collective_record(spec: CollectiveSpec, rank_ms: Iterable[float]) -> Record:
    return {
        "kind": "collective",
        "id": spec_id(spec),
        "spec": spec.to_json(),
        "device": "cpu",
        "hardware": {"name": MACHINE},
        "versions": {},
        "rank_ms": [summary(ms) for ms in rank_ms],
    }


def records_of(model: CostModel, slowdown: Callable[[GroupSpec], float] = lambda spec: 1.0) -> list[Record]:
    """Records of a machine that takes exactly as long as a model predicts, times a factor for each group."""
    specs = [sample_group(5, index) for index in range(80)]
    predicted = predict_groups(model.groups, group_data([group_record(spec, 1.0, 1.0) for spec in specs]))
    records = [group_record(spec, *(slowdown(spec) * row).tolist()) for spec, row in zip(specs, predicted)]
    for ranks in (2, 16, 4):
        calls = [collective_spec(index, ranks) for index in range(20)]
        blank = [collective_record(spec, [1.0] * ranks) for spec in calls]
        (data,) = collective_data(blank)
        for spec, times in zip(calls, predict_collectives(model.collectives, data).per_rank):
            records.append(collective_record(spec, times.tolist()))
    return records


def made_up_model() -> CostModel:
    return dataclasses.replace(CostModel.analytic("generic_cpu"), provenance="measured", hardware=MACHINE)


def write(path: Path, records: Iterable[Record]) -> Path:
    with MeasurementStore(path) as store:
        for record in records:
            store.append(record)
    return path


def report_on(tmp_path: Path, model: CostModel, records: Iterable[Record], held_out: bool = False) -> AccuracyReport:
    return AccuracyReport.of(model, load_evaluation_records([write(tmp_path / "records.jsonl", records)], held_out))


def evaluate(*options: str | Path) -> int:
    return main(["evaluate", "--cost-model", "analytic/generic_cpu", *map(str, options)])


@pytest.fixture(scope="module")
def model() -> CostModel:
    return made_up_model()


@pytest.fixture(scope="module")
def exact(model: CostModel) -> list[Record]:
    return records_of(model)


@pytest.fixture
def file(tmp_path: Path, exact: list[Record]) -> Path:
    return write(tmp_path / "exact.jsonl", exact)


def test_a_perfect_model_has_no_error(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    report = report_on(tmp_path, model, exact)
    content = report.to_json()
    assert content["schema"] == 1 and content["warnings"] == []
    zero = {"median_ape": 0.0, "p95_ape": 0.0, "bias": 0.0}
    for part in ("forward", "backward", "total"):
        assert content["groups"][part] == zero
    assert content["groups"]["kendall_tau"] == 1.0
    for part in ("per_rank", "slowest"):
        assert content["collectives"][part] == zero
        assert content["collectives"]["by_ranks"]["16_ranks"][part] == zero
    for accuracy in report.parts.values():
        for breakdown in accuracy.breakdowns:
            assert all(bin.errors == zero and set(bin.ratio_percentiles) == {1.0} for bin in breakdown.bins)


def test_bins_partition_the_records(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    report = report_on(tmp_path, model, exact)
    assert report.groups is not None and report.collectives is not None
    for part, total in ((report.groups, 80), (report.collectives, 60)):
        for breakdown in part.breakdowns:
            assert sum(bin.records for bin in breakdown.bins) == total, breakdown.name
            assert all(bin.records for bin in breakdown.bins)
            highs, lows = [bin.high for bin in breakdown.bins[:-1]], [bin.low for bin in breakdown.bins[1:]]
            if any(low is not None for low in lows):
                assert all(high <= low for high, low in zip(highs, lows)), breakdown.name  # type: ignore[operator]
    specs = [GroupSpec.from_json(record["spec"]) for record in exact if record["kind"] == "group"]
    columns: dict[str, list[float]] = {
        "mean_dim": [mean_dim(spec) for spec in specs],
        "rows": [sum(shard.rows for shard in spec.shards) for spec in specs],
        "shards": [len(spec.shards) for spec in specs],
        "batch_size": [spec.batch_size for spec in specs],
    }
    for breakdown in report.groups.breakdowns:
        for bin in breakdown.bins if breakdown.name in columns else ():
            values = np.asarray(columns[breakdown.name])
            low, high = bin.low or -np.inf, bin.high or np.inf
            assert bin.records == ((values >= low) & (values < high)).sum(), (breakdown.name, bin.label)


def test_ranges_hold_their_lower_edge_only() -> None:
    ones = np.ones(7)
    values = np.asarray([0.5, 1, 2, 3, 4, 1000, 5000])
    breakdown = Times(ones, ones).by_range("n", "n", values, (1, 2, 4, 1000), whole=True)
    assert [(bin.label, bin.records) for bin in breakdown.bins] == [
        ("below 1", 1),
        ("1", 1),
        ("2 to 3", 2),
        ("4 to 999", 1),
        ("1k and more", 2),
    ]


def test_a_known_bias_is_found_where_it_is(tmp_path: Path, model: CostModel) -> None:
    """Of weighted groups the machine takes twice the predicted time: everything else is exact."""
    records = records_of(model, lambda spec: 2.0 if spec.weighted else 1.0)
    report = report_on(tmp_path, model, records)
    assert report.groups is not None
    by = report.groups.to_json()["by"]
    plain, weighted = by["weighted"]
    assert (plain["bin"], weighted["bin"]) == ("no", "yes")
    assert plain["bias"] == plain["p95_ape"] == 0.0
    assert weighted["bias"] == -0.5 and weighted["median_ape"] == 0.5
    assert weighted["ratio_percentiles"] == dict.fromkeys(("p5", "p25", "p50", "p75", "p95"), 0.5)
    assert -0.5 < report.groups.overall["total"]["bias"] < 0


def test_figures_are_those_of_training(tmp_path: Path) -> None:
    """A trained model, evaluated on held-out tables: the numbers on its card."""
    records = [record for record in records_of(made_up_model(), lambda spec: 1.3) if record["kind"] == "group"]
    split = split_groups(group_data(records))
    trained = train_group_model(split, TrainingConfig(nets=1, epochs=2), log=lambda _: None)
    model = dataclasses.replace(made_up_model(), groups=trained)
    model.card["hardware"] = {"name": MACHINE}
    model.save(tmp_path / "model")
    path = write(tmp_path / "records.jsonl", records)
    content = AccuracyReport.of(CostModel.load(tmp_path / "model"), load_evaluation_records([path], True)).to_json()
    expected = group_accuracy(trained, split.test)
    assert {name: content["groups"][name] for name in expected} == expected
    assert content["groups"]["by"]["base_tables"][0]["bin"] == "held out"
    assert content["collectives"] is None


def test_strata_are_pairs_of_equal_batch_and_like_lookups() -> None:
    """Against a count over all pairs, one by one."""
    rng = np.random.default_rng(0)
    records = []
    for index in range(60):
        shard = ShardSpec(1000, 16, float(rng.choice([4.0, 4.5, 5.5, 9.0])), zipf=0.5)
        spec = GroupSpec(int(rng.choice([64, 128])), (shard,), seed=index)
        records.append(group_record(spec, *rng.uniform(1, 2, 2).tolist()))
    data, model = group_data(records), made_up_model()
    predicted = predict_groups(model.groups, data).sum(axis=1)
    measured = data.measured_ms.sum(axis=1)
    signs = []
    for i in range(60):
        for j in range(i):
            ratio = data.lookups[i] / data.lookups[j]
            if data.batch_size[i] == data.batch_size[j] and 1 / 1.25 <= ratio <= 1.25:
                signs.append(np.sign(predicted[i] - predicted[j]) * np.sign(measured[i] - measured[j]))
    assert group_accuracy(model.groups, data)["kendall_tau_strata"] == pytest.approx(np.mean(signs), abs=1e-4)


def test_mean_dim_weighs_by_lookups() -> None:
    shards = (ShardSpec(10, 16, 3.0), ShardSpec(10, 64, 1.0))
    assert mean_dim(GroupSpec(8, shards)) == 28.0
    idle = tuple(dataclasses.replace(shard, pooling_factor=0.0) for shard in shards)
    assert mean_dim(GroupSpec(8, idle)) == 40.0


def test_errors_of_collectives_are_told_apart_by_ranks(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    """On 16 ranks the machine is four times faster; bins of ranks are in the order of their number."""
    records = [record for record in exact if record["kind"] == "collective"]
    records = [
        {**record, "rank_ms": [summary(t["median"] / 4) for t in record["rank_ms"]]}
        if record["spec"]["world_size"] == 16
        else record
        for record in records
    ]
    report = report_on(tmp_path, model, records)
    assert report.groups is None and report.collectives is not None
    by = report.collectives.to_json()["by"]
    assert [(bin["bin"], bin["bias"], bin["records"]) for bin in by["ranks"]] == [
        ("2", 0.0, 20),
        ("4", 0.0, 20),
        ("16", 3.0, 20),
    ]
    both = [bin["bin"] for bin in by["ranks_and_kind"]]
    assert both[0] == "2 ranks, all_gather" and both[-1] == "16 ranks, reduce_scatter"
    assert [bin["bin"] for bin in by["kind"]] == [
        "all_gather",
        "all_reduce",
        "all_to_all backward",
        "all_to_all forward",
        "reduce_scatter",
    ]
    assert [(bin["bin"], bin["records"]) for bin in by["hosts"]] == [("1", 40), ("2", 20)]
    assert {bin["bin"] for bin in by["layout"]} == {"1x2", "1x16", "2x2"}
    overall = report.collectives.overall
    assert overall["by_ranks"]["16_ranks"]["slowest"]["bias"] == 3.0
    assert overall["by_hosts"]["2_hosts"]["records"] == overall["by_layout"]["2x2"]["records"] == 20
    assert sum(part["records"] for part in overall["by_kind"].values()) == 60


def test_one_record_is_enough(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    report = report_on(tmp_path, model, exact[:1])
    content = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert content["groups"]["kendall_tau"] is None and content["groups"]["kendall_tau_strata"] is None
    console = Console(file=io.StringIO(), width=100)
    report.print_to(console)
    assert "undefined" in console.file.getvalue()  # type: ignore[attr-defined]


def test_held_out_keeps_what_training_does_not_see(file: Path, exact: list[Record]) -> None:
    records = load_evaluation_records([file], held_out=True)
    expected = {
        record["id"]
        for record in exact
        if (record["kind"] == "group" and is_held_out(GroupSpec.from_json(record["spec"])))
        or (record["kind"] == "collective" and is_test_collective(record))
    }
    assert {record["id"] for record in (*records.groups, *records.collectives)} == expected
    assert 0 < len(expected) < len(exact) / 2 and records.groups and records.collectives


def test_one_group_on_two_machines_is_two_records(tmp_path: Path, exact: list[Record]) -> None:
    again = {**exact[0], "lookups": 1.0}
    elsewhere = {**exact[0], "hardware": {"name": "other"}}
    first, second = write(tmp_path / "a.jsonl", [exact[0], again]), write(tmp_path / "b.jsonl", [elsewhere])
    records = load_evaluation_records([first, second])
    assert records.hardware == {MACHINE: 1, "other": 1}
    assert records.groups[0]["lookups"] == 1.0


def test_what_is_left_out_is_counted_and_said(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    disturbed = [{**record, "disturbance": DISTURBED + 0.1} for record in exact[:3]]
    report = report_on(tmp_path, model, [*disturbed, *exact[3:10]])
    counts = report.to_json()["records"]
    assert (counts["groups"], counts["collectives"]) == (7, 0)
    assert counts["dropped_as_disturbed"] == {"groups": 3, "collectives": 0}
    (dropped,) = report.warnings
    assert "3 groups and 0 collectives were dropped" in dropped


@pytest.mark.parametrize(
    ("provenance", "hardware", "machine", "warned"),
    [
        ("measured", "amd_epyc", "amd_epyc", False),
        ("measured", "amd_epyc", "intel_xeon", True),
        ("analytic", "h100_sxm", "nvidia_h100_80gb_hbm3", False),
        ("analytic", "h100_sxm", "nvidia_h100_pcie", True),
        ("analytic", "generic_cpu", "amd_epyc", True),
    ],
)
def test_another_machine_is_warned_of(
    tmp_path: Path, exact: list[Record], provenance: str, hardware: str, machine: str, warned: bool
) -> None:
    model = dataclasses.replace(made_up_model(), provenance=provenance, hardware=hardware)
    report = report_on(tmp_path, model, [{**record, "hardware": {"name": machine}} for record in exact[:2]])
    assert len(report.warnings) == warned
    for warning in report.warnings:
        assert hardware in warning and f"{machine} (2)" in warning and "difference between the machines" in warning


def test_command_line_prints_json_and_writes_a_png(tmp_path: Path, file: Path) -> None:
    """As a user runs it: the object alone on standard output, everything else on standard error."""
    plot = tmp_path / "accuracy.png"
    command = [sys.executable, "-m", "torchrec_neuroshard", "evaluate", "--cost-model", "analytic/generic_cpu"]
    command += ["--records", str(file), "--json", "--plot", str(plot)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    content = json.loads(run.stdout)
    assert run.stdout.count("\n") == 1
    assert content["cost_model"] == {
        "name": "analytic/generic_cpu",
        "provenance": "analytic",
        "hardware": "generic_cpu",
    }
    assert content["records"]["files"] == [str(file)]
    assert content["groups"]["total"]["median_ape"] == content["collectives"]["slowest"]["median_ape"] == 0.0
    assert "warning:" in run.stderr and MACHINE in run.stderr and f"wrote {plot}" in run.stderr
    header = plot.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(header[start : start + 4], "big") for start in (16, 20))
    assert width > 1000 and height > 1000


def test_command_line_prints_tables(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate("--records", file, "--held-out") == 0
    captured = capsys.readouterr()
    for word in ("held-out only", "fused groups", "collectives", "batch of the TBE", "Kendall tau", "+0.0%"):
        assert word in captured.out
    assert "warning: " in captured.err and "warning" not in captured.out


def test_a_plot_holds_points_and_boxes_of_a_bad_model(tmp_path: Path, model: CostModel, exact: list[Record]) -> None:
    """A model that is off by a factor of 100 is still drawn inside its axes."""
    from matplotlib.figure import Figure

    from torchrec_neuroshard.report import accuracy_plot

    slow = records_of(model, lambda spec: 100.0)[:80]
    report = report_on(tmp_path, model, slow)
    drawn: list[Figure] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, *args, **options: drawn.append(figure))
        accuracy_plot.write_plot(report, tmp_path / "bad.png")
    (figure,) = drawn
    scatter, first = figure.axes[:2]
    assert [len(cloud.get_offsets()) for cloud in scatter.collections] == [80, 80]  # type: ignore[arg-type]
    low, high = first.get_xlim()
    assert low < 0.01 < high


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["bad.jsonl: there are no records", "measure compute"]),
        ("nonsense\n", ["bad.jsonl, line 1", "delete that line or collect again"]),
        ('{"schema":9}\n', ["bad.jsonl, line 1: schema 9", "collect again"]),
        ('{"schema":1,"kind":"group","id":"x"}\n', ["bad.jsonl, record 1: field 'spec' is missing", "collect again"]),
    ],
)
def test_bad_files_are_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, words: list[str]
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    check_refused(capsys, words, "--records", path)


def test_unreadable_files_are_exit_2(tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(capsys, ["absent.jsonl: cannot be read", "measure"], "--records", file, tmp_path / "absent.jsonl")
    check_refused(capsys, [f"{tmp_path}: cannot be read"], "--records", tmp_path)
    cut = tmp_path / "cut.jsonl.xz"
    folder = Path(__file__).parent.parent / "benchmarks" / "records" / "amd_epyc_l2_512k_l3_32m"
    records = folder / "collectives.jsonl.xz"
    cut.write_bytes(records.read_bytes()[:4000])
    check_refused(capsys, ["cut.jsonl.xz: damaged", "restore the file"], "--records", cut)


@pytest.mark.parametrize(
    ("kind", "change", "cause"),
    [
        ("group", {"lookups": None}, "real number"),
        ("group", {"forward_ms": {"median": 0.0}}, "forward_ms.median must be a positive number"),
        ("group", {"total_ms": {"median": 1.0}}, "field 'p10' is missing"),
        ("group", {"spec": {"batch_size": 8, "shards": []}}, "needs shards"),
        ("group", {"spec": {"batch_size": 8, "shards": [], "colour": 1}}, "colour"),
        ("group", {"hardware": {}}, "field 'name' is missing"),
        ("group", {"hardware": {"name": 3}}, "hardware.name"),
        ("collective", {"rank_ms": [{"median": 1.0}]}, "one entry per rank"),
        ("collective", {"rank_ms": [{"median": 1.0}, {"median": float("nan")}]}, "rank_ms[1].median"),
    ],
)
def test_unusable_records_are_named(
    tmp_path: Path, exact: list[Record], capsys: pytest.CaptureFixture[str], kind: str, change: Record, cause: str
) -> None:
    record = next(record for record in exact if record["kind"] == kind)
    path = write(tmp_path / "bad.jsonl", [{**record, **change}])
    check_refused(capsys, [f"bad.jsonl: record '{record['id']}'", cause, "delete its line"], "--records", path)


def test_files_without_a_usable_record_are_exit_2(
    tmp_path: Path, exact: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [r for r in exact if r["kind"] == "group" and not is_held_out(GroupSpec.from_json(r["spec"]))][:4]
    path = write(tmp_path / "seen.jsonl", seen)
    check_refused(capsys, ["seen.jsonl: none of 4 groups", "leave out --held-out"], "--records", path, "--held-out")
    path = write(tmp_path / "noisy.jsonl", [{**record, "disturbance": 9.0} for record in seen])
    check_refused(capsys, ["noisy.jsonl: all 4 records", "quiet machine"], "--records", path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", ["--cost-model", "'nowhere'", "shipped models"]),
        ("analytic/abacus", ["--cost-model", "abacus", "generic_cpu"]),
        ("auto", ["--cost-model auto", "name the model to evaluate"]),
        ("", ["--cost-model", "empty"]),
    ],
)
def test_unknown_models_are_exit_2(file: Path, capsys: pytest.CaptureFixture[str], name: str, words: list[str]) -> None:
    check_refused(capsys, words, "--records", file, "--cost-model", name)


def test_plots_that_cannot_be_written_are_exit_2(
    tmp_path: Path, file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder.png").mkdir()
    for plot, words in [
        ("plot.pdf", ["plot.pdf", "ends in .png"]),
        ("absent/plot.png", ["absent/plot.png", "no folder", "make it first"]),
        ("folder.png", ["is a folder"]),
    ]:
        check_refused(capsys, ["--plot", *words], "--records", file, "--plot", tmp_path / plot)
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else installed(name))
    words = ["matplotlib, which is not installed", "pip install matplotlib", "[plot]"]
    check_refused(capsys, words, "--records", file, "--plot", tmp_path / "plot.png")
    assert not (tmp_path / "plot.png").exists()


def test_only_plots_import_matplotlib(file: Path) -> None:
    code = (
        "import sys; from torchrec_neuroshard.cli import main; "
        f"main(['evaluate', '--cost-model', 'analytic/generic_cpu', '--records', {str(file)!r}, '--json']); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300).returncode == 0


def check_refused(capsys: pytest.CaptureFixture[str], words: list[str], *options: str | Path) -> None:
    """Exit code 2, nothing on standard output, and a message that holds the words."""
    assert evaluate(*options, "--json") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for word in words:
        assert word in captured.err
