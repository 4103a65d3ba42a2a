"""Collectives measured with real gloo ranks, on one host and on two emulated ones; resumed, and killed half-way."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, Iterator

import pytest

from torchrec_neuroshard.measure import collectives, netns
from torchrec_neuroshard.measure.collective_calls import buffer_sizes, split_sizes
from torchrec_neuroshard.measure.collective_pool import estimated_call_ms, sample_collective
from torchrec_neuroshard.measure.specs import COLLECTIVES, CollectiveSpec, spec_id
from torchrec_neuroshard.measure.store import read_records

WORLD_SIZE = 2
SEED = 1031  # its third call has one rank start 14.7 ms after the other


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


def test_each_collective_moves_what_torchrec_moves() -> None:
    sizes = {
        name: buffer_sizes(CollectiveSpec(name, 3, batch_size_per_rank=5, dims=(8,)), rank=1)
        for name in ("reduce_scatter", "all_gather")
    }
    assert sizes == {"reduce_scatter": (120, 40), "all_gather": (40, 120)}
    assert buffer_sizes(CollectiveSpec("all_reduce", 3, batch_size_per_rank=1, dims=(70,)), rank=2) == (70, 70)
    assert buffer_sizes(CollectiveSpec("all_to_all", 2, batch_size_per_rank=5, dims=(8, 4)), rank=1) == (40, 60)
    with pytest.raises(ValueError, match="only an all_to_all has split sizes, this is all_gather"):
        split_sizes(CollectiveSpec("all_gather", 3, 5, (8,)), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "broadcast"}, "collective must be one of"),
        ({"world_size": 0, "dims": ()}, "world_size must be positive"),
        ({"batch_size_per_rank": 0}, "batch_size_per_rank must be positive"),
        ({"dims": (8, 8)}, r"dims needs one entry per rank \(4\), got 2"),
        ({"dims": (8, 8, 8, -4)}, "dims must not be negative"),
        ({"direction": "sideways"}, "direction must be forward or backward"),
        ({"start_delays_ms": (1.0,)}, "start_delays_ms needs one entry per rank"),
        ({"start_delays_ms": (1.0, 0.0, 0.0, -1.0)}, "start_delays_ms must not be negative"),
        ({"local_world_size": 3}, r"local_world_size must divide world_size \(4\)"),
        ({"link_gbps": 1.0}, "link_gbps is the positive speed of the link between hosts"),
        ({"local_world_size": 2, "link_gbps": 0.0}, "link_gbps is the positive speed"),
        ({"name": "reduce_scatter"}, "dims of reduce_scatter has one entry, the columns of all tables together; got 4"),
        ({"name": "all_reduce"}, "dims of all_reduce has one entry, the floats of the buffer; got 4"),
        ({"name": "all_reduce", "dims": (8,)}, "batch_size_per_rank of all_reduce must be 1, got 16"),
        ({"name": "all_gather", "dims": (8,), "direction": "backward"}, "only an all_to_all has a direction"),
    ],
)
def test_specs_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"name": "all_to_all", "world_size": 4, "batch_size_per_rank": 16, "dims": (8, 8, 8, 8)}
    with pytest.raises(ValueError, match=message):
        CollectiveSpec(**{**fields, **changes})


def test_ids_stand_for_one_host_and_tell_hosts_and_links_apart() -> None:
    spec = CollectiveSpec("all_to_all", 4, 16, (8, 8, 8, 8), start_delays_ms=(1.0, 0.0, 0.0, 2.5))
    assert spec_id(spec) == "a8e66f33f31346db"  # what the version without hosts gave it
    assert dataclasses.replace(spec, local_world_size=4) == spec and spec.hosts == 1 and spec.ranks_per_host == 4
    split = [dataclasses.replace(spec, local_world_size=2, link_gbps=link) for link in (None, 1.0, 10.0)]
    assert len({spec_id(each) for each in [spec, *split]}) == 4
    assert all(each.hosts == 2 and CollectiveSpec.from_json(each.to_json()) == each for each in split)


@pytest.mark.parametrize(("world_size", "local_world_size"), [(2, 0), (2, 1), (3, 0), (4, 2), (8, 0), (8, 4)])
def test_samples_cover_every_collective_within_a_cap(world_size: int, local_world_size: int) -> None:
    link = 1.0 if local_world_size else None
    specs = [sample_collective(SEED, index, world_size, local_world_size, link) for index in range(300)]
    counts = Counter(spec.name for spec in specs)
    assert 120 < counts["all_to_all"] < 180 and all(30 < counts[name] < 75 for name in COLLECTIVES[1:])
    assert {spec.direction for spec in specs if spec.name == "all_to_all"} == {"forward", "backward"}
    assert all(dim % 4 == 0 for spec in specs if spec.name != "all_reduce" for dim in spec.dims)
    assert 0.3 < sum(bool(spec.start_delays_ms) for spec in specs) / len(specs) < 0.7
    assert {(spec.local_world_size, spec.link_gbps) for spec in specs} == {(local_world_size, link)}
    estimates = sorted(estimated_call_ms(spec) for spec in specs)
    assert estimates[-1] <= 250 and estimates[150] < 40 and estimates[-1] > 100 * estimates[15]


def test_time_between_hosts_is_what_crosses_the_link() -> None:
    apart = CollectiveSpec("all_to_all", 4, 1000, (0, 0, 0, 250), local_world_size=2, link_gbps=1.0)
    assert estimated_call_ms(apart) == pytest.approx(2 * 1e6 / 125e3)  # rank 3 sends 1 MB to ranks 0 and 1
    ring = CollectiveSpec("all_gather", 4, 1000, (250,), local_world_size=2, link_gbps=1.0)
    assert estimated_call_ms(ring) == pytest.approx(3 * 1e6 / 125e3)
    reduced = dataclasses.replace(ring, name="reduce_scatter")
    assert estimated_call_ms(reduced) == pytest.approx(2 * estimated_call_ms(ring))
    assert estimated_call_ms(dataclasses.replace(apart, local_world_size=0, link_gbps=None)) < 10


def test_every_collective_runs_on_two_ranks(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    done = _collect(out, limit=8)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr
    records = list(read_records(out))
    assert {record["spec"]["name"] for record in records} == set(COLLECTIVES)
    assert {(record["hosts"], record["local_world_size"], record["link_gbps"]) for record in records} == {(1, 2, None)}


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


def test_ranks_end_with_a_launcher_that_is_killed_outright(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    with _launched(_command(out, "--minutes", "2"), out) as launcher:
        rank = int(next(read_records(out))["pid"])
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 20
        while _alive(rank):
            assert time.monotonic() < deadline, "a rank outlives its launcher"
            time.sleep(0.1)


def test_kill_half_way_leaves_a_readable_store_that_resumes(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    with _launched(_command(out, "--minutes", "2"), out, records=4) as launcher:
        # The writer itself dies without notice; torchrun then ends the other rank.
        os.kill(next(read_records(out))["pid"], signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hosts", "2"], "--hosts 2 needs --link-gbps"),
        (["--link-gbps", "1"], "pass --hosts 2 with it"),
        (["--hosts", "3", "--link-gbps", "1"], "run this module under torchrun on the hosts themselves"),
        (["--hosts", "2", "--link-gbps", "1", "--world-size", "3"], "cannot be shared evenly by 2 hosts"),
        (["--hosts", "2", "--link-gbps", "1", "--device", "cuda"], "pass --device cpu"),
        (["--hosts", "2", "--link-gbps", "-1"], "--link-gbps -1.0 must be a positive number"),
        (["--world-size", "1"], "--world-size 1: a collective needs at least 2 ranks"),
    ],
)
def test_hosts_that_cannot_be_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--out", str(tmp_path / "out.jsonl"), "--device", "cpu", "--world-size", "2"]
    assert collectives.main([*base, *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("root", "tools", "message"),
    [(1000, {"ip", "tc"}, "run this command with sudo"), (0, {"ip"}, "need tc; install the package iproute2")],
)
def test_what_emulated_hosts_need_is_named(
    root: int, tools: set[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: root)
    monkeypatch.setattr(netns.shutil, "which", lambda tool: tool if tool in tools else None)
    with pytest.raises(netns.NetnsError, match=message), netns.joined_hosts(1.0):
        pass


@pytest.fixture(scope="module")
def emulation() -> None:
    try:
        with netns.joined_hosts(1.0):
            pass
    except netns.NetnsError as error:
        pytest.skip(str(error))


@pytest.fixture
def no_hosts_left() -> Iterator[None]:
    before = set(netns.namespaces())
    yield
    assert set(netns.namespaces()) <= before


_LISTEN = """
import socket, sys
with socket.create_server((sys.argv[1], 5999)) as server:
    print(flush=True)
    for _ in range(2):
        connection, _ = server.accept()
        while connection.recv(1 << 20):
            pass
        connection.close()
