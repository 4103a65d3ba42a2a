"""The chain from measurement to weights as a GPU runs it, on a CPU as far as that goes."""

from __future__ import annotations

import copy
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
from typing import Any, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.gpu import plan_bottlenecks, unpack_kit
from tests.test_calibration import quick as quick  # a fixture
from tests.test_calibration import stored
from torchrec_neuroshard import CostModel, cuda, torchrec_hardware_config
from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cli.calibrate import COLLECTIVES_FILE, RECORDS_FILE
from torchrec_neuroshard.costs import hardware as costs_hardware
from torchrec_neuroshard.costs import model as costs_model
from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE, gpu_preset, hardware_spec
from torchrec_neuroshard.costs.host_memory import remembered_lookups
from torchrec_neuroshard.costs.model import CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
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
from torchrec_neuroshard.training import build, calibrate
from torchrec_neuroshard.training.dataset import spec_works
from torchrec_neuroshard.training.host_link import fit_host_link, host_memory_times
from torchrec_neuroshard.training.machine_records import MachineRecords
from torchrec_neuroshard.training.torchrec_coefficients import MULTIPLIERS, fit_torchrec_coefficients

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
POLICY = RepetitionPolicy(warmup=1, minimum=3, maximum=3, seconds=0.05)
GPU = {"name": "nvidia_h200", "device": "cuda", "gpu": "NVIDIA H200"}


def priced_record(index: int, hardware: dict[str, Any] = GPU, **changes: Any) -> dict[str, Any]:
    """A group of the GPU's pool at the H200's analytic price, with rows in host memory priced as such."""
    spec = dataclasses.replace(sample_gpu_group(3, index), **changes)
    works = spec_works(spec)
    model = CostModel.analytic("h200")
    forward, backward = model.groups.predict(model.groups.contributions(shard_features(works)).sum(axis=0)[None])[0]
    record = {
        "kind": "group",
        "id": spec_id(spec),
        "spec": spec.to_json(),
        "device": hardware["device"],
        "hardware": hardware,
        "versions": {},
        "lookups": spec.lookups,
        "seconds": 0.1,
    }
    more_forward, more_backward = host_memory_times(model, [record])[0]
    times = {"forward_ms": forward + more_forward, "backward_ms": backward + more_backward}
    times["total_ms"] = sum(times.values())
    return {**record, **{name: {"median": ms, "p10": ms, "p90": ms, "samples": [ms]} for name, ms in times.items()}}


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


# Training


def test_a_host_link_is_found_from_groups_in_host_memory() -> None:
    records = [priced_record(index) for index in range(400)]
    offloaded = [record for record in records if record["spec"].get("location", "device") != "device"]
    assert len(offloaded) > 30
    analytic = CostModel.analytic("h200").groups
    start = dataclasses.replace(HARDWARE["h200"], host_read_gbps=10.0, host_write_gbps=90.0)
    link = fit_host_link(offloaded, analytic, start)
    assert link is not None and link.records == len(offloaded)
    assert link.read_gbps == pytest.approx(HARDWARE["h200"].host_read_gbps, rel=0.03)
    assert min(link.read_gbps, link.write_gbps) == pytest.approx(35.2, rel=0.03)
    assert link.median_ape < 0.01 < link.preset_median_ape
    assert fit_host_link(offloaded[:5], analytic, start) is None


@pytest.fixture
def gpu_folder(tmp_path: Path, quick: None, capsys: pytest.CaptureFixture[str]) -> Path:
    """A model of a GPU, trained from made-up records by the command that trains real ones."""
    records = stored(tmp_path / "gpu.jsonl", (priced_record(index) for index in range(500)))
    with MeasurementStore(records) as store:
        for name, size, speed in (("copy", 2**31, 4000.0), ("launch_forward", 0, None)):
            ms = {"median": 0.04, "p10": 0.04, "p90": 0.04, "samples": [0.04]}
            spec = {"name": name, "bytes": size}
            figure = {"kind": "bandwidth", "id": name, "spec": spec, "name": name, "gb_per_s": speed, "ms": ms}
            store.append({**figure, "device": "cuda", "hardware": GPU})
    out = tmp_path / "pretrained" / "h200"
    assert main(["pretrain", "--records", str(records), "--out", str(out), "--nets", "2", "--epochs", "1"]) == 0
    capsys.readouterr()
    return out


