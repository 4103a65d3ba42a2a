"""Calibration: few records of a new machine and another machine's model give a model; the verb and its benchmark."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np
import pytest
import torch

from benchmarks import calibration_transfer, calibration_transfer_methods
from benchmarks.calibration_transfer import RESULTS_FILE
from benchmarks.calibration_transfer import main as transfer_main
from benchmarks.calibration_transfer_methods import key_of
from tests.test_training import made_up_record
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cli.calibrate import RECORDS_FILE
from torchrec_neuroshard.costs.features import FEATURES, REGIMES, WORK_TERMS
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.costs.prior import Coefficients, GroupPrior
from torchrec_neuroshard.measure.hardware import hardware_fingerprint
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.training import calibrate, pretrain
from torchrec_neuroshard.training.calibrate import as_start, calibration_config, misfit, nearest_groups, refitted
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit, group_data, split_groups
from torchrec_neuroshard.training.distil import distilled
from torchrec_neuroshard.training.evaluate import group_accuracy, predict_groups
from torchrec_neuroshard.training.train_groups import (
    TrainingConfig,
    TrainingTensors,
    log_predictions,
    train_group_model,
    widen_range,
)

SGD, ADAGRAD = REGIMES.index("fused/sum/sgd/fp32"), REGIMES.index("fused/sum/rowwise_adagrad/fp32")


def quiet(_: str) -> None:
    """Drops a line of the training log."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def record(
    index: int, name: str = "fast", slowness: float = 1.0, adagrad: float = 1.0, **fields: Any
) -> dict[str, Any]:
    """A sampled group whose shards cost something that no sum of work terms gives.

    Args:
        index: of the sample.
        name: of the machine.
        slowness: factor of everything.
        adagrad: further factor of groups with row-wise Adagrad.
        **fields: further ones of the record.
    """
    made = made_up_record(index)
    spec = GroupSpec.from_json(made["spec"])
    ms = 0.1
    for shard in spec.shards:
        columns = spec.batch_size * shard.pooling_factor * shard.dim
        ms += 1e-5 * columns * (1.0 + 0.8 * np.tanh(np.log2(shard.dim) - 5.0))
    ms *= slowness * (adagrad if spec.optimizer == "rowwise_adagrad" else 1.0)
    for part, share in (("forward_ms", 1.0), ("backward_ms", 2.0), ("total_ms", 3.0)):
        made[part] = {quantile: share * ms for quantile in ("median", "p10", "p90")}
    return {**made, "hardware": {"name": name, "device": "cpu"}, "unix_time": float(index), **fields}


def slow_record(index: int, **fields: Any) -> dict[str, Any]:
    """The same machine twice as slow, and one code path another two and a half times."""
    return record(index, "slow", 2.0, 2.5, **fields)


@pytest.fixture(scope="module")
def base() -> GroupCostModel:
    split = split_groups(group_data(record(index) for index in range(600)))
    return train_group_model(split, TrainingConfig(nets=2, epochs=30, batch_groups=64), quiet)


# The prior


def coefficients(seed: int) -> Coefficients:
    rng = np.random.default_rng(seed)
    return Coefficients(rng.uniform(0.1, 0.2, 2), rng.uniform(0.1, 1.0, (len(WORK_TERMS), 2)))


@pytest.fixture
def known_prior() -> GroupPrior:
    return GroupPrior({"any": coefficients(0), REGIMES[SGD]: coefficients(1), REGIMES[ADAGRAD]: coefficients(2)})


def work_of(groups: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 1.0, (groups, len(WORK_TERMS)))


def test_code_paths_without_records_keep_their_proportions_and_follow_the_speed(known_prior: GroupPrior) -> None:
    work, regime = work_of(40), np.full(40, SGD)
    fitted = GroupPrior.fit(work, regime, known_prior.predict(work, regime) * [2.0, 3.0], known_prior)
    for name, path in known_prior.paths.items():
        np.testing.assert_allclose(fitted.paths[name].terms, path.terms * [2.0, 3.0], rtol=1e-6)
        np.testing.assert_allclose(fitted.paths[name].launch_ms, path.launch_ms * [2.0, 3.0], rtol=1e-6)


@pytest.mark.parametrize("records", [1, 2, 3, 5])
def test_few_records_only_tell_the_speed(known_prior: GroupPrior, records: int) -> None:
    """Fewer than there are coefficients, yet none falls to zero."""
    work, regime = work_of(records), np.full(records, ADAGRAD)
    fitted = GroupPrior.fit(work, regime, 2.0 * known_prior.predict(work, regime), known_prior)
    np.testing.assert_allclose(fitted.paths[REGIMES[ADAGRAD]].terms, 2.0 * coefficients(2).terms, rtol=1e-6)


