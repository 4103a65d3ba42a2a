"""Drift of the machine, distilled mean heads, ensembles that know where their data end, and active sampling."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_training import made_up_record
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.costs.features import FEATURES, ShardFeatures, segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.uncertainty import Uncertainty
from torchrec_neuroshard.measure.pool import is_held_out
from torchrec_neuroshard.measure.reference import REFERENCE_TIMES, ReferenceProbe, reference_json, reference_of
from torchrec_neuroshard.training.active import active_groups, disagreement
from torchrec_neuroshard.training.dataset import GroupData, group_data, load_groups, split_groups
from torchrec_neuroshard.training.distil import distilled
from torchrec_neuroshard.training.drift import ReferenceSpeed, drift, evened
from torchrec_neuroshard.training.evaluate import group_spread, predict_groups
from torchrec_neuroshard.training.pretrain import train_groups_of
from torchrec_neuroshard.training.train_groups import TrainingConfig, TrainingTensors, train_group_model


def quiet(_: str) -> None:
    """Drops a line of the training log."""


def drifting_record(index: int, slowness: float = 1.0, **fields: Any) -> dict[str, Any]:
    record = made_up_record(index)
    for name in ("forward_ms", "backward_ms", "total_ms"):
        record[name] = {quantile: record[name]["median"] * slowness for quantile in ("median", "p10", "p90")}
    return {**record, "unix_time": float(index), **fields}


@pytest.fixture(scope="module")
def data() -> GroupData:
    return group_data(made_up_record(index) for index in range(160))


@pytest.fixture(scope="module")
def ensemble(data: GroupData) -> GroupCostModel:
    """Nets that had something to learn beyond the prior: groups of many shards are slow."""
    many = np.bincount(data.group) > 8
    bent = replace(data, measured_ms=data.measured_ms * np.where(many, 1.6, 1.0)[:, None])
    return train_group_model(split_groups(bent), TrainingConfig(nets=3, epochs=8), quiet)


def test_drift_is_found_from_the_errors_of_neighbours() -> None:
    rng = np.random.default_rng(0)
    true = 0.2 * np.sin(np.arange(400) / 80)
    data = group_data(drifting_record(index, np.exp(true[index])) for index in range(400))
    noise = rng.normal(0, 0.05, (400, 2))
    found = drift(true[:, None] + noise, data, None)
    assert np.abs(found - true[:, None])[50:-50].mean() < 0.03


def test_evening_takes_the_drift_out_and_keeps_each_machines_median() -> None:
    true = np.repeat([0.0, 0.3], 200)
    data = group_data(drifting_record(index, np.exp(true[index])) for index in range(400))
    even = evened(data, np.column_stack([true, true]))
    ratio = even.measured_ms / data.measured_ms
    np.testing.assert_allclose(ratio, np.exp(np.median(true) - true)[:, None] * np.ones((1, 2)))
    np.testing.assert_allclose(even.total_ms, even.measured_ms.sum(axis=1))


def test_held_out_groups_have_no_say_in_the_drift() -> None:
    data = group_data(drifting_record(index) for index in range(200))
    error = np.where(data.held_out[:, None], 1.0, 0.0) * np.ones((1, 2))
    assert data.held_out.any() and not drift(error, data, None).any()


def test_reference_times_tell_the_drift_of_single_records() -> None:
    """Slow for a record here and there, which no neighbour tells."""
    rng = np.random.default_rng(0)
    true = np.where(rng.random(300) < 0.3, 0.3, 0.0)
    times = [dict.fromkeys(REFERENCE_TIMES, float(np.exp(slow))) for slow in true]
    data = group_data(drifting_record(index, reference_ms=times[index]) for index in range(300))
    error = true[:, None] + rng.normal(0, 0.05, (300, 2))
    speed = ReferenceSpeed.fit(error, data)
    assert speed is not None
    found = drift(error, data, speed)
    assert np.abs(found - np.median(found[true == 0], axis=0) - true[:, None]).mean() < 0.03
    again = ReferenceSpeed.from_json(speed.to_json())
    np.testing.assert_allclose(again.log_slowness(data.reference_ms), speed.log_slowness(data.reference_ms))
    without = group_data(drifting_record(index) for index in range(50))
    assert ReferenceSpeed.fit(error[:50], without) is None
    assert not speed.log_slowness(without.reference_ms).any()


def test_groups_of_plans_have_no_say_in_the_drift() -> None:
    """What a model gets wrong about them is not the machine's doing."""
    data = group_data(drifting_record(index, sampling="plan") for index in range(60))
    assert not drift(np.ones((60, 2)), data, None).any()


