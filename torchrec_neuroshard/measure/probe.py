"""A fixed piece of work that tells whether the machine is disturbed while something is measured.

Shared machines slow down by factors, for seconds or for many minutes at a time. The probe gathers rows before and
after each measurement; how much slower it ran than it does when the machine is quiet is the measurement's
*disturbance*. Quiet is the lower quartile of all its runs, those of earlier records of the same store included: a
median of the recent past would take a slow quarter of an hour for the machine's usual state (seen: gathers four
times slower for ten minutes because of a neighbour on the host). Rows are drawn afresh from a table larger than
most caches, so that the probe runs alike after a pause and after a measurement.
"""

from __future__ import annotations

import time
from typing import Callable, Iterable, TypeVar

import numpy as np
import torch

from torchrec_neuroshard.measure.timing import stopwatch

DISTURBED = 1.6  # disturbance from which a measurement is not to be trusted

_ROWS, _DIM, _REPETITIONS = 1 << 19, 128, 5
_LOOKUPS = {"cpu": 8192, "cuda": 1 << 18}  # a few microseconds of a GPU would tell its clock, not a disturbance
_ROWS_PER_PAGE = 4096 // (4 * _DIM)
_QUIET_PERCENTILE = 25
_MINIMUM_HISTORY = 20
# Before each further try; what is recorded all the same says how disturbed it is. A GPU that idles slows down.
_PAUSES_SECONDS = {"cpu": (1.0,), "cuda": (0.0,)}

Result = TypeVar("Result")


class DisturbanceProbe:
    """Times a gather of fixed size from a 256 MiB table.

    Args:
        device: the device under measurement.
        history_ms: times of the probe on this machine that are known already.
    """

    def __init__(self, device: torch.device, history_ms: Iterable[float] = ()) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = device
        self._table = torch.rand(_ROWS, _DIM, generator=self._generator).to(device)
        self._watch = stopwatch(device)
        self._history = [*history_ms, *(self._time() for _ in range(_MINIMUM_HISTORY))]

    @property
    def quiet_ms(self) -> float:
        """Time that the probe takes when the machine is quiet."""
        return float(np.percentile(self._history, _QUIET_PERCENTILE))

    def disturbance(self) -> float:
        """Time of the probe now over that of a quiet machine."""
        now = self._time()
        self._history.append(now)
        return now / self.quiet_ms

    def undisturbed(self, measure: Callable[[], Result]) -> tuple[Result, float]:
        """Measures, again after a pause while the machine is disturbed, a few times at most.

        Returns:
            The result of the last try, and that try's disturbance.
        """
        for pause in (0.0, *_PAUSES_SECONDS[self._device.type]):
            time.sleep(pause)
            before = self.disturbance()
            result = measure()
            disturbance = max(before, self.disturbance())
            if disturbance <= DISTURBED:
                break
        return result, disturbance

    def _time(self) -> float:
        # Hosts of virtual machines take back pages that lie idle for seconds (seen: the first gather after a pause
        # of 5 s takes sixty times as long), so every page is touched before the clock runs.
        self._table[::_ROWS_PER_PAGE, 0].sum()
        times = []
        for _ in range(_REPETITIONS):
            rows = torch.randint(0, _ROWS, (_LOOKUPS[self._device.type],), generator=self._generator).to(self._device)
            self._watch.start()
            self._table.index_select(0, rows).sum()
            self._watch.lap()
            times += self._watch.laps_ms()
        return float(np.median(times))
