"""Measuring as a GPU does it, on a CPU as far as that goes, and the scripts that prove it there."""

from __future__ import annotations

import dataclasses
import json
import lzma
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import plan_bottlenecks, unpack_kit
from tests.gpu_records import priced_record
from tests.test_calibration import quick as quick  # a fixture
from tests.test_calibration import stored
from torchrec_neuroshard import cuda
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.costs.host_memory import remembered_lookups
from torchrec_neuroshard.measure import collect
from torchrec_neuroshard.measure.batches import synthesize_batch
from torchrec_neuroshard.measure.collect import Sampled, collect_groups, repeated_groups, sampled_groups
from torchrec_neuroshard.measure.collective_pool import PACES, estimated_call_ms, sample_collective
from torchrec_neuroshard.measure.device_batches import DeviceBatches
from torchrec_neuroshard.measure.gpu_pool import CAPS, estimated_gpu_ms, sample_gpu_group
from torchrec_neuroshard.measure.pool import base_tables, is_held_out
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, read_records
from torchrec_neuroshard.measure.tbe import _fill_cache, measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy
from torchrec_neuroshard.training.machine_records import MachineRecords

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
POLICY = RepetitionPolicy(warmup=1, minimum=3, maximum=3, seconds=0.05)


# One module


def test_code_that_needs_a_gpu_stands_in_one_short_module() -> None:
    assert len(Path(cuda.__file__).read_text().splitlines()) <= 150
    for path in (ROOT / "torchrec_neuroshard").rglob("*.py"):
        uses = set(re.findall(r"torch\.cuda\.(\w+)", path.read_text()))
        assert path.name == "cuda.py" or uses <= {"is_available"}, path
    assert "torchrec_neuroshard/cuda.py" in (ROOT / "README.md").read_text()


def test_measuring_needs_little_more_than_torch_and_fbgemm() -> None:
    """Machines with a GPU may have no package index: what they lack is carried there."""
    code = (
        "import sys; import torchrec_neuroshard.cli.measure, torchrec_neuroshard.measure.collect;"
        "import benchmarks.gpu.load_test, benchmarks.gpu.summary, torchrec_neuroshard.measure.collectives;"
        "print([name for name in ('scipy', 'rich', 'matplotlib', 'torchrec') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stdout.strip() == "[]", result.stdout


# What is measured


@pytest.mark.parametrize("index", range(0, 400, 40))
def test_the_gpu_pool_is_reproducible(index: int) -> None:
    assert sample_gpu_group(0, index) == sample_gpu_group(0, index) != sample_gpu_group(1, index)
    spec = sample_gpu_group(0, index)
    assert GroupSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_the_gpu_pool_covers_its_space_within_its_caps() -> None:
    specs = [sample_gpu_group(0, index) for index in range(600)]
    kernels = [spec.compute_kernel for spec in specs]
    for kernel, least in (("fused", 400), ("dense", 10), ("fused_uvm", 10), ("fused_uvm_caching", 25)):
        assert kernels.count(kernel) >= least
    assert {spec.optimizer for spec in specs} == {"sgd", "rowwise_adagrad", "adagrad", "adam"}
    assert {spec.pooling for spec in specs} == {"sum", "none"} and {spec.data_type for spec in specs} == {
        "fp32",
        "fp16",
    }
    assert max(spec.batch_size for spec in specs) > 100_000 and max(len(spec.shards) for spec in specs) > 100
    assert max(shard.rows for spec in specs for shard in spec.shards) > 3e7
    _, longest, gib = CAPS[-1]
    assert all(spec.device_bytes <= gib * 2**30 for spec in specs)
    over = [spec for spec in specs if estimated_gpu_ms(spec) > longest]
    assert all(len(spec.shards) == 1 and spec.batch_size == 64 for spec in over)
    held_out = {base.id for base in base_tables() if base.held_out}
    shares = [{shard.base in held_out for shard in spec.shards} for spec in specs]
    assert all(len(share) == 1 for share in shares)
    assert 0.1 < np.mean([is_held_out(spec) for spec in specs]) < 0.2


def test_memory_on_the_device_is_that_of_weights_state_and_cache() -> None:
    shards = (ShardSpec(1000, 64, 1.0), ShardSpec(500, 128, 1.0))
    weights, rows, elements = 4 * 128_000, 1500, 128_000
    of = lambda **changes: GroupSpec(8, shards, **changes).device_bytes  # noqa: E731
    assert of() == weights and of(data_type="fp16") == weights / 2
    assert of(optimizer="rowwise_adagrad") == weights + 4 * rows
    assert of(optimizer="adagrad") == weights + 4 * elements and of(optimizer="adam") == weights + 8 * elements
    assert of(kernel="dense") == 2 * weights
    assert of(location="managed", optimizer="adam") == 0
    assert of(location="managed", optimizer="rowwise_adagrad") == 4 * rows
    assert of(location="managed_caching", load_factor=0.5) == 0.5 * rows * 128 * 4
    in_host = lambda **changes: GroupSpec(8, shards, **changes).host_bytes  # noqa: E731
    assert in_host() == 0 and in_host(location="managed") == weights
    assert in_host(location="managed", optimizer="adam") == weights + 8 * elements
    assert in_host(location="managed_caching", optimizer="rowwise_adagrad") == weights


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"location": "moon"}, "location must be one of"),
        ({"location": "managed", "kernel": "dense"}, "dense TBE's rows lie in the device's memory"),
        ({"location": "managed_caching", "load_factor": 0.0}, "load_factor must be above 0"),
        ({"location": "managed_caching", "load_factor": 1.5}, "load_factor must be above 0"),
    ],
)
def test_impossible_groups_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GroupSpec(8, (ShardSpec(10, 4, 1.0),), **changes)


