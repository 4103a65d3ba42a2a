"""Budgeted, resumable collection of compute records into a measurement store."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterable, Iterator

import torch

from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.pool import sample_group
from torchrec_neuroshard.measure.probe import DisturbanceProbe
from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.measure.timing import RepetitionPolicy


@dataclass(frozen=True)
class CollectionResult:
    """What a collection run did."""

    written: int
    skipped: int
    seconds: float


def describe(kind: str, spec: GroupSpec | CollectiveSpec, device: torch.device) -> dict[str, Any]:
    """The self-describing part of a record: what was measured, on what, with which versions."""
    return {
        "kind": kind,
        "id": spec_id(spec),
        "spec": spec.to_json(),
        "device": device.type,
        "hardware": hardware_fingerprint(device.type),
        "versions": software_versions(),
        "unix_time": round(time.time(), 1),
        "pid": os.getpid(),
    }


def records_of_this_machine(store: MeasurementStore, kind: str, device: torch.device) -> list[dict[str, Any]]:
    """The store's records of a kind.

    Raises:
        RecordError: some were taken on another kind of machine; training refuses a mixture.
    """
    here = hardware_fingerprint(device.type)["name"]
    records = []
    for record in store:
        hardware = record.get("hardware")
        name = hardware.get("name") if isinstance(hardware, dict) else hardware
        if name != here:
            raise RecordError(f"{store.path} holds records of {name}, but this machine is {here}; give another file")
        if record.get("kind") == kind:
            records.append(record)
    return records


def sampled_groups(seed: int) -> Iterator[GroupSpec]:
    """The endless, reproducible sequence of sampled groups for a seed."""
    index = 0
    while True:
        yield sample_group(seed, index)
        index += 1


def collect_groups(
    specs: Iterable[GroupSpec],
    store: MeasurementStore,
    device: torch.device,
    minutes: float,
    policy: RepetitionPolicy | None = None,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> CollectionResult:
    """Measures groups one after another until the time or the number of records is reached.

    Groups that the store already holds are skipped, so a rerun resumes where a killed run stopped. A group
    measured while the machine was disturbed is measured again, a few times at most; what its record holds is
    the last try and that try's disturbance.

    Args:
        specs: what to measure, in order.
        store: where records go; each is flushed before the next begins.
        device: "cpu" or "cuda" device.
        minutes: time budget; checked between records.
        policy: repetitions of each record.
        limit: stop after this many new records.
        progress: called with the number of records written so far.
    """
    from torchrec_neuroshard.measure.tbe import measure_group

    measured = records_of_this_machine(store, "group", device)
    done = {record["id"] for record in measured}
    probe = DisturbanceProbe(device, [record["probe_median_ms"] for record in measured if "probe_median_ms" in record])
    begun = time.monotonic()
    written = skipped = 0
    for spec in specs:
        if time.monotonic() - begun > 60 * minutes or (limit is not None and written >= limit):
            break
        if spec_id(spec) in done:
            skipped += 1
            continue
        started = time.monotonic()
        timing, disturbance = probe.undisturbed(partial(measure_group, spec, device, policy))
        store.append(
            {
                **describe("group", spec, device),
                "forward_ms": timing.forward.to_json(),
                "backward_ms": timing.backward.to_json(),
                "total_ms": timing.total.to_json(),
                "lookups": round(timing.lookups, 1),
                "batches": timing.batches,
                "disturbance": round(disturbance, 3),
                "probe_median_ms": round(disturbance * probe.quiet_ms, 4),
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        written += 1
        if progress is not None:
            progress(written)
    return CollectionResult(written, skipped, time.monotonic() - begun)