def test_records_of_a_gpu_give_a_card_with_its_constants(gpu_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = CostModel.load(gpu_folder).card
    assert card["hardware"] == GPU and card["records"]["groups_in_host_memory"] > 30
    assert card["host_link"]["read_gbps"] == pytest.approx(35.2, rel=0.25)  # of groups priced by nets, not exactly
    assert card["bandwidths"]["copy"] == {"gb_per_s": 4000.0, "data_sheet_gb_per_s": 4800}
    assert card["bandwidths"]["launch_forward"] == {"ms": 0.04, "data_sheet_ms": 0.02}
    assert card["collectives_provenance"] == "analytic" and "NVLink 4" in card["collectives_source"]
    assert "adam" in card["measured_kinds"]["optimizer"]
    records = str(gpu_folder.parent.parent / "gpu.jsonl")
    assert main(["evaluate", "--cost-model", "analytic/h200", "--records", records, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    kernels = report["groups"]["by"]["kernel"]
    assert {bin["bin"] for bin in kernels} == {"fused", "dense", "fused_uvm", "fused_uvm_caching"}
    assert all(bin["median_ape"] < 1e-6 for bin in kernels)  # records were made with these very constants


def test_host_links_of_measured_models_price_plans(gpu_folder: Path) -> None:
    model = CostModel.load(gpu_folder)
    spec = model.as_measured(HARDWARE["h200"])
    assert spec.host_read_gbps == model.card["host_link"]["read_gbps"] and spec.memory_gbps == 4800
    assert CostModel.analytic("h200").as_measured(HARDWARE["h200"]) == HARDWARE["h200"]
    assert model.scaled_to("a100_sxm_80gb").as_measured(HARDWARE["a100_sxm_80gb"]) == HARDWARE["a100_sxm_80gb"]


# The choice of a model


@pytest.fixture
def only_the_gpu_is_shipped(gpu_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(costs_model, "PRETRAINED", gpu_folder.parent)
    monkeypatch.setattr("torchrec_neuroshard.costs.registry._warned", set())
    yield


@pytest.mark.usefixtures("only_the_gpu_is_shipped")
def test_auto_takes_the_gpus_own_model_else_the_nearest_scaled(caplog: pytest.LogCaptureFixture) -> None:
    own = resolve_cost_model("auto", "cuda", "h200")
    assert own.provenance == "measured" and own.hardware == "nvidia_h200" and not caplog.messages
    scaled = resolve_cost_model("auto", "cuda", "a100_sxm_80gb")
    assert scaled.provenance == "scaled" and scaled.hardware == "a100_sxm_80gb" and "nvidia_h200" in caplog.text
    assert scaled.name == "nvidia_h200 scaled to a100_sxm_80gb" and "NVLink 3" in caplog.text
    ratio = HARDWARE["h200"].memory_gbps / HARDWARE["a100_sxm_80gb"].memory_gbps
    assert scaled.card["scaled_from"] == {"name": "nvidia_h200", "hardware": "nvidia_h200", "work_ms": ratio}
    assert scaled.ensemble is not None and own.ensemble is not None
    heavy = spec_works(GroupSpec(65_536, tuple(ShardSpec(10**6, 128, 20.0, zipf=0.5) for _ in range(8))))
    times = [
        m.groups.predict(m.groups.contributions(shard_features(heavy)).sum(axis=0)[None])[0] for m in (own, scaled)
    ]
    assert times[1].sum() / times[0].sum() == pytest.approx(ratio, rel=0.35)  # nets see a rank that is slower
    calls = [m.collectives.prior.kinds[0].intra_host_ms_per_byte for m in (scaled, CostModel.analytic("a100_sxm_80gb"))]
    assert calls[0] == calls[1]
    generic = resolve_cost_model("auto", "cuda", "generic_gpu")
    assert generic.provenance == "analytic"
    with pytest.raises(CostModelError, match="both must be GPUs with a data sheet"):
        own.scaled_to("generic_gpu")
    with pytest.raises(CostModelError, match="both must be GPUs with a data sheet"):
        CostModel.analytic("generic_cpu").scaled_to("h200")


@pytest.mark.usefixtures("only_the_gpu_is_shipped")
@pytest.mark.parametrize(
    ("hardware", "provenance"), [("h200", "measured"), ("v100", "scaled"), ("generic_gpu", "analytic")]
)
def test_plans_say_which_model_made_them(
    hardware: str, provenance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [{"name": f"t{i}", "num_embeddings": 10**5, "embedding_dim": 64, "pooling_factor": 5} for i in range(4)]
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"name": "w", "batch_size": 1024, "tables": tables}))
    assert main(["plan", str(workload), "--world-size", "2", "--hardware", hardware, "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["cost_model"]
    assert model["provenance"] == provenance and model["collectives"] == hardware_spec(hardware, "cuda").links
    assert main(["plan", str(workload), "--world-size", "2", "--hardware", hardware]) == 0
    assert ("Collectives were not measured" in capsys.readouterr().out) == (provenance != "analytic")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "generic_gpu"),
        ("NVIDIA H100 NVL", "generic_gpu"),
        ("NVIDIA GH200 480GB", "generic_gpu"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L4", "generic_gpu"),
    ],
)
def test_gpus_are_known_by_their_names(name: str, preset: str) -> None:
    assert gpu_preset(name) == preset
    assert hardware_spec(costs_hardware._as_name(name), "cuda") == HARDWARE[preset]


def test_a_gpu_without_a_preset_finds_the_model_of_its_name(
    gpu_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = json.loads((gpu_folder / "card.json").read_text())
    card["hardware"] = {"name": "nvidia_l4", "device": "cuda", "gpu": "NVIDIA L4"}
    (gpu_folder / "card.json").write_text(json.dumps(card))
    gpu_folder.rename(gpu_folder.parent / "mine")
    (gpu_folder.parent / "broken").mkdir()
    (gpu_folder.parent / "broken" / "card.json").write_text("{")
    monkeypatch.setattr(costs_model, "PRETRAINED", gpu_folder.parent)
    monkeypatch.setattr("torchrec_neuroshard.costs.registry._warned", set())
    assert resolve_cost_model("auto", "cuda", "nvidia_l4").provenance == "measured"
    assert "broken" in caplog.text
    assert resolve_cost_model("auto", "cuda", "generic_gpu").provenance == "analytic"
    monkeypatch.setattr("torchrec_neuroshard.costs.registry.machine_name", lambda device: "nvidia_l4")
    assert resolve_cost_model("auto", "cuda", "generic_gpu").hardware == "nvidia_l4"  # on that machine
    assert resolve_cost_model("auto", "cuda", "h200").provenance == "analytic"  # nothing to scale by


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


# TorchRec's own formula


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_torchrecs_formula_is_fitted_and_computed_by_torchrec(device: str, gpu_folder: Path) -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    model = CostModel.load(gpu_folder if device == "cuda" else "cpu")
    config = torchrec_hardware_config(model)
    topology = Topology(world_size=2, compute_device=device)
    constraints = {"t": ParameterConstraints(pooling_factors=[20.0])}
    estimator = EmbeddingPerfEstimatorFactory.create_with_config(config, topology=topology, constraints=constraints)
    storage = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
    enumerator = EmbeddingEnumerator(topology, 512, constraints=constraints, estimator=[estimator, storage])
    table = EmbeddingBagConfig(num_embeddings=10_000, embedding_dim=64, name="t", feature_names=["f"])
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    option = next(o for o in options if (o.sharding_type, o.compute_kernel) == ("table_wise", "fused"))
    perf = option.shards[0].perf
    assert perf is not None
    fitted = model.card["torchrec_coefficients"]
    lookups, outputs = 2 * 512 * 20.0, 2 * 512 * 64 * 4.0
    sizes = np.asarray([lookups * 8, lookups * 64 * 4, outputs])
    for part, half, penalty in ((perf.fwd_compute, "fwd", 1.15), (perf.bwd_compute, "bwd", 1.0)):
        multipliers = np.asarray([fitted["table_wise"][half][name] for name in MULTIPLIERS])
        assert part == pytest.approx(penalty * float(sizes @ multipliers) / fitted["mem_bw_bytes_per_ms"], rel=1e-3)


def test_torchrecs_coefficients_are_recovered_and_need_records() -> None:
    records = []
    for index in range(80):
        record = copy.deepcopy(priced_record(index))
        spec = GroupSpec.from_json(record["spec"])
        if spec.compute_kernel != "fused" or spec.pooling != "sum":
            continue
        lookups = np.asarray([spec.batch_size * s.pooling_factor for s in spec.shards])
        dims = np.asarray([float(s.dim) for s in spec.shards])
        outputs = np.asarray([spec.batch_size * s.num_features * s.dim * 4.0 for s in spec.shards])
        element = 2 if spec.data_type == "fp16" else 4
        record["backward_ms"]["median"] = float(
            (5 * 8 * lookups + 2 * lookups * dims * element + 3 * outputs).sum() / 1e9
        )
        records.append(record)
    fitted = fit_torchrec_coefficients(records, 1e9)
    assert fitted is not None and fitted["records"] == len(records)
    assert [fitted["table_wise"]["bwd"][name] for name in MULTIPLIERS] == pytest.approx([5, 2, 3], rel=0.01)
    assert fitted["median_ape"]["bwd"] < 0.01 and fitted["table_wise"]["bwd"] == fitted["row_wise"]["bwd"]
    assert fit_torchrec_coefficients(records[:5], 1e9) is None
    with pytest.raises(UnsupportedArgumentError, match="has no coefficients of TorchRec's formula"):
        torchrec_hardware_config(CostModel.analytic("h200"))


# One command


def test_without_a_base_calibrate_trains_from_the_records_alone(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, of which no model is shipped; with the collectives of the host's ranks."""
    monkeypatch.setattr(calibrate, "shipped_models", lambda: ())
    one_epoch = dataclasses.replace(build.TrainingConfig(), nets=2, epochs=1)
    monkeypatch.setattr("torchrec_neuroshard.cli.calibrate.TrainingConfig", lambda seed: one_epoch)
    from torchrec_neuroshard.measure.hardware import hardware_fingerprint

    here = {**hardware_fingerprint("cpu")}
    given = [priced_record(index, here, location="device") for index in range(120)]
    file, out = stored(tmp_path / "given.jsonl", iter(given)), tmp_path / "model"
    options = ["--records", str(file), "--device", "cpu", "--world-size", "2", "--minutes", "0.06", "--out", str(out)]
    assert main(["calibrate", *options]) == 0
    said = capsys.readouterr()
    assert "no cost model of a cpu device is shipped" in said.err and "held-out groups" in said.out
    card = CostModel.load(out).card
    assert "calibrated_from" not in card and {"copy", "launch_forward"} <= set(card["bandwidths"])
    assert {record["kind"] for record in read_records(out / RECORDS_FILE)} == {"bandwidth", "group"}
    assert {record["kind"] for record in read_records(out / COLLECTIVES_FILE)} == {"collective"}


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