def test_a_cpu_has_no_rows_in_managed_memory() -> None:
    with pytest.raises(ValueError, match="only a CUDA device has rows that are managed"):
        measure_group(GroupSpec(8, (ShardSpec(10, 4, 1.0),), location="managed"), CPU, POLICY)


# Batches drawn on the device


@settings(max_examples=25, deadline=None)
@given(
    rows=st.lists(st.integers(1, 10**8), min_size=1, max_size=5),
    pooling=st.floats(0.0, 20.0),
    features=st.integers(1, 3),
    batch_size=st.integers(1, 200),
    weighted=st.booleans(),
    fixed_length=st.booleans(),
    zipf=st.one_of(st.none(), st.floats(0.0, 1.3)),
)
def test_batches_of_the_device_are_well_formed(
    rows: list[int],
    pooling: float,
    features: int,
    batch_size: int,
    weighted: bool,
    fixed_length: bool,
    zipf: float | None,
) -> None:
    shards = tuple(ShardSpec(each, 8, pooling, features, zipf=zipf) for each in rows)
    spec = GroupSpec(batch_size, shards, weighted=weighted, fixed_length=fixed_length, seed=7)
    batch = DeviceBatches(spec, CPU).draw()
    assert batch.offsets.dtype == batch.indices.dtype == torch.int64
    assert batch.offsets[0] == 0 and batch.offsets[-1] == batch.indices.numel()
    assert batch.offsets.numel() == len(rows) * features * batch_size + 1 and (batch.offsets.diff() >= 0).all()
    assert (batch.per_sample_weights is not None) == weighted
    for number, each in enumerate(rows):
        first, last = batch.offsets[number * features * batch_size], batch.offsets[(number + 1) * features * batch_size]
        ids = batch.indices[first:last]
        assert ids.numel() == 0 or 0 <= ids.min() <= ids.max() < each
    again = DeviceBatches(spec, CPU).draw()
    assert torch.equal(batch.indices, again.indices) and torch.equal(batch.offsets, again.offsets)


@pytest.mark.parametrize("fixed_length", [False, True])
def test_batches_of_the_device_are_distributed_as_numpys(fixed_length: bool) -> None:
    """The same popular rows, as often: both draw from one distribution, scattered the same way."""
    shards = (ShardSpec(1000, 8, 5.5, zipf=1.1), ShardSpec(37, 8, 2.0, num_features=2, zipf=0.0))
    spec = GroupSpec(20_000, shards, fixed_length=fixed_length)
    ours, theirs = DeviceBatches(spec, CPU).draw(), synthesize_batch(spec, np.random.default_rng(0))
    for number, (first, last) in enumerate([(0, 20_000), (20_000, 60_000)]):
        counts = []
        for batch in (ours, theirs):
            ids = batch.indices[batch.offsets[first] : batch.offsets[last]]
            counts.append(torch.bincount(ids, minlength=shards[number].rows).double())
        mean = (counts[0] + counts[1]) / 2
        assert abs(counts[0].sum() - counts[1].sum()) < 5 * (2 * mean.sum()) ** 0.5
        assert ((counts[0] - counts[1]).abs() <= 6 * (2 * mean).sqrt() + 6).all()
    lengths = [batch.offsets.diff()[:20_000].double() for batch in (ours, theirs)]
    assert lengths[0].var() == pytest.approx(float(lengths[1].var()), rel=0.1)
    assert float(lengths[0].var()) == pytest.approx(0.25 if fixed_length else 5.5, rel=0.1)


