"""Records as a GPU would give them, made up for tests of what is done with them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.test_calibration import quick as quick  # a fixture
from tests.test_calibration import stored
from torchrec_neuroshard import CostModel
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.measure.gpu_pool import sample_gpu_group
from torchrec_neuroshard.measure.specs import spec_id
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.training.dataset import spec_works
from torchrec_neuroshard.training.host_link import host_memory_times

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
