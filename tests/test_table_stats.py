from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from planner_models import bag_collection, bag_config
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.table_stats import TableStats, TableStatsError


def kjt(**features: list[list[int]]) -> KeyedJaggedTensor:
    bags = [bag for per_sample in features.values() for bag in per_sample]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor([i for bag in bags for i in bag], dtype=torch.long),
        lengths=torch.tensor([len(bag) for bag in bags]),
    )


def test_pooling_factors_count_all_features_and_batches() -> None:
    configs = [bag_config("t0", 10, 8, ["x", "y"]), bag_config("t1", 20, 8, ["y"])]
    batches = [kjt(x=[[1, 2], [3]], y=[[], [4, 5, 6]]), kjt(x=[[], []], y=[[7], [8]])]
    stats = TableStats.from_batches(batches, configs)
    # x has 3 ids and y has 5 in 4 samples; y is looked up in both tables.
    assert stats.pooling_factors == {"t0": 8 / 4, "t1": 5 / 4}
    assert stats.access["t0"].rows == 10 and stats.access["t1"].rows == 20


def test_access_follows_the_ids() -> None:
    rng = np.random.default_rng(0)
    hot = rng.integers(0, 3, size=4000).tolist()
    even = rng.integers(0, 1000, size=4000).tolist()
    configs = [bag_config("hot", 1000, 8, ["h"]), bag_config("even", 1000, 8, ["e"])]
    stats = TableStats.from_batches([kjt(h=[hot], e=[even])], configs)
    assert stats.access["hot"].top_mass(3) > 0.99
    assert stats.access["even"].top_mass(3) < 0.05


def test_ids_sorted_by_popularity_are_told_from_scattered_ones() -> None:
    rng = np.random.default_rng(0)
    names, exponents = ("sorted", "scattered", "even"), (0.8, 0.8, 0.0)
    ranks = [AccessDistribution.zipf(10_000, exponent).sample(5000, rng) for exponent in exponents]
    ranks[1] = rng.permutation(10_000)[ranks[1]]
    batch = kjt(**{f"f_{name}": [ids.tolist()] for name, ids in zip(names, ranks)})
    stats = TableStats.from_batches([batch], [bag_config(name, 10_000, 8) for name in names])
    assert dict(stats.id_orders) == {"sorted": "frequency", "scattered": "scattered", "even": "scattered"}


def test_a_file_may_hold_a_reuse_histogram() -> None:
    truth = AccessDistribution.zipf(50_000, 0.7)
    reuse = {"rows": 50_000, "lookups": 10_000, "shares": truth.reuse_histogram(10_000, "rows").tolist()}
    stats = TableStats.from_json({"schema": 1, "tables": {"t": {"reuse_histogram": reuse}}})
    assert stats.access["t"].expected_unique(20_000) == pytest.approx(truth.expected_unique(20_000), rel=0.05)


def test_max_lookups_caps_the_ids_but_not_the_pooling_factor() -> None:
    batches = [kjt(f_t=[[0] * 50]), kjt(f_t=[list(range(50))])]
    stats = TableStats.from_batches(batches, [bag_config("t", 1000, 8)], max_lookups=50)
    assert stats.pooling_factors == {"t": 50.0}
    assert stats.access["t"].top_mass(1) > 0.99  # the second batch was not kept


def test_tables_of_two_modules_with_one_name_are_kept_apart() -> None:
    model = nn.ModuleDict(
        {"a": bag_collection(bag_config("t", 10, 8, ["x"])), "b": bag_collection(bag_config("t", 10, 8, ["y"]))}
    )
    stats = TableStats.from_batches([kjt(x=[[1, 2]], y=[[1]])], model)
    assert stats.pooling_factors == {"a.t": 2.0, "b.t": 1.0}
    assert stats.pooling_factor("a", "t") == 2.0
    assert stats.pooling_factor("c", "t") is None


def test_a_plain_name_serves_any_module() -> None:
    stats = TableStats({"t": 3.0})
    assert stats.pooling_factor("deep.module", "t") == 3.0
    assert stats.distribution("deep.module", "t") is None