# Collection


def test_groups_that_do_not_fit_the_device_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = GroupSpec(8, (ShardSpec(100, 4, 1.0),)), GroupSpec(8, (ShardSpec(10**6, 64, 1.0),))
    monkeypatch.setattr(collect, "_memory_for_groups", lambda device: 1e6)
    with MeasurementStore(tmp_path / "records.jsonl") as store:
        result = collect_groups([Sampled(large), Sampled(small)], store, CPU, 1.0, POLICY)
    assert (result.written, result.too_large) == (1, 1)
    assert [record["id"] for record in read_records(tmp_path / "records.jsonl")] == [spec_id(small)]


@pytest.mark.parametrize(("failures", "written"), [(1, 2), (2, 1)])
def test_running_out_of_memory_costs_a_group_at_most(
    failures: int, written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [failures]

    def measured(*arguments: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure_group(*arguments)

    monkeypatch.setattr(collect, "measure_group", measured)
    groups = [Sampled(GroupSpec(8, (ShardSpec(rows, 4, 1.0),))) for rows in (100, 200)]
    with MeasurementStore(tmp_path / "records.jsonl") as store:
        result = collect_groups(groups, store, CPU, 1.0, POLICY)
    assert (result.written, result.too_large) == (written, 2 - written)


def test_a_kernel_that_fails_costs_its_group_and_a_lost_device_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(spec: GroupSpec, *arguments: Any) -> Any:
        if spec.shards[0].rows > 100:
            raise RuntimeError("no kernel image is available")
        return measure_group(spec, *arguments)

    monkeypatch.setattr(collect, "measure_group", measured)
    groups = [Sampled(GroupSpec(8, (ShardSpec(rows, 4, 1.0),))) for rows in (200, 100, 300, 400, 50)]
    with MeasurementStore(tmp_path / "records.jsonl") as store:
        result = collect_groups(groups, store, CPU, 1.0, POLICY)
        assert (result.written, result.failed) == (2, 3)
        assert capsys.readouterr().err.count("no kernel image is available") == 3
        with pytest.raises(RuntimeError, match="no kernel image"):
            collect_groups([Sampled(GroupSpec(8, (ShardSpec(r, 4, 1.0),))) for r in range(200, 210)], store, CPU, 1.0)
    monkeypatch.setattr(collect, "measure_group", lambda *_: (_ for _ in ()).throw(RuntimeError("device lost")))
    command = ["measure", "compute", "--device", "cpu", "--minutes", "1", "--out", str(tmp_path / "more.jsonl")]
    assert main(command) == 2
    assert "group after group failed" in capsys.readouterr().err


def test_calls_of_gpus_are_larger_and_within_their_caps() -> None:
    calls = [sample_collective(0, index, 8, device="cuda") for index in range(200)]
    assert calls[0] == sample_collective(0, 0, 8, device="cuda") != sample_collective(0, 0, 8)
    assert max(estimated_call_ms(call, PACES["cuda"]) for call in calls) <= 25.0
    assert max(call.batch_size_per_rank for call in calls) > 10_000
    assert max(max(call.dims) for call in calls if call.name == "all_reduce") > 2**25


def test_each_device_has_its_pool() -> None:
    cpu, gpu = next(sampled_groups(0)).spec, next(sampled_groups(0, "cuda")).spec
    assert gpu == sample_gpu_group(0, 0) != cpu


def test_records_are_repeated_in_another_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    common = ["measure", "compute", "--device", "cpu", "--minutes", "1"]
    assert main([*common, "--limit", "2", "--seed", "5", "--out", str(once)]) == 0
    assert main([*common, "--repeat", str(once), "--out", str(twice)]) == 0
    ids = [[record["id"] for record in read_records(path)] for path in (once, twice)]
    assert ids[0] == ids[1] and len(ids[0]) == 2
    assert [group.spec for group in repeated_groups([*read_records(once), *read_records(once)])] == [
        GroupSpec.from_json(record["spec"]) for record in read_records(once)
    ]
    assert main([*common, "--repeat", str(tmp_path / "none.jsonl"), "--out", str(twice)]) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert main([*common, "--repeat", str(once), "--held-out", "--out", str(twice)]) == 2
    assert "exclude each other" in capsys.readouterr().err
    empty = stored(tmp_path / "empty.jsonl", iter([]))
    assert main([*common, "--repeat", str(empty), "--out", str(twice)]) == 2
    assert "no group records" in capsys.readouterr().err


def test_bandwidths_are_records_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "records.jsonl"
    assert main(["measure", "bandwidth", "--device", "cpu", "--mebibytes", "4", "--out", str(out)]) == 0
    found = {record["name"]: record for record in MachineRecords.load([out]).bandwidths}
    assert set(found) == {"copy", "host_to_device", "device_to_host", "launch_forward", "launch_backward"}
    copy_ms = found["copy"]["ms"]["median"]
    assert found["copy"]["gb_per_s"] == pytest.approx(2 * 4 * 2**20 / copy_ms / 1e6, rel=0.01)
    assert found["launch_forward"]["gb_per_s"] is None and found["launch_forward"]["ms"]["median"] > 0
    assert "copy" in capsys.readouterr().err
    assert main(["measure", "bandwidth", "--device", "cpu", "--out", str(tmp_path)]) == 2
    others = stored(tmp_path / "others.jsonl", iter([priced_record(0)]))
    assert main(["measure", "bandwidth", "--device", "cpu", "--mebibytes", "1", "--out", str(others)]) == 2
    assert "nvidia_h200" in capsys.readouterr().err


def test_records_that_a_cpu_cannot_run_or_price_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    managed = [r for r in (priced_record(index) for index in range(60)) if r["spec"].get("location")]
    assert managed
    file, out = stored(tmp_path / "managed.jsonl", iter(managed)), tmp_path / "out.jsonl"
    compute = ["measure", "compute", "--device", "cpu", "--minutes", "0.1", "--repeat", str(file), "--out"]
    assert main([*compute, str(out)]) == 2
    assert "no group records that a cpu device runs" in capsys.readouterr().err
    assert main([*compute, str(file)]) == 2
    assert "holds the records to repeat" in capsys.readouterr().err
    assert main(["evaluate", "--cost-model", "analytic/generic_cpu", "--records", str(file)]) == 2
    assert "rows in the host's memory" in capsys.readouterr().err
    assert main(["measure", "bandwidth", "--device", "cpu", "--repeat", str(file), "--out", str(out)]) == 2
    assert "goes with `measure compute` only" in capsys.readouterr().err
    assert main(["measure", "bandwidth", "--device", "cpu", "--mebibytes", "900000000", "--out", str(out)]) == 2
    assert "--mebibytes 900000000" in capsys.readouterr().err


def test_a_cache_is_filled_before_it_is_timed() -> None:
    spec = GroupSpec(64, (ShardSpec(10_000, 8, 4.0, zipf=0.5),), location="managed_caching", load_factor=0.05)
    drawn: list[int] = []

    def next_batch() -> Any:
        drawn.append(1)
        return synthesize_batch(spec, np.random.default_rng(len(drawn)))

    looked_up: list[int] = []
    _fill_cache(spec, lambda indices, offsets, weights: looked_up.append(indices.numel()), next_batch)
    needed = remembered_lookups(spec.shards[0].distribution(), 0.05 * 10_000)
    assert needed <= sum(looked_up) * 1.1 and len(looked_up) == len(drawn) <= 24
    _fill_cache(dataclasses.replace(spec, location="device"), lambda *_: looked_up.append(0), next_batch)
    assert 0 not in looked_up


def test_bottlenecks_of_plans_are_measured_rank_by_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables = [
        {
            "name": f"t{i}",
            "num_embeddings": 2000 * (i + 1),
            "embedding_dim": 16,
            "pooling_factor": 1 + 3 * i,
            "alpha": 0.8,
        }
        for i in range(4)
    ]
    workload = tmp_path / "small.json"
    workload.write_text(json.dumps({"name": "small", "batch_size": 64, "optimizer": "sgd", "tables": tables}))
    plans, out = tmp_path / "plans.jsonl", tmp_path / "bottlenecks.jsonl"
    planned = ["plan", "--out", str(plans), "--workloads", str(workload), "--ranks", "2", "--hardware"]
    assert plan_bottlenecks.main([*planned, "h200"]) == 0  # plans for GPUs are made without one
    assert {r["inputs"]["hardware"] for r in read_records(plans)} == {"h200"}
    plans.unlink()
    assert plan_bottlenecks.main([*planned, "generic_cpu"]) == 0
    made = list(read_records(plans))
    assert [record["planner"] for record in made] == list(plan_bottlenecks.PLANNERS)
    assert all(record["predicted_ms"] > 0 for record in made)
    measure = ["measure", "--plans", str(plans), "--out", str(out), "--rounds", "2", "--device", "cpu"]
    assert plan_bottlenecks.main(measure) == 0
    assert "in geometric mean" in capsys.readouterr().out
    records = list(read_records(out))
    assert len(records) == 2 * 3 and {record["round"] for record in records} == {0, 1}
    for record in records:
        alike = record["bucketize_ms"] + record["replicated_ms"]
        assert record["bottleneck_ms"] == pytest.approx(max(record["rank_ms"].values()) + alike, abs=1e-3)
        assert len(record["rank_ms"]) == 2 and record["collectives_ms_at_published_bandwidth"] >= 0
    assert plan_bottlenecks.main(measure) == 0 and len(list(read_records(out))) == 6  # nothing is measured again
    assert plan_bottlenecks.main(["measure", "--out", str(out)]) == 2
    assert plan_bottlenecks.main(["summary", "--out", str(tmp_path / "none.jsonl")]) == 2


def test_a_kit_is_unpacked_and_a_damaged_one_refused(tmp_path: Path) -> None:
    init = 'import os\nPAIRS = {\n    "1.5": "2.10",\n}\n'
    init += "def load(target, libraries_to_load):\n    names = []\n"
    init += "    for library in libraries_to_load.get(target, []):\n        names.append(library)\n    return names\n"
    content = b"code" + init.encode()
    files = [["fbgemm_gpu/kernels.so", 1 << 16, [[4096, 4]]], ["fbgemm_gpu/__init__.py", len(init), [[0, len(init)]]]]
    table = json.dumps(files).encode()
    kit, site = tmp_path / "kit", tmp_path / "site"
    kit.mkdir()
    (kit / "fbgemm.xz").write_bytes(lzma.compress(struct.pack("<I", len(table)) + table + content))
    with zipfile.ZipFile(kit / "small-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("small/__init__.py", "VALUE = 7\n")
    assert unpack_kit.main(kit, site) == 0
    library = (site / "fbgemm_gpu" / "kernels.so").read_bytes()
    assert len(library) == 1 << 16 and library[4096:4100] == b"code" and not any(library[:4096])
    scope: dict[str, Any] = {"__file__": str(site / "fbgemm_gpu" / "__init__.py")}
    exec((site / "fbgemm_gpu" / "__init__.py").read_text(), scope)
    assert scope["load"]("cuda", {"cuda": ["kernels", "left_out"]}) == ["kernels"] and scope["PAIRS"]["1.6"] == "2.11"
    assert (site / "small" / "__init__.py").exists()
    (kit / "fbgemm.xz").write_bytes(lzma.compress(struct.pack("<I", len(table)) + table + content + b"more"))
    with pytest.raises(ValueError, match="bytes are left over"):
        unpack_kit.main(kit, site)
    table = json.dumps([["../outside", 1, [[0, 1]]]]).encode()
    (kit / "fbgemm.xz").write_bytes(lzma.compress(struct.pack("<I", len(table)) + table + b"x"))
    with pytest.raises(ValueError, match="lies outside"):
        unpack_kit.main(kit, site)
    (tmp_path / "none").mkdir()
    assert unpack_kit.main(tmp_path / "none", site) == 2


def test_the_script_for_gpus_runs_dry(tmp_path: Path) -> None:
    out = tmp_path / "out"
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(ROOT / "benchmarks" / "gpu" / "run_all.sh"), str(out), "--cpu", "--minutes", "0.2", "--limit", "3"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    steps = re.findall(r"^step (\w+): exit (\d+)", (out / "run.log").read_text(), re.MULTILINE)
    assert steps == [(name, "0") for name in ("load_test", "bandwidth", "smoke", "collection", "summary")]
    assert len(list(out.iterdir())) <= 8  # what a lent machine gives back
    summary = json.loads((out / "summary.json").read_text())
    assert summary["hardware"]["device"] == "cpu" and sum(summary["records"].values()) == 3
    assert summary["load_test"]["passed"] >= 120 and "failed" not in summary["load_test"]
    again = tmp_path / "again"
    command = [*command[:1], str(again), "--cpu", "--minutes", "0.2", "--repeat", str(out / "records.jsonl")]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    ids = [{r["id"] for r in read_records(f / "records.jsonl") if r["kind"] == "group"} for f in (out, again)]
    assert ids[0] == ids[1] and len(ids[0]) == 3
    assert subprocess.run([command[0], str(out), "--nonsense"], capture_output=True).returncode == 2
