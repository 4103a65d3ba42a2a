"""The training example under torchrun with real ranks, and the demo's failure path."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.synthetic_data import synthesize_batches
from examples.train_dlrm import DEMO_WORKLOAD
from torchrec_neuroshard.workload import Workload

REPOSITORY = Path(__file__).parent.parent


def _workload(path: Path, dims: tuple[int, ...]) -> Path:
    tables = [
        {"num_embeddings": 500 + 100 * index, "embedding_dim": dim, "pooling_factor": 3.0, "alpha": 0.9}
        for index, dim in enumerate(dims)
    ]
    tables[0]["features"] = [1.0, 2.0]
    path.write_text(json.dumps({"name": "tiny", "batch_size": 64, "tables": tables}))
    return path


def _train(workload: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    script = ["-m", "examples.train_dlrm", "--workload", str(workload), "--device", "cpu", *arguments]
    return subprocess.run([*command, *script], cwd=REPOSITORY, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(
    "planner, pipeline, dims",
    [("neuroshard", "none", (16, 16, 16)), ("torchrec", "sparse_dist", (16, 64, 32))],
    ids=["neuroshard-none-DLRM", "torchrec-sparse_dist-mixed_dims"],
)
def test_training_writes_every_column_of_the_plan(
    planner: str, pipeline: str, dims: tuple[int, ...], tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    workload = _workload(tmp_path / "tiny.json", dims)
    done = _train(workload, "--planner", planner, "--pipeline", pipeline, "--steps", "8", "--json", str(out))
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(out.read_text())
    assert len(result["loss"]) == 8 and np.isfinite(result["loss"]).all()
    assert len(result["predicted_ms_per_rank"]) == 2 and max(result["predicted_ms_per_rank"]) > 0
    assert result["step_ms"] > 0
    for name, dim in zip(("t0", "t1", "t2"), dims):
        assert sum(shard["size"][1] for shard in result["plan"][name]["shards"]) == dim


def test_a_batch_that_does_not_divide_is_named(tmp_path: Path) -> None:
    done = _train(_workload(tmp_path / "tiny.json", (16,)), "--batch-size", "63")
    assert done.returncode != 0
    assert "a global batch of 63 does not divide among 2 ranks" in done.stderr


def test_the_demo_fails_loudly_when_a_run_fails() -> None:
    command = [sys.executable, "-m", "examples.demo", "--world-size", "3", "--steps", "8"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert "a global batch of 1024 does not divide among 3 ranks" in done.stdout
    assert "Training with the torchrec planner failed" in done.stdout


def test_synthetic_batches_have_the_pooling_factors_and_skew_of_the_workload() -> None:
    workload = Workload.load(DEMO_WORKLOAD)
    batch = synthesize_batches(workload, 512, 13, 1, np.random.default_rng(0))[0]
    features = batch.sparse_features.to_dict()
    for table, names in zip(workload.tables, workload.features):
        ids = np.concatenate([features[name].values().numpy() for name in names])
        assert 0 <= ids.min() and ids.max() < table.num_embeddings
        assert ids.size == pytest.approx(512 * table.pooling_factor, rel=0.2)
        assert np.unique(ids).size == pytest.approx(table.distribution.expected_unique(ids.size), rel=0.2)
