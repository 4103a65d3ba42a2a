"""Tests of the cost-model ablation: reuse histograms, the paper's net, and one quick run on shipped records."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Iterator, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import cost_model_ablation_methods as methods
from benchmarks.cost_model_ablation import main
from benchmarks.cost_model_ablation_methods import ONE_BATCH_METHOD, AblationData
from benchmarks.cost_model_ablation_paper import (
    PAPER_FEATURES,
    PaperConfig,
    PaperGroups,
    paper_features,
    train_paper_model,
)
from benchmarks.cost_model_ablation_report import result_rows
from torchrec_neuroshard.access import REUSE_EDGES, AccessDistribution
from torchrec_neuroshard.costs.features import ShardFeatures, segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.training.dataset import spec_features

MACHINE = "intel_xeon_l2_2m_l3_480m"
RECORDS = Path(__file__).parent.parent / "benchmarks" / "records" / MACHINE / "groups.jsonl.xz"
ShareOf = Literal["lookups", "rows"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nets this small lose time to a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def bin_of(hits: int) -> int:
    """The bin of a row that is hit so often: (edge, next edge], the last one open."""
    return max(index for index, edge in enumerate(REUSE_EDGES) if hits > edge)


def simulated_histogram(distribution: AccessDistribution, lookups: int, share_of: ShareOf) -> np.ndarray:
    rng = np.random.default_rng(5)
    histogram = np.zeros(len(REUSE_EDGES))
    for _ in range(max(20, min(2000, 2_000_000 // lookups))):
        hits = np.unique(distribution.sample(lookups, rng), return_counts=True)[1]
        bins = np.searchsorted(np.asarray(REUSE_EDGES), hits, side="left") - 1
        np.add.at(histogram, bins, hits if share_of == "lookups" else 1)
    return histogram / histogram.sum()


@pytest.mark.parametrize("share_of", ["lookups", "rows"])
@pytest.mark.parametrize(
    ("rows", "exponent", "lookups"),
    [
        (10, 0.0, 37),
        (10, 1.2, 3000),
        (500, 0.7, 900),
        (20_000, 0.0, 30_000),
        (300_000, 1.05, 100_000),
        (10**6, 0.5, 50),
    ],
)
def test_reuse_histograms_are_those_of_simulated_batches(
    rows: int, exponent: float, lookups: int, share_of: ShareOf
) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    simulated = simulated_histogram(distribution, lookups, share_of)
    assert distribution.reuse_histogram(lookups, share_of) == pytest.approx(simulated, abs=0.01)


@given(st.integers(1, 10**8), st.floats(0.0, 1.5), st.floats(0.001, 1e9), st.sampled_from(["lookups", "rows"]))
def test_a_reuse_histogram_is_a_distribution(rows: int, exponent: float, lookups: float, share_of: ShareOf) -> None:
    histogram = AccessDistribution.zipf(rows, exponent).reuse_histogram(lookups, share_of)
    assert histogram.shape == (17,)
    assert histogram.sum() == pytest.approx(1.0)
    assert np.all(histogram >= 0)


@given(st.integers(1, 10**7), st.floats(0.0, 1.5), st.floats(1.0, 1e6))
def test_rows_hit_once_are_lookups_of_their_own(rows: int, exponent: float, lookups: float) -> None:
    distribution = AccessDistribution.zipf(rows, exponent)
    unique = distribution.expected_unique(lookups)
    single = distribution.reuse_histogram(lookups, "rows")[0] * unique
    assert distribution.reuse_histogram(lookups, "lookups")[0] * lookups == pytest.approx(single, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("lookups", [1, 2, 3, 4, 5, 64, 65, 32768, 32769, 10**6])
@pytest.mark.parametrize("share_of", ["lookups", "rows"])
def test_the_only_row_of_a_table_is_hit_by_all(lookups: int, share_of: ShareOf) -> None:
    histogram = AccessDistribution.zipf(1, 0.0).reuse_histogram(lookups, share_of)
    assert histogram[bin_of(lookups)] == pytest.approx(1.0)


def test_no_lookups_reuse_nothing() -> None:
    assert not AccessDistribution.zipf(10, 1.0).reuse_histogram(0).any()


def test_the_papers_features_are_plain_numbers_and_shares_of_distinct_rows() -> None:
    spec = GroupSpec(512, (ShardSpec(1000, 64, 8.0, zipf=0.9), ShardSpec(10**6, 128, 0.5, zipf=0.0)))
    features = paper_features(spec)
    assert features.shape == (2, len(PAPER_FEATURES)) == (2, 20)
    assert features[:, -3:].tolist() == [[64, 8.0, 1000], [128, 0.5, 10**6]]
    assert features[:, :17].sum(axis=1) == pytest.approx([1.0, 1.0])
    assert features[0, :17] == pytest.approx(AccessDistribution.zipf(1000, 0.9).reuse_histogram(4096, "rows"))
    assert features[1, 0] > 0.99
    no_ids = paper_features(GroupSpec(512, (ShardSpec(1000, 64, 0.0),)))
    assert not no_ids[0, :17].any()


def additive_groups(count: int, seed: int) -> PaperGroups:
    """Groups of 1 to 8 tables, whose cost is the sum of a smooth function of each."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 9, count)
    first = np.concatenate([[0], np.cumsum(lengths)])
    features = rng.uniform(0.0, 4.0, (first[-1], 3))
    cost = 1.0 + features[:, 0] * features[:, 1]
    return PaperGroups(features, first, np.add.reduceat(cost, first[:-1]))


