"""Measuring fused groups with FBGEMM's real TBE, and the pool that groups are drawn from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_neuroshard.measure.batches import bag_lengths, synthesize_batch
from torchrec_neuroshard.measure.collect import Sampled, collect_groups, sampled_groups
from torchrec_neuroshard.measure.heap import recycled_blocks
from torchrec_neuroshard.measure.pool import base_tables, is_held_out, sample_collective, sample_group
from torchrec_neuroshard.measure.reference import reference_of
from torchrec_neuroshard.measure.specs import KERNELS, POOLINGS, CollectiveSpec, GroupSpec, ShardSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.measure.tbe import build_tbe, measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy, repeat

CPU = torch.device("cpu")
POLICY = RepetitionPolicy(warmup=1, minimum=3, maximum=3, seconds=0.05)

GROUPS = [
    GroupSpec(64, (ShardSpec(1000, 16, 5.0, zipf=0.9),), seed=1),
    GroupSpec(
        32,
        (ShardSpec(500, 8, 3.0, num_features=2), ShardSpec(2000, 32, 1.0, zipf=0.0)),
        optimizer="rowwise_adagrad",
        weighted=True,
        seed=2,
    ),
    GroupSpec(16, (ShardSpec(100, 4, 0.0),), data_type="fp16", fixed_length=True, seed=3),  # a group without ids
]


@pytest.mark.parametrize("spec", GROUPS, ids=["sgd", "weighted_adagrad", "no_ids_fp16"])
def test_a_group_is_timed(spec: GroupSpec) -> None:
    timing = measure_group(spec, CPU, POLICY)
    assert timing.forward.median > 0 and timing.backward.median > 0
    assert timing.total.p10 <= timing.total.median <= timing.total.p90
    assert len(timing.total.samples) == 3
    sums = np.add(timing.forward.samples, timing.backward.samples)
    assert np.allclose(sums, timing.total.samples, atol=1e-3)
    # Poisson bags: five standard deviations of the mean over the rotated batches.
    assert abs(timing.lookups - spec.lookups) <= 5 * np.sqrt(spec.lookups / timing.batches) + 1e-9


@pytest.mark.parametrize("weighted", [False, True])
def test_the_timed_operator_computes_pooled_sums(weighted: bool) -> None:
    spec = dataclasses.replace(GROUPS[1], weighted=weighted, optimizer="sgd")
    tbe = build_tbe(spec, CPU)
    weights = tbe.split_embedding_weights()
    for table in weights:
        torch.nn.init.uniform_(table)
    batch = synthesize_batch(spec, np.random.default_rng(0))
    output = tbe(batch.indices, batch.offsets, batch.per_sample_weights)
    tables = [weights[0], weights[0], weights[1]]  # the first shard has two features
    expected = []
    for feature, table in enumerate(tables):
        bounds = batch.offsets[feature * spec.batch_size : (feature + 1) * spec.batch_size + 1]
        ids = batch.indices[bounds[0] : bounds[-1]]
        per_sample = batch.per_sample_weights
        expected.append(
            torch.nn.functional.embedding_bag(
                ids,
                table.detach().clone(),
                bounds - bounds[0],
                mode="sum",
                include_last_offset=True,
                per_sample_weights=None if per_sample is None else per_sample[bounds[0] : bounds[-1]],
            )
        )
    torch.testing.assert_close(output, torch.cat(expected, dim=1))


def test_unpooled_group_returns_every_row_looked_up() -> None:
    shards = (ShardSpec(50, 8, 3.0, zipf=0.5), ShardSpec(20, 8, 0.5, zipf=0.0))
    spec = GroupSpec(16, shards, pooling="none")
    batch, tbe = synthesize_batch(spec, np.random.default_rng(0)), build_tbe(spec, CPU)
    weights = tbe.split_embedding_weights()
    for weight in weights:
        weight.data.normal_()
    ends = [int(batch.offsets[16]), int(batch.offsets[32])]
    expected = torch.cat([weights[0][batch.indices[: ends[0]]], weights[1][batch.indices[ends[0] : ends[1]]]])
    torch.testing.assert_close(tbe(batch.indices, batch.offsets), expected)
    assert measure_group(spec, CPU, POLICY).backward.median > 0


def test_unpooled_rows_need_one_dim() -> None:
    with pytest.raises(ValueError, match="one dim"):
        GroupSpec(16, (ShardSpec(50, 8, 3.0), ShardSpec(50, 16, 3.0)), pooling="none")


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_dense_tables_pay_for_all_their_rows(optimizer: str) -> None:
    policy = RepetitionPolicy(warmup=1, minimum=5, maximum=5)
    small, large = (
        measure_group(GroupSpec(32, (ShardSpec(rows, 32, 2.0, zipf=0.5),), optimizer, kernel="dense"), CPU, policy)
        for rows in (100, 200_000)
    )
    assert large.backward.median > 3 * small.backward.median


def test_recycled_blocks_leave_later_allocations_alone() -> None:
    with recycled_blocks():
        inside = torch.zeros(64 << 20, dtype=torch.uint8)
    outside = torch.zeros(64 << 20, dtype=torch.uint8)
    assert int(inside.sum()) == int(outside.sum()) == 0


def test_collection_resumes_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "groups.jsonl"
    with MeasurementStore(path) as store:
        first = collect_groups(map(Sampled, GROUPS), store, CPU, minutes=1, policy=POLICY, limit=2)
    assert (first.written, first.skipped) == (2, 0)
    with MeasurementStore(path) as store:
        second = collect_groups(map(Sampled, GROUPS), store, CPU, minutes=1, policy=POLICY)
    assert (second.written, second.skipped) == (1, 2)
    records = list(read_records(path))
    assert [record["id"] for record in records] == [spec_id(spec) for spec in GROUPS]
    for record, spec in zip(records, GROUPS):
        assert GroupSpec.from_json(record["spec"]) == spec
        assert record["kind"] == "group" and record["device"] == "cpu"
        assert record["hardware"]["name"] and record["versions"]["torch"] == torch.__version__
        assert record["forward_ms"]["median"] > 0 and record["backward_ms"]["median"] > 0
        assert record["sampling"] == "random"
        assert (reference_of(record) > 0).all()


@pytest.mark.parametrize("hardware", [{"name": "another_machine"}, "another_machine"])
def test_records_of_another_machine_are_not_mixed_with(tmp_path: Path, hardware: object) -> None:
    path = tmp_path / "groups.jsonl"
    with MeasurementStore(path) as store:
        store.append({"kind": "group", "id": "x", "hardware": hardware})
        with pytest.raises(RecordError, match="another_machine.*give another file"):
            collect_groups(map(Sampled, GROUPS), store, CPU, minutes=1, policy=POLICY)


def test_no_time_means_no_records(tmp_path: Path) -> None:
    with MeasurementStore(tmp_path / "groups.jsonl") as store:
        assert collect_groups(sampled_groups(0), store, CPU, minutes=-1).written == 0


def test_groups_never_mix_held_out_and_training_tables() -> None:
    held_out = {base.id for base in base_tables() if base.held_out}
    assert 0.1 < len(held_out) / len(base_tables()) < 0.3
    kinds = []
    for index in range(150):
        spec = sample_group(5, index)
        sides = {shard.base in held_out for shard in spec.shards}
        assert len(sides) == 1
        assert is_held_out(spec) == sides.pop()
        kinds.append(is_held_out(spec))
    assert 0.05 < np.mean(kinds) < 0.3


def test_sampling_is_reproducible_and_covers_the_space() -> None:
    specs = [sample_group(3, index) for index in range(150)]
    assert specs == [sample_group(3, index) for index in range(150)]
    assert specs != [sample_group(4, index) for index in range(150)]
    assert {spec.optimizer for spec in specs} == {"sgd", "rowwise_adagrad", "adagrad"}
    assert {spec.kernel for spec in specs} == set(KERNELS) and {spec.pooling for spec in specs} == set(POOLINGS)
    assert {spec.data_type for spec in specs} == {"fp32", "fp16"}
    assert {spec.weighted for spec in specs} == {True, False}
    assert min(len(spec.shards) for spec in specs) == 1 and max(len(spec.shards) for spec in specs) > 40
    assert max(spec.weight_bytes for spec in specs) <= 2 << 30


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 10**6))
def test_specs_survive_json(seed: int, index: int) -> None:
    group = sample_group(seed, index)
    back = GroupSpec.from_json(json.loads(json.dumps(group.to_json())))
    assert back == group and spec_id(back) == spec_id(group)
    collective = sample_collective(seed, index, 4)
    assert CollectiveSpec.from_json(json.loads(json.dumps(collective.to_json()))) == collective


def test_ids_tell_specs_apart() -> None:
    changed = [dataclasses.replace(GROUPS[0], seed=9), dataclasses.replace(GROUPS[0], batch_size=65)]
    assert len({spec_id(spec) for spec in [*GROUPS, *changed]}) == 5


@given(st.floats(0.0, 50.0), st.booleans(), st.integers(0, 2**31))
def test_bag_lengths_have_the_given_mean(pooling: float, fixed: bool, seed: int) -> None:
    lengths = bag_lengths(pooling, 2000, fixed, np.random.default_rng(seed))
    assert lengths.min() >= 0
    assert abs(lengths.mean() - pooling) < 6 * np.sqrt(max(pooling, 0.25) / 2000)
    if fixed:
        assert lengths.max() - lengths.min() <= 1


def test_repetition_stops_when_settled_or_out_of_patience() -> None:
    steady = repeat(lambda index: [1.0, 1.0], RepetitionPolicy(warmup=2, minimum=5, maximum=20, seconds=60))
    assert len(steady) == 5
    noisy = repeat(lambda index: [float(index % 2)], RepetitionPolicy(minimum=5, maximum=20, seconds=60))
    assert len(noisy) == 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"optimizer": "lamb"}, "optimizer"),
        ({"data_type": "int8"}, "data_type"),
        ({"shards": (ShardSpec(10, 6, 1.0),)}, "multiples of 4"),
    ],
)
def test_impossible_groups_are_rejected(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GROUPS[0], **change)
