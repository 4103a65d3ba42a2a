"""Collectives measured with real gloo ranks, resumed, and killed half-way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchrec_neuroshard.measure.collectives import split_sizes
from torchrec_neuroshard.measure.pool import sample_collective
from torchrec_neuroshard.measure.specs import CollectiveSpec, spec_id
from torchrec_neuroshard.measure.store import read_records

WORLD_SIZE = 2
SEED = 49  # its third call has one rank start 13.5 ms after the other


def _command(out: Path, *arguments: str) -> list[str]:
    module = "torchrec_neuroshard.measure.collectives"
    ranks = ["--world-size", str(WORLD_SIZE), "--device", "cpu", "--seed", str(SEED)]
    return [sys.executable, "-m", module, "--out", str(out), *ranks, *arguments]


def _collect(out: Path, limit: int) -> subprocess.CompletedProcess[str]:
    command = _command(out, "--limit", str(limit), "--minutes", "2")
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def _ids(out: Path) -> list[str]:
    return [record["id"] for record in read_records(out)]


def _expected_ids(count: int) -> list[str]:
    return [spec_id(sample_collective(SEED, index, WORLD_SIZE)) for index in range(count)]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_what_one_rank_sends_is_what_the_other_receives(direction: str) -> None:
    spec = CollectiveSpec("all_to_all", 3, batch_size_per_rank=5, dims=(8, 0, 20), direction=direction)
    sizes = [split_sizes(spec, rank) for rank in range(3)]
    for sender in range(3):
        for receiver in range(3):
            assert sizes[sender][0][receiver] == sizes[receiver][1][sender]
    if direction == "forward":
        assert sizes[2] == ([100, 100, 100], [40, 0, 100])


def test_sampled_collectives_have_a_share_for_every_rank_and_some_delays() -> None:
    specs = [sample_collective(SEED, index, 4) for index in range(200)]
    assert {spec.direction for spec in specs} == {"forward", "backward"}
    assert all(len(spec.dims) == 4 and all(dim % 4 == 0 for dim in spec.dims) for spec in specs)
    assert 0.3 < sum(bool(spec.start_delays_ms) for spec in specs) / len(specs) < 0.7


def test_two_ranks_collect_and_resume_where_they_stopped(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    first = _collect(out, limit=3)
    assert first.returncode == 0, first.stderr
    assert _ids(out) == _expected_ids(3)
    second = _collect(out, limit=2)
    assert second.returncode == 0, second.stderr
    assert "2 records written, 3 were there" in second.stderr
    assert _ids(out) == _expected_ids(5)

    for record in read_records(out):
        assert record["kind"] == "collective" and record["backend"] == "gloo"
        assert record["pinned_cores"] == len(os.sched_getaffinity(0))
        spec = CollectiveSpec.from_json(record["spec"])
        assert spec_id(spec) == record["id"]
        repetitions = {len(timing["samples"]) for timing in record["rank_ms"]}
        assert len(record["rank_ms"]) == WORLD_SIZE
        assert len(repetitions) == 1 and 5 <= repetitions.pop() <= 20
        assert all(0 < timing["p10"] <= timing["median"] <= timing["p90"] for timing in record["rank_ms"])

    # The rank that starts first also times its wait for the other.
    delayed = list(read_records(out))[2]
    gap = delayed["spec"]["start_delays_ms"][1] - delayed["spec"]["start_delays_ms"][0]
    assert gap > 10 and delayed["rank_ms"][0]["median"] - delayed["rank_ms"][1]["median"] > gap / 2


def test_kill_half_way_leaves_a_readable_store_that_resumes(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    launcher = subprocess.Popen(
        _command(out, "--minutes", "2"), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 120
        while not out.exists() or len(list(read_records(out))) < 4:
            assert launcher.poll() is None, "the collector ended by itself"
            assert time.monotonic() < deadline, "no records were written"
            time.sleep(0.05)
        # The writer itself dies without notice; torchrun then ends the other rank.
        os.kill(next(read_records(out))["pid"], signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait()
    before = _ids(out)
    assert len(before) >= 4 and before == _expected_ids(len(before))
    # What a kill in the middle of a write leaves behind:
    whole = out.read_bytes()
    out.write_bytes(whole + whole[: len(whole.splitlines()[0]) // 2])
    assert _ids(out) == before
    resumed = _collect(out, limit=2)
    assert resumed.returncode == 0, resumed.stderr
    assert _ids(out) == _expected_ids(len(before) + 2)


def test_a_store_of_another_schema_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    out.write_text('{"schema": 99, "kind": "collective"}\n')
    done = _collect(out, limit=1)
    assert done.returncode == 2
    assert "line 1: schema 99" in done.stderr and len(done.stderr.splitlines()) == 1