@pytest.mark.parametrize("log_cost", [False, True])
def test_the_papers_net_learns_a_sum_over_tables(log_cost: bool) -> None:
    train, test = additive_groups(400, 0), additive_groups(200, 1)
    config = PaperConfig(epochs=50, batch_groups=32, learning_rate=2e-3, log_cost=log_cost)
    predicted = train_paper_model(train, additive_groups(100, 2), config).predict(test)
    assert np.median(np.abs(predicted / test.target_ms - 1.0)) < 0.08
    assert predicted.min() >= train.target_ms.min()


def test_the_papers_net_is_a_function_of_the_set_and_of_its_seed() -> None:
    train, validation = additive_groups(100, 0), additive_groups(20, 1)
    test = PaperGroups(np.random.default_rng(3).uniform(0, 4, (4, 3)), np.asarray([0, 4]), np.ones(1))
    configs = [PaperConfig(epochs=20, batch_groups=16, seed=seed) for seed in (0, 0, 1)]
    models = [train_paper_model(train, validation, config) for config in configs]
    predictions = [float(model.predict(test)[0]) for model in models]
    assert predictions[0] == predictions[1] != predictions[2]
    assert models[0].predict(replace(test, features=test.features[::-1])) == pytest.approx(predictions[0], rel=1e-5)


def test_training_stops_when_nothing_is_learned() -> None:
    config = PaperConfig(epochs=10**9, learning_rate=0.0, patience=3)
    assert train_paper_model(additive_groups(20, 0), additive_groups(5, 1), config).best_epoch == 1


@settings(max_examples=20)
@given(st.lists(st.booleans(), min_size=12, max_size=12))
def test_selected_groups_keep_their_shards(kept: list[bool]) -> None:
    groups = additive_groups(12, 4)
    selected = groups.select(np.asarray(kept))
    chosen = [index for index, keep in enumerate(kept) if keep]
    assert selected.target_ms.tolist() == groups.target_ms[chosen].tolist()
    for number, index in enumerate(chosen):
        ours = selected.features[selected.first[number] : selected.first[number + 1]]
        assert ours.tolist() == groups.features[groups.first[index] : groups.first[index + 1]].tolist()


