"""All CUDA-only code of the measuring room: event timing behind a flush of the L2 cache."""

from __future__ import annotations

import torch


class CudaStopwatch:
    """Laps by CUDA events on the current stream.

    The L2 cache is flushed *on the device* before the first lap: a host-side flush would leave the weights
    of the previous repetition in L2.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(2 * l2_bytes, 1 << 26), dtype=torch.int8, device=device)
        self._device = device
        self._events: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Flushes L2 and begins the first lap."""
        self._flush.zero_()
        self._events = []
        self.lap()

    def lap(self) -> None:
        """Ends a lap and begins the next."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def laps_ms(self) -> list[float]:
        """Waits for the device and returns the laps since :meth:`start`."""
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:])]
