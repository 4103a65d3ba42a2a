"""Training on records: splits by base table, reproducible weights, errors that name what is missing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_neuroshard.cli import main
from torchrec_neuroshard.costs.features import segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.model import CARD_FILE, CostModel
from torchrec_neuroshard.measure.pool import base_tables, is_held_out, sample_group
from torchrec_neuroshard.measure.probe import DISTURBED, DisturbanceProbe
from torchrec_neuroshard.measure.specs import GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.training.collective_data import load_collectives
from torchrec_neuroshard.training.dataset import group_data, load_groups, spec_features, split_groups, undisturbed
from torchrec_neuroshard.training.evaluate import group_accuracy
from torchrec_neuroshard.training.train_groups import TrainingConfig, train_group_model

RECORDS = Path(__file__).parent.parent / "benchmarks" / "records"


def made_up_record(index: int) -> dict[str, Any]:
    """A sampled group with a cost that is known: 1 us a lookup forward, twice that backward, 0.1 ms launch."""
    spec = sample_group(5, index)
    forward = 0.1 + 1e-3 * spec.lookups
    figures = {"forward_ms": forward, "backward_ms": 2 * forward, "total_ms": 3 * forward}
    summary = {name: {"median": ms, "p10": ms, "p90": ms, "samples": [ms]} for name, ms in figures.items()}
    return {
        "kind": "group",
        "id": spec_id(spec),
        "spec": spec.to_json(),
        "device": "cpu",
        "hardware": {"name": "made_up"},
        "versions": {},
        "lookups": spec.lookups,
        **summary,
    }


@pytest.fixture(scope="module")
def records() -> list[dict[str, Any]]:
    return [made_up_record(index) for index in range(120)]


def test_split_keeps_held_out_tables_out_of_training(records: list[dict[str, Any]]) -> None:
    split = split_groups(group_data(records))
    assert len(split.train) + len(split.validation) + len(split.test) == len(records)
    held_out = {base.id for base in base_tables() if base.held_out}
    by_id = {record["id"]: GroupSpec.from_json(record["spec"]) for record in records}
    for part, expected in ((split.train, False), (split.validation, False), (split.test, True)):
        assert len(part) > 0
        for name in part.ids:
            bases = {shard.base in held_out for shard in by_id[name].shards}
            assert bases == {expected}


def test_nets_learn_a_known_cost(records: list[dict[str, Any]]) -> None:
    split = split_groups(group_data(records))
    model = train_group_model(split, TrainingConfig(nets=1, epochs=10), log=lambda _: None)
    accuracy = group_accuracy(model, split.test)
    assert accuracy["total"]["median_ape"] < 0.03
    assert accuracy["kendall_tau"] > 0.95


def test_training_is_reproducible_and_depends_on_the_seed(records: list[dict[str, Any]]) -> None:
    split = split_groups(group_data(records))
    config = TrainingConfig(nets=1, epochs=3)
    states = [
        train_group_model(split, dataclasses.replace(config, seed=seed), log=lambda _: None).nets[0].state_dict()
        for seed in (0, 0, 1)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])


def test_training_and_inference_compute_the_same(records: list[dict[str, Any]]) -> None:
    """The differentiable path that training uses, and the sums that the search keeps, give one prediction."""
    from torchrec_neuroshard.training.train_groups import TrainingTensors, log_predictions

    split = split_groups(group_data(records))
    model = train_group_model(split, TrainingConfig(nets=1, epochs=2), log=lambda _: None)
    tensors, net = TrainingTensors.of(split.test, model.prior), model.nets[0]
    with torch.inference_mode():
        additive, inputs = log_predictions(net, tensors, np.arange(len(split.test)))
        residual = torch.maximum(torch.minimum(net.residual(inputs), net.residual_high), net.residual_low)
        expected = (additive + residual).double().exp().numpy()
    sums = segment_sums(model.contributions(split.test.shards), split.test.group, len(split.test))
    np.testing.assert_allclose(model.predict(sums), expected, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "folder", "optimizers"),
    [
        ("cpu", "intel_xeon_l2_2m_l3_300m", {"sgd", "rowwise_adagrad", "adagrad"}),
        (
            "intel_xeon_l2_2m_l3_480m",
            "intel_xeon_l2_2m_l3_480m",
            {"sgd", "rowwise_adagrad", "adagrad"},
        ),
        ("amd_epyc_l2_512k_l3_32m", "amd_epyc_l2_512k_l3_32m", {"sgd", "rowwise_adagrad"}),
        ("amd_epyc_l2_1m_l3_32m", "amd_epyc_l2_1m_l3_32m", {"sgd", "rowwise_adagrad", "adagrad"}),
    ],
)
def test_shipped_records_agree_with_the_card(name: str, folder: str, optimizers: set[str]) -> None:
    model = CostModel.load(name)
    groups = load_groups(sorted((RECORDS / folder).glob("groups*.jsonl.xz")))
    collectives = load_collectives(sorted((RECORDS / folder).glob("collectives.jsonl.xz")))
    counts = model.card["records"]
    assert len(undisturbed(groups)) == counts["groups"] >= 3600
    assert len(collectives) == sum(counts["collectives"].values())
    assert {record["spec"]["optimizer"] for record in groups} == optimizers
    assert {record["hardware"]["name"] for record in groups} == {model.hardware} == {folder}
    held_out = group_data(undisturbed(record for record in groups if is_held_out(GroupSpec.from_json(record["spec"]))))
    measured = group_accuracy(model.groups, held_out)
    claimed = model.card["accuracy"]["groups_held_out_tables_drift_left_in"]
    assert measured["total"]["median_ape"] == pytest.approx(claimed["total"]["median_ape"], abs=2e-3)
    assert measured["kendall_tau"] == pytest.approx(claimed["kendall_tau"], abs=2e-3)
    assert isinstance(model.groups, GroupCostModel)
    alone = group_accuracy(GroupCostModel(model.groups.prior), held_out)
    assert alone["total"]["median_ape"] > measured["total"]["median_ape"]  # the nets earn their keep
    assert model.ensemble is not None and len(model.ensemble.nets) >= 4 and len(model.groups.nets) == 1


def test_disturbed_records_are_left_out(records: list[dict[str, Any]]) -> None:
    marked = [{**records[0], "disturbance": DISTURBED + 0.1}, {**records[1], "disturbance": 1.0}, records[2]]
    assert undisturbed(marked) == marked[1:]


def test_probe_reports_a_ratio_to_its_usual_time() -> None:
    probe = DisturbanceProbe(torch.device("cpu"))
    assert 0.1 < np.median([probe.disturbance() for _ in range(5)]) < 10


def test_command_line_trains_and_writes_a_loadable_model(
    tmp_path: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with MeasurementStore(tmp_path / "groups.jsonl") as store:
        for record in records:
            store.append(record)
    out = tmp_path / "model"
    assert main(["pretrain", "--records", str(store.path), "--out", str(out), "--epochs", "1", "--nets", "1"]) == 0
    model = CostModel.load(out)
    assert model.provenance == "measured" and model.hardware == "made_up"
    card = json.loads((out / CARD_FILE).read_text())
    assert card["records"]["groups"] == len(records)
    assert card["collectives_provenance"] == "analytic"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no group records"),
        ("{\n", "line 1"),
        ('{"schema":1,"kind":"group","id":"x"}\n', "'spec' is missing"),
        ('{"schema":1,"kind":"collective","id":"x","spec":{},"hardware":{"name":"h"}}\n', "field 'dims' is missing"),
    ],
)
def test_command_line_says_what_is_wrong_with_records(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_text(content)
    assert main(["pretrain", "--records", str(path), "--out", str(tmp_path / "model")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"total_ms": {"median": -1.0, "p10": 1.0, "p90": 1.0}}, "total_ms.median"),
        ({"forward_ms": {"median": float("nan")}}, "forward_ms.median"),
        ({"lookups": None}, "cannot be used"),
        ({"hardware": "a machine"}, "cannot be used"),
        ({"id": ["x"]}, "id must be a text"),
        ({"disturbance": "much"}, "cannot be used"),
        ({"spec": None}, "cannot be used"),
    ],
)
def test_impossible_records_are_refused_by_name(
    tmp_path: Path,
    records: list[dict[str, Any]],
    changes: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with MeasurementStore(tmp_path / "groups.jsonl") as store:
        store.append({**records[0], **changes})
    assert main(["pretrain", "--records", str(store.path), "--out", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "groups.jsonl" in said and message in said


def test_features_of_a_record_are_those_of_its_spec(records: list[dict[str, Any]]) -> None:
    spec = GroupSpec.from_json(records[0]["spec"])
    data = group_data(records[:1])
    np.testing.assert_array_equal(data.shards.features, spec_features(spec).features)


def test_damaged_and_missing_parts_are_named(
    tmp_path: Path, records: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.jsonl.xz"
    content = (RECORDS / "amd_epyc_l2_512k_l3_32m" / "collectives.jsonl.xz").read_bytes()
    cut.write_bytes(content[: len(content) // 2])
    assert main(["pretrain", "--records", str(cut), "--out", str(tmp_path / "model")]) == 2
    assert "cut.jsonl.xz: damaged" in capsys.readouterr().err
    with MeasurementStore(tmp_path / "few.jsonl") as store:
        for record in [record for record in records if not is_held_out(GroupSpec.from_json(record["spec"]))][:5]:
            store.append(record)
    assert main(["pretrain", "--records", str(store.path), "--out", str(tmp_path / "model")]) == 2
    assert "0 held-out" in capsys.readouterr().err
    assert main(["pretrain", "--records", str(store.path), "--out", str(store.path)]) == 2
    assert "is a file" in capsys.readouterr().err


def test_a_group_measured_twice_counts_once(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    with MeasurementStore(tmp_path / "twice.jsonl") as store:
        for record in (records[0], records[1], {**records[0], "lookups": 1.0}):
            store.append(record)
    loaded = load_groups([store.path])
    assert len(loaded) == 2 and loaded[0]["lookups"] == 1.0
