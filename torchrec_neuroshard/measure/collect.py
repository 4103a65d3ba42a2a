"""Budgeted, resumable collection of compute records into a measurement store."""

from __future__ import annotations

import gc
import os
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterable, Iterator, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard import cuda
from torchrec_neuroshard.measure.bandwidth import Bandwidth, measure_bandwidths
from torchrec_neuroshard.measure.gpu_pool import sample_gpu_group
from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.pool import sample_group
from torchrec_neuroshard.measure.probe import DisturbanceProbe
from torchrec_neuroshard.measure.reference import ReferenceProbe, reference_json
from torchrec_neuroshard.measure.specs import CollectiveSpec, GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.measure.tbe import GroupTiming, measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy

Result = TypeVar("Result")

_FAILURES_IN_A_ROW = 5
_LARGE_BYTES = 4 << 30
_MEMORY_SHARE = 0.85  # of a GPU's free memory


@dataclass(frozen=True)
class Sampled:
    """A group to measure, and how it was chosen: "random", "active" (see training.active) or "plan"."""

    spec: GroupSpec
    sampling: str = "random"


@dataclass(frozen=True)
class CollectionResult:
    """What a collection run did.

    Attributes:
        written: new records.
        skipped: groups that were measured before.
        seconds: wall time.
        too_large: groups left out because this device has not the memory for them.
        failed: groups whose kernel failed; standard error tells which and why.
    """

    written: int
    skipped: int
    seconds: float
    too_large: int = 0
    failed: int = 0


def describe(kind: str, spec: GroupSpec | CollectiveSpec, device: torch.device) -> dict[str, Any]:
    """The self-describing part of a record: what was measured, on what, with which versions."""
    return _described(kind, spec_id(spec), spec.to_json(), device)


def _described(kind: str, identity: str, spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        "kind": kind,
        "id": identity,
        "spec": spec,
        "device": device.type,
        "hardware": hardware_fingerprint(device.type),
        "versions": software_versions(),
        "unix_time": round(time.time(), 1),
        "pid": os.getpid(),
    }


def collect_bandwidths(store: MeasurementStore, device: torch.device, mebibytes: int) -> list[Bandwidth]:
    """Measures a device's bandwidths and launch costs (see :mod:`.bandwidth`) and appends a record of each.

    Raises:
        RecordError: the store holds records of another kind of machine.
    """
    records_of_this_machine(store, "bandwidth", device)
    found = measure_bandwidths(device, mebibytes)
    for figure in found:
        spec = {"name": figure.name, "bytes": figure.bytes}
        identity = f"{figure.name}-{figure.bytes}"
        store.append({**_described("bandwidth", identity, spec, device), **figure.to_json()})
    return found


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


def sampled_groups(seed: int, device: str = "cpu") -> Iterator[Sampled]:
    """The endless, reproducible sequence of sampled groups for a seed and a kind of device ("cpu" or "cuda")."""
    sample = sample_gpu_group if device == "cuda" else sample_group
    index = 0
    while True:
        yield Sampled(sample(seed, index))
        index += 1


def repeated_groups(records: Iterable[dict[str, Any]]) -> Iterator[Sampled]:
    """The groups of some group records, each once, chosen as they were then."""
    seen: set[str] = set()
    for record in records:
        if record["id"] not in seen:
            seen.add(record["id"])
            yield Sampled(GroupSpec.from_json(record["spec"]), str(record.get("sampling", "random")))


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

    Groups that the store already holds are skipped, so a rerun resumes where a killed run stopped; so are groups that
    would not fit in a GPU's free memory. A group
    measured while the machine was disturbed is measured again, a few times at most; what its record holds is
    the last try and that try's disturbance.

    Raises:
        RuntimeError: groups failed one after another, as they do once a device is lost.

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
    written = skipped = too_large = failed = in_a_row = 0
    available = _memory_for_groups(device)
    for group in groups:
        spec = group.spec
        if time.monotonic() - begun > 60 * minutes or (limit is not None and written >= limit):
            break
        if spec_id(spec) in done:
            skipped += 1
            continue
        if spec.device_bytes + _batch_bytes(spec) > available:
            too_large += 1
            continue
        if device.type == "cuda" and (spec.location == "managed_caching" or spec.device_bytes > _LARGE_BYTES):
            cuda.free_memory_bytes()  # FBGEMM makes a cache smaller than asked where torch holds memory that is free
        started = time.monotonic()
        measure = partial(_with_reference, reference, spec, device, policy)
        try:
            outcome = _if_memory_suffices(partial(probe.undisturbed, measure), device)
        except (RuntimeError, ImportError) as error:  # one kernel that is missing must not end hours of collection
            failed, in_a_row = failed + 1, in_a_row + 1
            print(f"group {spec_id(spec)} failed and is left out ({error}): {spec.to_json()}", file=sys.stderr)
            if in_a_row == _FAILURES_IN_A_ROW:
                raise
            continue
        in_a_row = 0
        if outcome is None:
            too_large += 1
            continue
        (timing, reference_times), disturbance = outcome
        store.append(
            {
                **describe("group", spec, device),
                "sampling": group.sampling,
                "forward_ms": timing.forward.to_json(),
                "backward_ms": timing.backward.to_json(),
                "total_ms": timing.total.to_json(),
                "lookups": round(timing.lookups, 1),
                "batches": timing.batches,
                **({"host_bound": round(timing.host_bound, 3)} if device.type == "cuda" else {}),
                "disturbance": round(disturbance, 3),
                "probe_median_ms": round(disturbance * probe.quiet_ms, 4),
                "reference_ms": reference_json(reference_times),
                "seconds": round(time.monotonic() - started, 2),
            }
        )
        written += 1
        if progress is not None:
            progress(written)
    return CollectionResult(written, skipped, time.monotonic() - begun, too_large, failed)


def _if_memory_suffices(measure: Callable[[], Result], device: torch.device) -> Result | None:
    """Measures, a second time after freeing what is no longer used; None where a GPU's memory is too small for it.

    Args:
        measure: what may run out of the device's memory.
        device: the device.
    """
    for _ in range(2):
        try:
            return measure()
        except torch.OutOfMemoryError:
            pass
        gc.collect()  # outside the except block, whose error keeps the failed group's tensors
        if device.type == "cuda":
            cuda.free_memory_bytes()
    return None


def _memory_for_groups(device: torch.device) -> float:
    """Bytes of a GPU that a group and its batches may take; a CPU's pool is made for small machines."""
    return _MEMORY_SHARE * cuda.free_memory_bytes() if device.type == "cuda" else float("inf")


def _batch_bytes(spec: GroupSpec) -> float:
    """Bytes of the batches that are rotated, of outputs and gradients, with what the backward sorts: generous."""
    outputs = spec.batch_size * sum(shard.dim * shard.num_features for shard in spec.shards) * 4.0
    if spec.pooling == "none":
        outputs = spec.lookups * max(shard.dim for shard in spec.shards) * 4.0
    bags = spec.batch_size * sum(shard.num_features for shard in spec.shards)
    batches = 25.0 if spec.location == "managed_caching" else 8.0
    return 4.0 * outputs + (batches + 8.0) * 16.0 * (spec.lookups + bags)


def _with_reference(
    reference: ReferenceProbe, spec: GroupSpec, device: torch.device, policy: RepetitionPolicy | None
) -> tuple[GroupTiming, NDArray[np.float64]]:
    """A group's timing, and the reference times right before and after it."""
    before = reference.times()
    timing = measure_group(spec, device, policy)
    return timing, np.concatenate([before, reference.times()])
