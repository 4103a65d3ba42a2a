"""Workload files: what they mean, and that each mistake names the file and the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.modules.embedding_configs import DataType

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, table_stats
from torchrec_neuroshard.workload import Workload, WorkloadError

TABLE = {"name": "a", "num_embeddings": 100, "embedding_dim": 16}
ONCE = [1.0, *[0.0] * 16]  # every row of the batch is hit once
REUSE = {"reuse_histogram": ONCE, "reuse_histogram_lookups": 50}


def workload(*tables: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"name": "w", "batch_size": 64, "tables": list(tables) or [TABLE], **fields}


def test_all_fields_are_read(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    content = workload(
        {**TABLE, "pooling_factor": 3, "alpha": 0.5},
        {"num_embeddings": 10, "embedding_dim": 8, "features": [1, 50], "weighted": True, "data_type": "fp16"},
        {**TABLE, "name": "c", "features": ["x", "y"], "pooling_factor": 4},
        optimizer="rowwise_adagrad",
        alpha=1.05,
        notes="free text",
    )
    path.write_text(json.dumps(content))
    read = Workload.load(path)
    assert (read.name, read.batch_size) == ("w", 64)
    assert [table.name for table in read.tables] == ["a", "t1", "c"]
    assert read.zipf == (0.5, 1.05, 1.05)
    assert read.features == (("a_f0",), ("t1_f0", "t1_f1"), ("x", "y"))
    assert read.feature_pooling == ((3.0,), (1.0, 50.0), (2.0, 2.0))
    assert [table.pooling_factor for table in read.tables] == [3.0, 51.0, 4.0]
    assert [table.num_features for table in read.tables] == [1, 2, 2]
    assert [table.weighted for table in read.tables] == [False, True, False]
    assert read.tables[1].data_type == "fp16"
    assert {table.optimizer for table in read.tables} == {"rowwise_adagrad"}


def test_defaults() -> None:
    read = Workload.parse({"tables": [TABLE]}, "folder/name.json")
    assert (read.name, read.batch_size, read.zipf) == ("name", None, (None,))
    table = read.tables[0]
    assert (table.pooling_factor, table.optimizer, table.data_type, table.access) == (1.0, "sgd", "fp32", None)
    assert read.constraints == {} and read.caches == {}


@pytest.mark.parametrize(
    ("constraint", "expected", "cache"),
    [
        ({"sharding_types": ["column_wise"]}, {"sharding_types": ["column_wise"]}, {}),
        ({"compute_kernels": ["fused"], "min_partition": 32}, {"compute_kernels": ["fused"], "min_partition": 32}, {}),
        ("column_wise", {"sharding_types": ["column_wise"]}, {}),
        (
            "row_wise fused_uvm_caching load_factor 0.2 prefetch",
            {"sharding_types": ["row_wise"], "compute_kernels": ["fused_uvm_caching"]},
            {"load_factor": 0.2, "prefetch_pipeline": True},
        ),
        (
            "table_wise column_wise min_partition 16",
            {"sharding_types": ["table_wise", "column_wise"], "min_partition": 16},
            {},
        ),
        (None, {}, {}),
    ],
)
def test_constraints_as_object_and_as_words(constraint: Any, expected: dict, cache: dict) -> None:
    read = Workload.parse(workload({**TABLE, "constraint": constraint}))
    assert read.constraints.get("a", {}) == expected
    assert read.caches.get("a", {}) == cache
    torchrec_constraint = parameter_constraints(read)["a"]
    for field, value in expected.items():
        assert getattr(torchrec_constraint, field) == value
    if cache:
        assert torchrec_constraint.cache_params is not None
        assert torchrec_constraint.cache_params.load_factor == 0.2


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ([], "expected a JSON object"),
        ({"name": "w"}, "'tables'"),
        ({"tables": []}, "'tables'"),
        ({"tables": {"a": TABLE}}, "'tables'"),
        ({"tables": [3]}, r"tables\[0\] must be an object"),
        (workload(batch_size=0), "'batch_size'"),
        (workload(batch_size="64"), "'batch_size'"),
        (workload(batch_size=True), "'batch_size'"),
        (workload(optimizer="lamb"), "'optimizer' must be one of sgd"),
        (workload(optimizer=""), "'optimizer'"),
        (workload(alpha=-1), "'alpha'"),
        (workload(id_order="random"), "'id_order'"),
        (workload({**TABLE, "name": ""}), r"tables\[0\].name"),
        (workload({**TABLE, "name": "a.b"}), r"tables\[0\].name"),
        (workload(TABLE, TABLE), "2 tables are named 'a'"),
        (workload({**TABLE, "num_embeddings": 0}), r"tables\[0\].num_embeddings"),
        (workload({**TABLE, "num_embeddings": 1.5}), r"tables\[0\].num_embeddings"),
        (workload({"name": "a", "embedding_dim": 16}), r"tables\[0\].num_embeddings"),
        (workload(TABLE, {**TABLE, "name": "b", "embedding_dim": 0}), r"tables\[1\].embedding_dim"),
        (workload({**TABLE, "embedding_dim": 10}), r"embedding_dim.*multiple of 4.*pad to 12"),
        (workload({**TABLE, "pooling_factor": "many"}), r"tables\[0\].pooling_factor"),
        (workload({**TABLE, "pooling_factor": float("nan")}), r"tables\[0\].pooling_factor"),
        (workload({**TABLE, "pooling_factor": 9, "features": [1, 2]}), r"pooling_factor.*sum of 'features', 3"),
        (workload({**TABLE, "features": []}), r"tables\[0\].features"),
        (workload({**TABLE, "features": [1, "x"]}), r"tables\[0\].features"),
        (workload({**TABLE, "features": ["x", "x"]}), r"tables\[0\].features"),
        (workload({**TABLE, "alpha": float("inf")}), r"tables\[0\].alpha"),
        (workload({**TABLE, "id_order": "random"}), r"tables\[0\].id_order.*scattered, frequency"),
        (workload({**TABLE, "reuse_histogram": ONCE}), r"\[0\].reuse_histogram_lookups.*_batch_size"),
        (workload({**TABLE, **REUSE, "reuse_histogram_batch_size": 9}), r"reuse_histogram_lookups.*not both"),
        (workload({**TABLE, **REUSE, "alpha": 1}), r"tables\[0\].alpha.*beside a 'reuse_histogram'"),
        (workload({**TABLE, **REUSE, "reuse_histogram_of": "bags"}), r"reuse_histogram_of.*rows, lookups"),
        (workload({**TABLE, **REUSE, "reuse_histogram": "flat"}), r"reuse_histogram.*list of 17 shares"),
        (workload({**TABLE, **REUSE, "reuse_histogram": [1.0]}), r"reuse_histogram.*17 shares"),
        (workload({**TABLE, **REUSE, "reuse_histogram_lookups": 5000}), r"5000 rows or more, but the table has 100"),
        (workload({**TABLE, "reuse_histogram_lookups": 50}), r"reuse_histogram_lookups.*no 'reuse_histogram'"),
        (workload({**TABLE, "weighted": "yes"}), r"tables\[0\].weighted"),
        (workload({**TABLE, "data_type": "int4"}), r"tables\[0\].data_type"),
        (workload({**TABLE, "unpooled": True, "weighted": True}), r"tables\[0\].weighted.*take no weights"),
        (workload({**TABLE, "constraint": "colum_wise"}), r"tables\[0\].constraint.*column_wise"),
        (workload({**TABLE, "constraint": "row_wise load_factor"}), r"tables\[0\].constraint.*load_factor"),
        (workload({**TABLE, "constraint": {"sharding_type": "row_wise"}}), r"constraint.*sharding_types"),
        (workload({**TABLE, "constraint": {"sharding_types": ["rows"]}}), r"constraint.sharding_types.*row_wise"),
        (workload({**TABLE, "constraint": {"compute_kernels": "fused"}}), r"constraint.compute_kernels"),
        (workload({**TABLE, "constraint": {"min_partition": 0}}), r"constraint.min_partition"),
        (workload({**TABLE, "constraint": {"load_factor": 2}}), r"constraint.load_factor"),
        (workload({**TABLE, "constraint": 7}), r"tables\[0\].constraint"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path: Path, content: Any, field: str) -> None:
    path = tmp_path / "mistaken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(WorkloadError, match=rf"mistaken\.json: .*{field}"):
        Workload.load(path)


@pytest.mark.parametrize("content", [b'{"tables": [', b"\xff\xfe\x00", b""])
def test_a_file_that_is_not_json_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "cut.json"
    path.write_bytes(content)
    with pytest.raises(WorkloadError, match=r"cut\.json: not a JSON file"):
        Workload.load(path)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(WorkloadError, match=rf"{path.name}: cannot be read"):
            Workload.load(path)


def test_the_model_holds_the_tables() -> None:
    read = Workload.parse(
        workload(
            {**TABLE, "features": [2, 3], "alpha": 0.8},
            {**TABLE, "name": "b", "weighted": True, "data_type": "fp16"},
            optimizer="adagrad",
        )
    )
    model = embedding_model(read)
    assert [name for name, _ in model.named_children()] == ["ebc", "weighted_ebc"]
    ebc, weighted = model.get_submodule("ebc"), model.get_submodule("weighted_ebc")
    assert not ebc.is_weighted() and weighted.is_weighted()
    config = ebc.embedding_bag_configs()[0]
    assert (config.name, config.num_embeddings, config.embedding_dim) == ("a", 100, 16)
    assert config.feature_names == ["a_f0", "a_f1"]
    assert weighted.embedding_bag_configs()[0].data_type == DataType.FP16
    for parameter in model.parameters():
        assert parameter.device.type == "meta"
        assert parameter._optimizer_classes == [torch.optim.Adagrad]
    constraints = parameter_constraints(read, sharding_types=["table_wise"])
    assert constraints["a"].pooling_factors == [2.0, 3.0]
    assert constraints["b"].is_weighted and constraints["b"].sharding_types == ["table_wise"]
    stats = table_stats(read)
    assert stats.pooling_factors == {"a": 5.0, "b": 1.0} and set(stats.access) == {"a"}


def test_a_workload_without_zipf_exponents_has_pooling_factors_only() -> None:
    stats = table_stats(Workload.parse(workload()))
    assert stats.pooling_factors == {"a": 1.0} and stats.access == {}
    assert [name for name, _ in embedding_model(Workload.parse(workload())).named_children()] == ["ebc"]


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_embeddings", 10**30), ("embedding_dim", 4 * 10**12), ("pooling_factor", 1e300), ("alpha", 10**400)],
)
def test_absurd_numbers_are_refused_by_field(field: str, value: float) -> None:
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, field: value}
    with pytest.raises(WorkloadError, match=rf"tables\[0\].{field}"):
        Workload.parse({"tables": [table]})


def test_a_misspelt_field_of_a_table_is_an_error() -> None:
    table = {"name": "t", "num_embeddings": 10, "embedding_dim": 8, "poolingfactor": 50}
    with pytest.raises(WorkloadError, match="poolingfactor.*pooling_factor"):
        Workload.parse({"tables": [table]})


def test_a_number_too_long_to_read_is_not_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    path.write_text('{"tables": [{"num_embeddings": ' + "9" * 5000 + "}]}")
    with pytest.raises(WorkloadError, match="w.json"):
        Workload.load(path)


def test_reuse_histograms_and_id_orders_reach_the_statistics() -> None:
    truth = AccessDistribution.zipf(200_000, 0.9)
    rows, lookups = ([round(x, 9) for x in truth.reuse_histogram(40_960, of)] for of in ("rows", "lookups"))
    big = {"num_embeddings": 200_000, "embedding_dim": 16, "pooling_factor": 10.0}
    read = Workload.parse(
        workload(
            {**big, "reuse_histogram": rows, "reuse_histogram_lookups": 40_960, "id_order": "scattered"},
            {**big, "reuse_histogram": rows, "reuse_histogram_batch_size": 4096},
            {**big, "reuse_histogram": lookups, "reuse_histogram_of": "lookups", "reuse_histogram_lookups": 40_960},
            {**big, "alpha": 0.9},
            big,
            id_order="frequency",
            alpha=0.2,
        )
    )
    assert read.zipf == (None, None, None, 0.9, 0.2)
    assert [table.id_order for table in read.tables] == ["scattered", *["frequency"] * 4]
    stats = table_stats(read)
    for name in ("t0", "t1", "t2", "t3"):
        assert stats.access[name].expected_unique(80_000) == pytest.approx(truth.expected_unique(80_000), rel=0.05)
    assert stats.id_order("ebc", "t0") == "scattered" and stats.id_order("ebc", "t1") == "frequency"
