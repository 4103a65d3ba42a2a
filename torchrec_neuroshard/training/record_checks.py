"""Checks of measured records, so that what cannot be used is named before anything is trained or evaluated on it."""

from __future__ import annotations

import math
import os
from typing import Any, Callable

from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec
from torchrec_neuroshard.measure.store import RecordError

Record = dict[str, Any]

_PLAUSIBLE_MS = (1e-4, 1e5)  # of a reference time


def check_record(path: str | os.PathLike[str], record: Record) -> None:
    """Checks that a record holds what training and evaluation use.

    Args:
        path: its file, for the message.
        record: the record.

    Raises:
        RecordError: a field is missing or impossible; the message names file, record and field.
    """
    try:
        if not isinstance(record["id"], str):
            raise ValueError("id must be a text")
        if not isinstance(record["hardware"], dict) or not isinstance(record["hardware"]["name"], str):
            raise ValueError("hardware.name must be a text")
        if not isinstance(record.get("device", "cpu"), str) or not isinstance(record.get("versions", {}), dict):
            raise ValueError("device must be a text and versions an object")
        if not isinstance(record.get("pid", 0), int):
            raise ValueError(f"pid must be a whole number, got {record['pid']!r}")
        _check_number("unix_time", record.get("unix_time", 0.0))
        _check_number("disturbance", record.get("disturbance", 1.0))
        _CHECKS[record["kind"]](record)
    except KeyError as error:
        raise _unusable(path, record, f"field {error} is missing") from error
    except (AttributeError, IndexError, OverflowError, TypeError, ValueError) as error:
        raise _unusable(path, record, str(error)) from error


def _unusable(path: str | os.PathLike[str], record: Record, cause: str) -> RecordError:
    return RecordError(
        f"{path}: record {record.get('id')!r} cannot be used ({cause}); delete its line, or collect again with this "
        "version"
    )


def _check_group(record: Record) -> None:
    spec = GroupSpec.from_json(record["spec"])
    if not spec.shards or not math.isfinite(spec.lookups):
        raise ValueError("spec: a group needs shards with finite pooling factors")
    for shard in spec.shards:
        shard.distribution()
    for name in ("forward_ms", "backward_ms"):
        _check_positive(f"{name}.median", record[name]["median"])
    for quantile in ("median", "p10", "p90"):
        _check_positive(f"total_ms.{quantile}", record["total_ms"][quantile])
    _check_number("lookups", record["lookups"])
    for name, time in record.get("reference_ms", {}).items():
        _check_positive(f"reference_ms.{name}", time)
        if not _PLAUSIBLE_MS[0] < time < _PLAUSIBLE_MS[1]:
            raise ValueError(f"reference_ms.{name} must be between {_PLAUSIBLE_MS} ms, got {time!r}")


def _check_collective(record: Record) -> None:
    spec = CollectiveSpec.from_json(record["spec"])
    if spec.world_size < 2:
        raise ValueError("spec: a collective over one rank moves nothing, so there is nothing to compare")
    if len(record["rank_ms"]) != spec.world_size:
        raise ValueError(f"rank_ms needs one entry per rank ({spec.world_size}), got {len(record['rank_ms'])}")
    for rank, timing in enumerate(record["rank_ms"]):
        _check_positive(f"rank_ms[{rank}].median", timing["median"])


def _check_bandwidth(record: Record) -> None:
    if not isinstance(record["name"], str):
        raise ValueError("name must be a text")
    _check_positive("ms.median", record["ms"]["median"])
    if record["gb_per_s"] is not None:
        _check_positive("gb_per_s", record["gb_per_s"])


def _check_number(name: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} must be a finite number of at least 0, got {value!r}")


def _check_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value!r}")


_CHECKS: dict[str, Callable[[Record], None]] = {
    "group": _check_group,
    "collective": _check_collective,
    "bandwidth": _check_bandwidth,
}