def test_without_the_residual_shards_add_up() -> None:
    torch.manual_seed(0)
    net = GroupNet()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0.0, 0.1)
    prior = GroupPrior.from_terms((0.5, 0.7), {"lookups": (1e-4, 2e-4), "output_bytes": (1e-6, 1e-6)})
    whole = GroupCostModel(prior, (net,))
    cut = methods._without_residual(whole)
    parts = [spec_features(GroupSpec(256, (ShardSpec(1000, dim, 4.0, zipf=0.5),))) for dim in (8, 64, 256)]
    alone = [predict(cut, part) for part in parts]
    together = predict(cut, ShardFeatures.concatenate(parts))
    assert together - [0.5, 0.7] == pytest.approx(sum(alone) - 3 * np.asarray([0.5, 0.7]), rel=1e-6)
    assert predict(whole, parts[0]) != pytest.approx(alone[0], rel=1e-3)  # the original keeps its residual


def predict(model: GroupCostModel, shards: ShardFeatures) -> np.ndarray:
    one_group = np.zeros(len(shards.work), np.int64)
    return model.predict(segment_sums(model.contributions(shards), one_group, 1))[0]


@pytest.fixture(scope="module")
def some_records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every 20th shipped record."""
    path = tmp_path_factory.mktemp("records") / "groups.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in itertools.islice(read_records(RECORDS), 0, None, 20)))
    return path


def test_a_quick_run_compares_all_methods(
    some_records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "_LEAST_GROUPS", 10)
    arguments = ["--records", str(some_records), "--out", str(tmp_path), "--quick", "--passes", "--batch-size", "1024"]
    assert main(arguments) == 0
    run, *rows = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert run["kind"] == "run" and run["config"]["seeds"] == [0] and run["groups"]["test"] > 10
    printed = capsys.readouterr().out
    names = {row["method"] for row in rows}
    assert len(names) == 13
    assert all(name in printed for name in names)
    for row in rows:
        check_row(row)
    by_size = {r["subset"]: r["records"] for r in rows if r["method"] == "ours"}
    assert by_size["up to 15 shards"] + by_size["more than 15 shards"] == by_size["all"] == run["groups"]["test"]
    kinds = ("paper's setting", "other pooled", "unpooled", "dense")
    assert sum(by_size.get(kind, 0) for kind in kinds) == by_size["all"]
    assert {r["subset"] for r in rows if r["method"] == ONE_BATCH_METHOD} == {"paper's setting, batch 1024"}
    assert all((r["forward"] is None) == (r["method"] not in predicting_passes(names)) for r in rows)
    pytest.importorskip("matplotlib")
    assert (tmp_path / "ablation.png").read_bytes().startswith(b"\x89PNG")


def predicting_passes(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("paper")} | {"paper + batch"}


def check_row(row: dict[str, Any]) -> None:
    assert row["records"] > 0
    for part in ("total", "forward", "backward"):
        if row[part] is not None:
            assert all(math.isfinite(value) for value in row[part].values())
            assert row[part]["p95_ape"] >= row[part]["median_ape"] >= 0
    for name in ("kendall_tau", "kendall_tau_strata"):
        assert row[name] is None or -1 <= row[name] <= 1


def test_exact_predictions_have_no_error(some_records: Path) -> None:
    data = AblationData(read_records(some_records), as_measured=True)
    measured = data.split.test.measured_ms
    exact = methods.Outcome("exact", 0, measured.sum(axis=1), measured, 0.0)
    for row in result_rows(data, [exact]):
        assert row["total"] == row["forward"] == row["backward"] == {"median_ape": 0.0, "p95_ape": 0.0, "bias": 0.0}
        assert row["kendall_tau"] is None or row["kendall_tau"] > 0.999


def test_what_cannot_be_compared_is_said(
    some_records: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--records", str(tmp_path / "none.jsonl"), "--out", str(tmp_path)]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    other = tmp_path / "other.jsonl"
    other.write_text(some_records.read_text().replace(MACHINE, "another"))
    assert main(["--records", str(some_records), str(other), "--out", str(tmp_path)]) == 2
    assert "one kind of machine" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--records", str(some_records), "--out", str(tmp_path), "--epochs", "0"])
