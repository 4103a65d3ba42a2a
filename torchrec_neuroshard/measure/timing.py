"""Repeated timing on CPU (wall clock) or CUDA (events), adapted to the spread and to a time budget."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Protocol, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.cuda import CudaStopwatch


@dataclass(frozen=True)
class Timing:
    """Summary of repeated timings, all in ms."""

    median: float
    p10: float
    p90: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples_ms: Sequence[float] | NDArray[np.float64]) -> Timing:
        """Summarises [repetitions] timings."""
        p10, median, p90 = np.percentile(np.asarray(samples_ms), [10, 50, 90])
        return cls(float(median), float(p10), float(p90), tuple(round(float(x), 4) for x in samples_ms))

    def to_json(self) -> dict[str, Any]:
        """A JSON object with rounded figures."""
        record = asdict(self)
        return {k: (list(v) if k == "samples" else round(v, 4)) for k, v in record.items()}


class Stopwatch(Protocol):
    """Times consecutive laps of work submitted to a device."""

    def start(self) -> None:
        """Begins the first lap (after flushing caches where the device needs it)."""

    def lap(self) -> None:
        """Ends a lap and begins the next."""

    def laps_ms(self) -> list[float]:
        """Waits for the device and returns the laps since :meth:`start`."""
        ...

    def host_bound(self) -> bool:
        """Whether the device may have waited for the host within the laps since :meth:`start`."""
        ...


class WallClockStopwatch:
    """Laps by the host's monotonic clock, for work that is done when the call returns."""

    def __init__(self) -> None:
        self._marks: list[float] = []

    def start(self) -> None:
        """Begins the first lap."""
        self._marks = [time.perf_counter()]

    def lap(self) -> None:
        """Ends a lap and begins the next."""
        self._marks.append(time.perf_counter())

    def laps_ms(self) -> list[float]:
        """The laps since :meth:`start`."""
        return [(b - a) * 1e3 for a, b in zip(self._marks, self._marks[1:])]

    def host_bound(self) -> bool:
        """No: the host is the device."""
        return False


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for a device."""
    if device.type == "cuda":
        return CudaStopwatch(device)
    return WallClockStopwatch()


@dataclass(frozen=True)
class RepetitionPolicy:
    """When to stop repeating a measurement.

    Attributes:
        warmup: repetitions thrown away first.
        minimum: repetitions always kept.
        maximum: repetitions never exceeded.
        seconds: stop once this much time has gone and the minimum is reached.
        relative_error: stop once the standard error of the mean falls below this share of it.
    """

    warmup: int = 2
    minimum: int = 5
    maximum: int = 20
    seconds: float = 0.35
    relative_error: float = 0.02


def repeat(step: Callable[[int], list[float]], policy: RepetitionPolicy) -> list[list[float]]:
    """Repeats ``step(repetition) -> laps in ms`` as the policy says; returns [repetitions][laps]."""
    begun = time.perf_counter()
    for index in range(policy.warmup):
        step(index)
    results: list[list[float]] = []
    while len(results) < policy.maximum:
        results.append(step(policy.warmup + len(results)))
        if len(results) < policy.minimum:
            continue
        totals = np.asarray([sum(laps) for laps in results])
        settled = totals.std(ddof=1) <= policy.relative_error * totals.mean() * np.sqrt(len(totals))
        if settled or time.perf_counter() - begun > policy.seconds:
            break
    return results