"""
_SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5999)) as connection:
    begun = time.perf_counter()
    connection.sendall(bytes(16 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
    print(8 * (16 << 20) / (time.perf_counter() - begun) / 1e9)
"""


@pytest.mark.usefixtures("emulation", "no_hosts_left")
def test_the_link_is_limited_and_the_inside_of_a_host_is_not() -> None:
    with netns.joined_hosts(0.5) as (first, second):
        listen = first.command([sys.executable, "-c", _LISTEN, first.address])
        with subprocess.Popen(listen, stdout=subprocess.PIPE) as listener:
            assert listener.stdout is not None and listener.stdout.readline()
            send = [sys.executable, "-c", _SEND, first.address]
            between, within = (float(subprocess.check_output(host.command(send))) for host in (second, first))
    assert 0.25 < between < 0.55
    assert within > 2 * between


def _collect_on_two_hosts(out: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "-m", "torchrec_neuroshard", "measure", "collectives", "--out", str(out)]
    return [*command, "--device", "cpu", "--world-size", "4", "--hosts", "2", "--link-gbps", "1", *arguments]


@pytest.mark.usefixtures("emulation", "no_hosts_left")
def test_two_emulated_hosts_collect_and_resume(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    for limit in (2, 1):
        command = _collect_on_two_hosts(out, "--limit", str(limit))
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
    assert _ids(out) == [spec_id(sample_collective(0, index, 4, 2, 1.0)) for index in range(3)]
    for record in read_records(out):
        assert (record["hosts"], record["local_world_size"], record["link_gbps"]) == (2, 2, 1.0)
        assert len(record["rank_ms"]) == 4


@pytest.mark.usefixtures("emulation", "no_hosts_left")
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_collection_leaves_no_hosts_behind(ending: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    with _launched(_collect_on_two_hosts(out, "--minutes", "2"), out) as launcher:
        launcher.send_signal(ending)
        assert launcher.wait(timeout=60) != 0
    assert not _alive(next(read_records(out))["pid"])


@pytest.mark.usefixtures("emulation", "no_hosts_left")
def test_what_a_killed_collection_leaves_is_cleared_by_the_next(tmp_path: Path) -> None:
    out = tmp_path / "collectives.jsonl"
    with _launched(_collect_on_two_hosts(out, "--minutes", "2"), out) as launcher:
        left = [name for name in netns.namespaces() if f"-{launcher.pid}-" in name]
        launcher.kill()
        launcher.wait(timeout=60)
    assert len(left) == 2
    with netns.joined_hosts(1.0) as hosts:
        assert not set(left) & set(netns.namespaces())
        assert {host.namespace for host in hosts} <= set(netns.namespaces())
    assert not _alive(next(read_records(out))["pid"])


@contextlib.contextmanager
def _launched(command: list[str], out: Path, records: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A collection that has written its first records; whatever is left of it ends with the context."""
    launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 120
        while not out.exists() or len(list(read_records(out))) < records:
            assert launcher.poll() is None, "the collector ended by itself"
            assert time.monotonic() < deadline, "no records were written"
            time.sleep(0.05)
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.terminate()
            launcher.wait(timeout=60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    return Path(f"/proc/{pid}/cmdline").exists() and bool(Path(f"/proc/{pid}/cmdline").read_bytes())