def test_without_records_the_prior_is_the_bases(known_prior: GroupPrior) -> None:
    none = GroupPrior.fit(work_of(0), np.zeros(0, dtype=np.int64), np.zeros((0, 2)), known_prior)
    assert none.to_json() == known_prior.to_json()


def test_many_records_overrule_the_base(known_prior: GroupPrior) -> None:
    work, regime = work_of(3000), np.full(3000, SGD)
    truth = GroupPrior({"any": coefficients(7)})
    measured = truth.predict(work, regime)
    fitted = GroupPrior.fit(work, regime, measured, known_prior)
    error = np.abs(fitted.predict(work, regime) / measured - 1.0)
    assert np.median(error) < 0.02
    few = GroupPrior.fit(work[:10], regime[:10], measured[:10], known_prior)
    assert np.median(error) < np.median(np.abs(few.predict(work, regime) / measured - 1.0))


# Models


def few_records(records: int) -> GroupSplit:
    """Some training and validation groups of the slow machine, and many held-out ones."""
    return few_of(group_data(slow_record(index) for index in range(1000, 1600)), records)


def few_of(data: GroupData, records: int) -> GroupSplit:
    """The split of some training and validation groups, and all held-out ones."""
    keep = data.held_out.copy()
    keep[np.flatnonzero(~data.held_out)[:records]] = True
    return split_groups(data.subset(keep))


def test_few_records_of_a_slower_machine_beat_training_from_scratch(base: GroupCostModel) -> None:
    split = few_records(50)
    calibrated = train_group_model(split, calibration_config(50, 2), quiet, start=base)
    scratch = train_group_model(split, TrainingConfig(2, 150, 64), quiet)
    errors = [group_accuracy(model, split.test)["total"]["median_ape"] for model in (calibrated, scratch, base)]
    assert errors[0] < 0.8 * errors[1] < errors[2]
    assert errors[0] < 0.25


def test_few_records_take_more_passes_but_not_without_end() -> None:
    epochs = [calibration_config(records, 3).epochs for records in (0, 10, 100, 500, 1000, 100_000)]
    assert epochs == sorted(epochs, reverse=True) and epochs[0] <= 200 and epochs[-1] >= 10
    assert calibration_config(100, 3, seed=5).seed == 5 and calibration_config(100, 3).nets == 3


def test_the_nearest_base_is_the_one_of_like_proportions(base: GroupCostModel) -> None:
    """Speed does not matter, for a refitted prior follows it."""
    data = few_records(60).train
    odd = GroupCostModel(GroupPrior({"any": Coefficients(np.ones(2), np.eye(len(WORK_TERMS), 2) + 1e-3)}))
    assert misfit(base, data) < misfit(odd, data)
    assert nearest_groups({"odd": odd, "base": base}, data) == "base"
    slower = GroupCostModel(GroupPrior({n: p.scaled(np.full(2, 9.0)) for n, p in base.prior.paths.items()}), base.nets)
    assert misfit(slower, data) == pytest.approx(misfit(base, data), rel=0.3)


def test_a_refitted_prior_serves_the_nets_as_they_are(base: GroupCostModel) -> None:
    """Even and slow: what is left is the base's own error."""
    data = group_data(record(index, "slow", 2.0) for index in range(1000, 1400))
    found = refitted(base, few_of(data, 40).train)
    own = group_accuracy(base, group_data(record(index) for index in range(1000, 1400)))["total"]["median_ape"]
    assert group_accuracy(found, data)["total"]["median_ape"] < own + 0.03
    assert found.nets == base.nets


def test_traces_of_work_that_costs_nothing_at_the_base_get_no_price() -> None:
    """Floating-point residue in a few records could be had at any price: 1e9 ms a byte was seen."""
    base = Coefficients.named((0.1, 0.1), {"lookups": (1e-3, 2e-3)})
    work = np.zeros((4, len(WORK_TERMS)))
    work[:, WORK_TERMS.index("lookups")] = [100, 2000, 500, 900]
    work[:, WORK_TERMS.index("bytes_memory")] = [0.0, 2e-11, 0.0, 4.8e-10]
    measured = np.outer(0.1 + 1e-3 * work[:, WORK_TERMS.index("lookups")], [1.0, 2.0]) * [[1.0], [1.3], [0.8], [1.5]]
    found = Coefficients.fit(work, measured, base, 0.2)
    assert not found.terms[WORK_TERMS.index("bytes_memory")].any()
    np.testing.assert_allclose(found.terms[WORK_TERMS.index("lookups")], [1.2e-3, 2.4e-3], rtol=0.4)


