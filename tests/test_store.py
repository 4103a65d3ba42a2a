"""The measurement store: what a killed writer leaves, and files that cannot be read."""

from __future__ import annotations

import gzip
import json
import lzma
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrec_neuroshard.measure.store import SCHEMA_VERSION, MeasurementStore, RecordError, read_records

# Acknowledges each record, and dies by its parent's hand at the given one, in the middle of a line.
WRITER = """
import sys, time
from torchrec_neuroshard.measure.store import MeasurementStore
store, torn_at = MeasurementStore(sys.argv[1]), int(sys.argv[2])
for index in range(10**9):
    if index == torn_at:
        store._file.write(b'{"schema":1,"id":"' + str(index).encode() + b'","samples":[1.0,2.')
        store._file.flush()
        print("torn", flush=True)
        time.sleep(600)
    store.append({"id": str(index), "samples": [1.0] * 50})
    print(index, flush=True)
"""


def write_until_killed(path: Path, torn_at: int, last_line: str) -> None:
    command = [sys.executable, "-c", WRITER, str(path), str(torn_at)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if line.strip() == last_line:
                break
        writer.send_signal(signal.SIGKILL)


def test_kill_between_records_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_until_killed(path, torn_at=-1, last_line="200")
    with MeasurementStore(path) as store:
        before = [record["id"] for record in store]
        assert before == [str(index) for index in range(len(before))]
        assert len(before) >= 201
        store.append({"id": "resumed"})
    assert [record["id"] for record in read_records(path)] == [*before, "resumed"]


def test_kill_inside_a_record_loses_that_record_only(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    write_until_killed(path, torn_at=7, last_line="torn")
    assert not path.read_text().endswith("\n")
    assert [record["id"] for record in read_records(path)] == [str(index) for index in range(7)]
    with MeasurementStore(path) as store:
        store.append({"id": "7"})
    assert [record["id"] for record in read_records(path)] == [str(index) for index in range(8)]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 5), cut=st.integers(0, 400))
def test_a_file_cut_anywhere_resumes(tmp_path_factory: pytest.TempPathFactory, count: int, cut: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "records.jsonl"
    with MeasurementStore(path) as store:
        for index in range(count):
            store.append({"id": index, "note": "é" * index})
    content = path.read_bytes()[:cut]
    path.write_bytes(content)
    whole = content.count(b"\n")
    with MeasurementStore(path) as store:
        store.append({"id": "new"})
    assert [record["id"] for record in read_records(path)] == [*range(whole), "new"]


def test_a_corrupt_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    with MeasurementStore(path) as store:
        for index in range(3):
            store.append({"id": index})
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:10], lines[2]]) + "\n")
    with pytest.raises(RecordError, match=r"records\.jsonl, line 2: not a JSON record"):
        list(read_records(path))


@pytest.mark.parametrize("line", ['{"schema": 99}', "[1]", '"text"', "{}"])
def test_an_unknown_schema_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(RecordError, match=rf"line 1: schema .* this version reads {SCHEMA_VERSION}"):
        list(read_records(path))


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".xz", lzma.open)])
def test_compressed_files_are_read_but_not_appended_to(tmp_path: Path, suffix: str, opener) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / f"records.jsonl{suffix}"
    with opener(path, "wt") as file:
        file.write(json.dumps({"schema": SCHEMA_VERSION, "id": "a"}) + "\n")
    assert [record["id"] for record in read_records(path)] == ["a"]
    with pytest.raises(RecordError, match="decompress it first"):
        MeasurementStore(path)


def test_a_missing_file_is_an_error_to_read_and_made_to_write(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    with pytest.raises(FileNotFoundError):
        list(read_records(path))
    with MeasurementStore(path) as store:
        assert list(store) == []


@pytest.mark.parametrize("content", [b"my notes, no newline", b'{"name": "a workload"}', b"\x00\x01\x02", b"[1]\n"])
def test_what_is_no_measurement_file_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="nothing is appended"):
        MeasurementStore(path)
    assert path.read_bytes() == content
    with pytest.raises(RecordError, match="not a regular file"):
        MeasurementStore(tmp_path)


@pytest.mark.parametrize("torn", [b'{"sch', b'{"schema":1,"kind":"gro'])
def test_a_single_torn_line_is_dropped(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "torn.jsonl"
    path.write_bytes(torn)
    with MeasurementStore(path) as store:
        store.append({"kind": "group"})
    assert [record["kind"] for record in read_records(path)] == ["group"]