def test_saved_statistics_come_back(tmp_path: Path) -> None:
    stats = TableStats({"t": 2.5, "only_pooling": 1.0}, {"t": AccessDistribution.zipf(500, 1.1)}, {"t": "frequency"})
    stats.save(tmp_path / "stats.json")
    loaded = TableStats.load(tmp_path / "stats.json")
    assert loaded.pooling_factors == stats.pooling_factors
    assert set(loaded.access) == {"t"}
    assert loaded.id_order("any", "t") == "frequency" and loaded.id_order("any", "only_pooling") == "scattered"
    np.testing.assert_allclose(loaded.access["t"].masses, stats.access["t"].masses)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", ["stats.json", "not a JSON file"]),
        (json.dumps({"schema": 99, "tables": {}}), ["stats.json", "'schema' is 99"]),
        (json.dumps({"schema": 1}), ["'tables'"]),
        (json.dumps({"schema": 1, "tables": {"t": {"access": {"counts": [1]}}}}), ["tables.t"]),
        (json.dumps({"schema": 1, "tables": {"t": {"pooling_factor": -1}}}), ["'t'", "at least 0"]),
        (json.dumps({"schema": 1, "tables": {"t": {"id_order": "random"}}}), ["'t'", "scattered, frequency"]),
        (json.dumps({"schema": 1, "tables": {"t": {"reuse_histogram": {"rows": 5}}}}), ["tables.t", "shares"]),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: str, words: list[str]) -> None:
    path = tmp_path / "stats.json"
    path.write_text(content)
    with pytest.raises(TableStatsError) as caught:
        TableStats.load(path)
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TableStatsError, match="absent.json"):
        TableStats.load(tmp_path / "absent.json")


def test_a_batch_without_a_feature_is_an_error() -> None:
    with pytest.raises(TableStatsError, match="batch 0 has no feature 'f_t'"):
        TableStats.from_batches([kjt(other=[[1]])], [bag_config("t", 10, 8)])


def test_ids_outside_the_table_are_an_error() -> None:
    with pytest.raises(TableStatsError, match="table 't'"):
        TableStats.from_batches([kjt(f_t=[[10]])], [bag_config("t", 10, 8)])


def test_no_batches_and_no_tables_are_errors() -> None:
    with pytest.raises(TableStatsError, match="no samples"):
        TableStats.from_batches([], [bag_config("t", 10, 8)])
    with pytest.raises(TableStatsError, match="no tables"):
        TableStats.from_batches([], nn.Linear(2, 2))


def test_empty_batches_do_not_count_and_late_bad_ids_are_seen() -> None:
    config = bag_config("a", 10, 8, ["f"])
    empty = KeyedJaggedTensor.from_lengths_sync(["f"], torch.empty(0, dtype=torch.int64), torch.empty(0).long())
    full = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2, 3]), torch.tensor([2, 1]))
    assert TableStats.from_batches([empty, full], [config]).pooling_factors == {"a": 1.5}
    with pytest.raises(TableStatsError, match="not empty"):
        TableStats.from_batches([empty], [config])
    late = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([99]), torch.tensor([1]))
    with pytest.raises(TableStatsError, match="batch 1"):
        TableStats.from_batches([full, late], [config], max_lookups=2)


def test_a_single_tensor_instead_of_a_list_is_explained() -> None:
    kjt = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1]), torch.tensor([1]))
    with pytest.raises(TableStatsError, match=r"\[kjt\]"):
        TableStats.from_batches(kjt, [bag_config("a", 10, 8, ["f"])])


def test_the_order_of_ids_reaches_the_planned_tables() -> None:
    model = bag_collection(bag_config("a", 100, 16), bag_config("b", 100, 16))
    stats = TableStats({"a": 2.0}, {"a": AccessDistribution.zipf(100, 1.0)}, {"a": "frequency"})
    found = collect_tables(model, [EmbeddingBagCollectionSharder()], None, "cpu", 64, stats)
    assert {table.name: table.table.id_order for table in found} == {"a": "frequency", "b": "scattered"}
    unknown = collect_tables(model, [EmbeddingBagCollectionSharder()], None, "cpu", 64)
    assert {table.table.id_order for table in unknown} == {"scattered"}