def test_inputs_that_a_base_has_never_seen_vary_do_not_drown_the_others() -> None:
    data = group_data(record(index) for index in range(400))
    fp16, weighted = (data.shards.features[:, FEATURES.index(name)] > 0 for name in ("fp16", "weighted"))
    odd = np.bincount(data.group, fp16 | weighted, len(data)) > 0
    known = split_groups(data.subset(~odd))
    blind = train_group_model(known, TrainingConfig(nets=1, epochs=5), quiet)
    constant = torch.as_tensor(known.train.shards.features.std(axis=0) < 1e-3)
    assert constant[FEATURES.index("fp16")] and constant[FEATURES.index("weighted")]
    blind.nets[0].feature_scale[constant] = 1e-3  # as in models trained before constant inputs counted as they are
    start = as_start(blind)
    np.testing.assert_allclose(predict_groups(start, known.test), predict_groups(blind, known.test), rtol=1e-4)
    tensors = TrainingTensors.of(split_groups(data.subset(odd | data.held_out)).train, blind.prior)
    largest = []
    for net in (blind.nets[0], start.nets[0]):
        widen_range(net, tensors)  # what training from a model begins with
        with torch.inference_mode():
            _, inputs = log_predictions(net, tensors, np.arange(len(tensors)))
            largest.append(float(net.residual(inputs).abs().max()))
    assert largest[0] > 5 * largest[1] and largest[1] < 1.0


def test_without_a_shipped_model_of_the_device_a_base_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "shipped_models", lambda: ())
    with pytest.raises(CostModelError, match="no cost model of a cuda device is shipped.*--base"):
        calibrate.nearest_model([record(0)], "cuda")


# The command


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that only shows that everything runs."""
    monkeypatch.setattr(pretrain, "distilled", partial(distilled, sampled=20, epochs=1))
    monkeypatch.setattr(calibrate, "_STEPS", 1)


def stored(path: Path, records: Iterator[dict[str, Any]]) -> Path:
    with MeasurementStore(path) as store:
        for made in records:
            store.append(made)
    return path


@pytest.fixture
def trained(tmp_path: Path, quick: None) -> Callable[[int], Path]:
    """Makes a model of so many nets on disk."""

    def make(nets: int) -> Path:
        records = stored(tmp_path / f"fast{nets}.jsonl", (record(index) for index in range(100)))
        folder = tmp_path / f"base{nets}"
        options = ["--nets", str(nets), "--epochs", "1", "--name", "quick"]
        assert main(["pretrain", "--records", str(records), "--out", str(folder), *options]) == 0
        return folder

    return make


def test_command_measures_calibrates_and_resumes(
    tmp_path: Path, trained: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    hardware = hardware_fingerprint("cpu")
    given = stored(tmp_path / "given.jsonl", (slow_record(index, hardware=hardware) for index in range(100)))
    base_folder, out = trained(2), tmp_path / "calibrated"
    options = ["calibrate", "--device", "cpu", "--base", str(base_folder), "--records", str(given), "--out", str(out)]
    assert main([*options, "--minutes", "0.02"]) == 0
    said = capsys.readouterr()
    assert "starting from cost model quick (fast)" in said.err and f"--cost-model {out}" in said.out
    measured = (out / RECORDS_FILE).read_bytes()
    model = CostModel.load(out)
    assert model.hardware == hardware["name"] and model.ensemble is not None and len(model.ensemble.nets) == 2
    assert model.card["calibrated_from"] == {"name": "quick", "hardware": "fast"}
    assert model.card["records"]["groups"] > 0
    # The budget of the second run is used up by the first.
    assert main([*options, "--minutes", "0.0001"]) == 0
    assert (out / RECORDS_FILE).read_bytes() == measured
    assert main([*options, "--minutes", "0.04"]) == 0
    assert (out / RECORDS_FILE).read_bytes().startswith(measured)


def test_too_short_a_budget_says_what_to_do_and_keeps_what_is_measured(
    tmp_path: Path, trained: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "calibrated"
    options = ["--device", "cpu", "--base", str(trained(2)), "--out", str(out), "--minutes", "0.001"]
    assert main(["calibrate", *options]) == 2
    said = capsys.readouterr().err
    assert "too few" in said and "longer --minutes" in said and RECORDS_FILE in said
    assert len((out / RECORDS_FILE).read_text().splitlines()) >= 1
    assert not (out / "card.json").exists()


def test_a_base_that_cannot_serve_is_named(
    tmp_path: Path, trained: Callable[[int], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["calibrate", "--device", "cpu", "--out", str(tmp_path / "calibrated"), "--minutes", "0.001", "--base"]
    assert main([*options, str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "--base" in said and str(tmp_path / "none") in said
    single = trained(1)
    capsys.readouterr()
    assert main([*options, str(single)]) == 2
    said = capsys.readouterr().err
    assert f"--base {single}" in said and "two nets" in said
    assert not (tmp_path / "calibrated" / RECORDS_FILE).exists()  # told before anything is measured


# The benchmark


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The options that name records of three machines, the target first."""
    monkeypatch.setattr(calibration_transfer_methods, "_SCRATCH_EPOCHS", (2, 2))
    monkeypatch.setattr(calibrate, "_EPOCHS", (2, 2))
    target = stored(tmp_path / "target.jsonl", (slow_record(index) for index in range(150)))
    fast = stored(tmp_path / "fast.jsonl", (record(index) for index in range(150, 300)))
    odd = stored(tmp_path / "odd.jsonl", (record(index, "odd", 1.0, 9.0) for index in range(300, 420)))
    return ["--records", str(target), "--base-records", str(fast), str(odd)]


