"""Budgeted, resumable collection of compute records into a measurement store."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.pool import sample_group
from torchrec_neuroshard.measure.probe import DisturbanceProbe
from torchrec_neuroshard.measure.reference import ReferenceProbe, reference_json
from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.measure.tbe import GroupTiming, measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy


@dataclass(frozen=True)
class Sampled:
    """A group to measure, and how it was chosen: "random", "active" (see training.active) or "plan"."""

    spec: GroupSpec
    sampling: str = "random"


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


def sampled_groups(seed: int) -> Iterator[Sampled]:
    """The endless, reproducible sequence of sampled groups for a seed."""
    index = 0
    while True:
        yield Sampled(sample_group(seed, index))
        index += 1


def collect_groups(
    groups: Iterable[Sampled],
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
        groups: what to measure, in order.
        store: where records go; each is flushed before the next begins.
        device: "cpu" or "cuda" device.
        minutes: time budget; checked between records.
        policy: repetitions of each record.
        limit: stop after this many new records.
        progress: called with the number of records written so far.
    """
    measured = records_of_this_machine(store, "group", device)
    done = {record["id"] for record in measured}
    probe = DisturbanceProbe(device, [record["probe_median_ms"] for record in measured if "probe_median_ms" in record])
    reference = ReferenceProbe(device)
    begun = time.monotonic()
    written = skipped = 0
    for group in groups:
        spec = group.spec
        if time.monotonic() - begun > 60 * minutes or (limit is not None and written >= limit):
            break
        if spec_id(spec) in done:
            skipped += 1
            continue
        started = time.monotonic()
        measure = partial(_with_reference, reference, spec, device, policy)
        (timing, reference_times), disturbance = probe.undisturbed(measure)
        store.append(
            {
                **describe("group", spec, device),
                "sampling": group.sampling,
                "forward_ms": timing.forward.to_json(),
                "backward_ms": timing.backward.to_json(),
                "total_ms": timing.total.to_json(),
                "lookups": round(timing.lookups, 1),
                "batches": timing.batches,
                "disturbance": round(disturbance, 3),
                "probe_median_ms": round(disturbance * probe.quiet_ms, 4),
                "reference_ms": reference_json(reference_times),
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        written += 1
        if progress is not None:
            progress(written)
    return CollectionResult(written, skipped, time.monotonic() - begun)


def _with_reference(
    reference: ReferenceProbe, spec: GroupSpec, device: torch.device, policy: RepetitionPolicy | None
) -> tuple[GroupTiming, NDArray[np.float64]]:
    """A group's timing, and the reference times right before and after it."""
    before = reference.times()
    timing = measure_group(spec, device, policy)
    return timing, np.concatenate([before, reference.times()])
