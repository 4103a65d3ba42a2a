"""A fixed piece of work that tells whether the machine is disturbed while something is measured.

Shared machines slow down by factors for seconds at a time. The probe gathers rows before and after each
measurement; how much slower it ran than it usually does is the measurement's *disturbance*. Rows are drawn
afresh from a table larger than any cache, so that the probe runs alike after a pause and after a measurement.
"""

from __future__ import annotations

import collections
import time
from typing import Callable, TypeVar

import numpy as np
import torch

from torchrec_neuroshard.measure.timing import stopwatch

DISTURBED = 1.8  # disturbance from which a measurement is not to be trusted

_ROWS, _DIM, _LOOKUPS, _REPETITIONS = 1 << 19, 128, 8192, 3
_HISTORY, _MINIMUM_HISTORY = 200, 20
_ATTEMPTS, _PAUSE_SECONDS = 4, 2.0

Result = TypeVar("Result")


class DisturbanceProbe:
    """Times a gather of fixed size from a 256 MiB table.

    Args:
        device: the device under measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = device
        self._table = torch.rand(_ROWS, _DIM, generator=self._generator).to(device)
        self._watch = stopwatch(device)
        self._history: collections.deque[float] = collections.deque(maxlen=_HISTORY)
        for _ in range(_MINIMUM_HISTORY):
            self._history.append(self._time())

    @property
    def usual_ms(self) -> float:
        """Time that the probe usually takes: the median of the recent past. It drifts as the machine does."""
        return float(np.median(self._history))

    def disturbance(self) -> float:
        """Time of the probe now over its usual time."""
        now = self._time()
        self._history.append(now)
        return now / self.usual_ms

    def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
        """Measures, again after a pause while the machine is disturbed, a few times at most.

        Returns:
            The result of the last try, and that try's disturbance.
        """
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_SECONDS)
            before = self.disturbance()
            result = measure()
            disturbance = max(before, self.disturbance())
            if disturbance <= DISTURBED:
                break
        return result, disturbance

    def _time(self) -> float:
        times = []
        for _ in range(_REPETITIONS):
            rows = torch.randint(0, _ROWS, (_LOOKUPS,), generator=self._generator).to(self._device)
            self._watch.start()
            self._table.index_select(0, rows).sum()
            self._watch.lap()
            times += self._watch.laps_ms()
        return min(times)