def test_sessions_of_few_records_say_nothing() -> None:
    data = group_data(drifting_record(index, pid=index // 10) for index in range(40))
    assert not drift(np.ones((40, 2)), data, None).any()


def test_subsets_are_what_their_records_give(data: GroupData) -> None:
    keep = np.arange(160) % 3 == 1
    part = data.subset(keep)
    expected = group_data(made_up_record(index) for index in np.flatnonzero(keep))
    for name in ("measured_ms", "total_ms", "group", "batch_size", "lookups", "held_out", "ids"):
        np.testing.assert_array_equal(getattr(part, name), getattr(expected, name))
    for name in ("work", "features", "regime"):
        np.testing.assert_array_equal(getattr(part.shards, name), getattr(expected.shards, name))


def test_mean_head_predicts_the_ensembles_mean(data: GroupData, ensemble: GroupCostModel) -> None:
    mean = distilled(ensemble, split_groups(data).train, sampled=100, epochs=15, log=quiet)
    assert len(mean.nets) == 1 and mean.z_dim < ensemble.z_dim
    ratio = predict_groups(mean, data) / predict_groups(ensemble, data)
    assert np.median(np.abs(ratio - 1)) < 0.02


def test_one_net_is_its_own_mean_head(data: GroupData, ensemble: GroupCostModel) -> None:
    single = GroupCostModel(ensemble.prior, ensemble.nets[:1])
    assert distilled(single, data) is single


def test_spread_is_the_deviation_of_the_nets(data: GroupData, ensemble: GroupCostModel) -> None:
    each = [predict_groups(GroupCostModel(ensemble.prior, (net,)), data).sum(axis=1) for net in ensemble.nets]
    np.testing.assert_allclose(group_spread(ensemble, data), np.log(each).std(axis=0), rtol=1e-6)
    assert not group_spread(GroupCostModel(ensemble.prior), data).any()
    assert ensemble.spread(np.zeros((2, ensemble.z_dim))).tolist() == [0.0, 0.0]


def test_other_machines_records_help_without_their_speed(data: GroupData) -> None:
    """Twice as slow a machine beside it leaves a machine's own predictions in place."""
    split = split_groups(data)
    slow = split_groups(group_data(drifting_record(index, 2.0) for index in range(160, 320))).train
    model = train_group_model(split, TrainingConfig(nets=1, epochs=10), quiet, others=[slow])
    bias = np.log(predict_groups(model, split.test) / split.test.measured_ms).mean()
    assert abs(bias) < 0.08  # a mixture would be off by 0.35


def test_features_beyond_the_measured_range_count_as_its_end(data: GroupData, ensemble: GroupCostModel) -> None:
    net, tensors = ensemble.nets[0], TrainingTensors.of(data, ensemble.prior)
    far = tensors.features[:5].clone()
    far[:, FEATURES.index("log_rows")] += 100.0
    edge = torch.minimum(far, net.feature_high)
    common = tensors.common[:5]
    with torch.inference_mode():
        assert torch.equal(net.contributions(far, common), net.contributions(edge, common))
        assert not torch.equal(net.contributions(far, common), net.contributions(tensors.features[:5], common))


def test_uncertainty_learns_errors_from_spread(data: GroupData) -> None:
    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 0.2, 600)
    error = np.abs(rng.normal(0, 0.04 + 0.8 * spread))
    found = Uncertainty.fit(spread, error, data.shards)
    expected = found.expected_error(np.asarray([0.05, 0.15]))
    np.testing.assert_allclose(expected, 0.6745 * np.asarray([0.08, 0.16]), rtol=0.2)
    assert found.largest_spread == pytest.approx(0.198, abs=0.002)
    assert Uncertainty.from_json(found.to_json()) == found


def test_uncertainty_names_the_features_that_lie_outside(data: GroupData) -> None:
    known = Uncertainty.fit(np.asarray([0.0, 0.1]), np.asarray([0.05, 0.06]), data.shards)
    assert known.outside(data.shards) == {}
    features = data.shards.features[:4].copy()
    features[2, FEATURES.index("log_rows")] = 30.0
    odd = ShardFeatures(data.shards.work[:4], features, data.shards.regime[:4])
    found = {name: mask.tolist() for name, mask in known.outside(odd).items()}
    assert found == {"log_rows": [False, False, True, False]}


def test_active_sampling_takes_what_the_nets_disagree_on(ensemble: GroupCostModel) -> None:
    groups = list(itertools.islice(active_groups(ensemble, 4), 30))
    chosen = [group.spec for group in groups if group.sampling == "active"]
    by_chance = [group.spec for group in groups if group.sampling == "random"]
    assert (len(chosen), len(by_chance)) == (20, 10)
    assert not any(is_held_out(spec) for spec in chosen)
    assert np.median(disagreement(ensemble, chosen)) > 1.5 * np.median(disagreement(ensemble, by_chance))
    again = list(itertools.islice(active_groups(ensemble, 4), 30))
    assert again == groups
    with pytest.raises(ValueError, match="at least two nets"):
        next(active_groups(GroupCostModel(ensemble.prior, ensemble.nets[:1]), 0))


def test_reference_times_survive_a_record() -> None:
    times = ReferenceProbe(torch.device("cpu")).times()
    assert times.shape[1] == len(REFERENCE_TIMES) and (times > 0).all()
    kept = reference_of({"reference_ms": reference_json(times)})
    np.testing.assert_allclose(kept, np.median(times, axis=0), atol=1e-4)
    assert np.isnan(reference_of({})).all()


def test_pretraining_finds_the_cost_beneath_a_drift() -> None:
    """Three machines' hours, of which the second ran 30 % slower: held-out errors are those of an even machine."""
    slowness = [1.3 if 100 <= index < 200 else 1.0 for index in range(300)]
    trained = train_groups_of(
        [drifting_record(index, slowness[index], pid=index // 100) for index in range(300)],
        TrainingConfig(nets=2, epochs=10),
        log=quiet,
    )
    accuracy = trained.accuracy()
    assert accuracy["groups_held_out_tables"]["total"]["median_ape"] < 0.05
    assert accuracy["groups_held_out_tables_drift_left_in"]["total"]["p95_ape"] > 0.15
    assert trained.drift_json()["forward"]["p98"] == pytest.approx(1.3, abs=0.06)
    assert len(trained.ensemble.nets) == 2 and len(trained.mean.nets) == 1


def test_sums_of_contributions_do_not_depend_on_the_batch(data: GroupData, ensemble: GroupCostModel) -> None:
    z = segment_sums(ensemble.contributions(data.shards), data.group, len(data))
    together = ensemble.predict(z)
    alone = np.concatenate([ensemble.predict(z[index : index + 1]) for index in range(len(z))])
    np.testing.assert_allclose(together, alone, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--active", "no_such_model"], "--active: no cost model 'no_such_model'"),
        (["--active", "cpu", "--held-out"], "exclude each other"),
    ],
)
def test_odd_choices_of_groups_are_refused(
    tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["measure", "compute", "--device", "cpu", "--out", str(tmp_path / "x.jsonl"), *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x.jsonl").exists()


def test_measuring_held_out_groups_takes_no_others(tmp_path: Path) -> None:
    out = tmp_path / "test.jsonl"
    options = ["--device", "cpu", "--out", str(out), "--held-out", "--limit", "2"]
    assert main(["measure", "compute", *options]) == 0
    records = load_groups([out])
    assert len(records) == 2 and group_data(records).held_out.all()
