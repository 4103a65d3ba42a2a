"""Append-only measurement store: one JSON object a line, flushed as it is written.

Killing a writer at any moment loses at most the record in flight: a torn last line is dropped when the file
is next opened. Files may be compressed (``.xz``, ``.gz``) for reading.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
import zlib
from pathlib import Path
from typing import IO, Any, Iterator, Mapping

SCHEMA_VERSION = 1
_BEGINNING = b'{"schema":'  # of every record that this module writes


class RecordError(ValueError):
    """A measurement file that cannot be read; the message names the file, the line and the remedy."""


class MeasurementStore:
    """Appends records to a file and reads them back.

    Args:
        path: a ``.jsonl`` file to append to; made, with its folder, when missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.suffix in (".xz", ".gz"):
            raise RecordError(f"{self.path} is compressed, so it cannot be appended to; decompress it first")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file: IO[bytes] = open(self.path, "ab")

    def append(self, record: Mapping[str, Any]) -> None:
        """Writes one record and hands it to the operating system before returning."""
        line = json.dumps({"schema": SCHEMA_VERSION, **record}, separators=(",", ":")) + "\n"
        self._file.write(line.encode())
        self._file.flush()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return read_records(self.path)

    def __enter__(self) -> MeasurementStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_records(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Reads the records of a ``.jsonl``, ``.jsonl.gz`` or ``.jsonl.xz`` file in the order they were written.

    A torn last line (a writer was killed) is skipped.

    Raises:
        RecordError: a line is not a record, or was written by an unknown schema version.
        FileNotFoundError: there is no such file.
    """
    path = Path(path)
    number = 0
    try:
        with _open_text(path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.endswith("\n"):
                    return
                yield _parse(path, number, line)
    except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error, UnicodeDecodeError) as error:
        raise RecordError(
            f"{path}: damaged after line {number} ({error}); restore the file or collect again"
        ) from error


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RecordError(
            f"{path}, line {number}: not a JSON record ({error}); delete that line or collect again"
        ) from error
    if not isinstance(record, dict) or record.get("schema") != SCHEMA_VERSION:
        found = record.get("schema") if isinstance(record, dict) else type(record).__name__
        raise RecordError(
            f"{path}, line {number}: schema {found!r}, but this version reads {SCHEMA_VERSION}; "
            "collect again with this version, or read the file with the version that wrote it"
        )
    return record


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _drop_torn_line(path: Path) -> None:
    """Cuts off a last line that a killed writer left unfinished.

    Raises:
        RecordError: the file is not a measurement file, so that what lies there is not ours to cut.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise RecordError(f"{path} is not a regular file; give a .jsonl file to append to")
    with open(path, "rb+") as file:
        file.seek(0, os.SEEK_END)
        if file.tell() == 0:
            return
        file.seek(-1, os.SEEK_END)
        torn = file.read(1) != b"\n"
        file.seek(0)
        begins = file.readline()
        if not (begins[: len(_BEGINNING)] == _BEGINNING or _BEGINNING.startswith(begins)):
            raise RecordError(
                f"{path}, line 1: not a record of this package, so nothing is appended; give another file"
            )
        if torn:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