def test_benchmark_compares_and_resumes(
    tmp_path: Path, machines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [*machines, "--out", str(out), "--nets", "1", "--epochs", "2", "--draws", "2", "--sizes", "60"]
    assert transfer_main(options) == 0
    printed = capsys.readouterr().out
    for text in ("calibrated", "from scratch", "full model", "missing part", "goal 1.3", "all of them together"):
        assert text in printed
    about, *rows = [json.loads(line) for line in (out / RESULTS_FILE).read_text().splitlines()]
    assert about["records"] == {"slow": 150} and about["base_records"] == {"fast": 150, "odd": 120}
    # full, 2 from scratch; as it is, 2 refitted and 2 calibrated for each of three bases
    assert len(rows) == len({key_of(row) for row in rows}) == 3 + 3 * 5
    for row in rows:
        assert set(row["errors"]) == {"all", "missing part"}
        assert 0 < row["errors"]["missing part"]["records"] < row["errors"]["all"]["records"]
        assert row["errors"]["all"]["total"]["p95_ape"] >= row["errors"]["all"]["total"]["median_ape"] >= 0
    assert {row["base_machine"] for row in rows if row["base"] == "nearest"} <= {"fast", "odd"}
    pytest.importorskip("matplotlib")
    assert (out / "transfer.png").read_bytes().startswith(b"\x89PNG")

    lines = (out / RESULTS_FILE).read_text().splitlines(keepends=True)
    (out / RESULTS_FILE).write_text("".join(lines[:6]) + lines[6][:20])  # killed while it wrote the seventh
    assert transfer_main(options) == 0
    again = [json.loads(line) for line in (out / RESULTS_FILE).read_text().splitlines()[1:]]
    assert [(key_of(row), row["errors"]) for row in again] == [(key_of(row), row["errors"]) for row in rows]
    capsys.readouterr()
    assert transfer_main([*options, "--seed", "1"]) == 2
    assert "other records or options" in capsys.readouterr().err


def test_benchmark_says_what_does_not_suit(
    tmp_path: Path, machines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    target, fast = machines[1], machines[3]
    out = ["--out", str(tmp_path / "out"), "--nets", "1", "--epochs", "1"]
    cases = {
        "fewer than 1000": ["--records", target, "--sizes", "1000"],
        "one kind of machine": ["--records", target, fast],
        "other machines than slow": ["--records", target, "--base-records", target],
        "none.jsonl": ["--records", str(tmp_path / "none.jsonl")],
    }
    for message, options in cases.items():
        assert transfer_main([*options, *out]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        calibration_transfer.parse_args(["--records", target, *out, "--draws", "0"])


def test_draws_are_of_the_whole_training_space_and_differ(tmp_path: Path) -> None:
    kept = calibration_transfer_methods.Kept(tmp_path)
    records = [record(index) for index in range(200)]
    machine = calibration_transfer_methods.Machine(records, ["fp16", "weighted"], kept, quiet)
    first, again, other = machine.draw(100, 0), machine.draw(100, 0), machine.draw(100, 1)
    assert len(first.train) + len(first.validation) == 100
    assert first.train.ids == again.train.ids != other.train.ids
    assert first.test.ids == other.test.ids == machine.split.test.ids
    without = machine.without_part()
    gone = {identity for identity, missing in zip(machine.data.ids, machine.missing) if missing}
    assert gone and not gone & {*without.train.ids, *without.validation.ids}
    assert gone & {*first.train.ids, *first.validation.ids}
    assert ids_of_parts(records, lambda spec: spec.data_type == "fp16" or spec.weighted) == gone


def ids_of_parts(records: list[dict[str, Any]], member: Callable[[GroupSpec], bool]) -> set[str]:
    return {made["id"] for made in records if member(GroupSpec.from_json(made["spec"]))}
