"""All code that runs only where there is a CUDA device; everything else is tested on a CPU.

Kept apart, and short, because no test of a machine without a GPU reaches it: what stands here was checked by reading
FBGEMM's and torch's interfaces, and on a GPU by ``benchmarks/gpu/run_all.sh``.
"""

from __future__ import annotations

from typing import Any, Callable

import torch

_QUEUE_MS = 2.0  # device work queued ahead of a lap, so that the host has launched it before the device comes to it
_LEAST_FLUSH_BYTES = 1 << 26


class CudaStopwatch:
    """Laps by CUDA events on the current stream: time of the device, without waiting for the host.

    The L2 cache is flushed *on the device* before the first lap: a host-side flush would leave the weights of the
    previous repetition in L2. The flush is repeated until the queue is two milliseconds long, so that the laps hold no
    gaps in which the device waits for Python; :meth:`host_bound` tells where that was too short. What launching costs
    is measured on its own (:mod:`torchrec_neuroshard.measure.bandwidth`).
    """

    def __init__(self, device: torch.device) -> None:
        size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, _LEAST_FLUSH_BYTES)
        self._flush = torch.empty(size, dtype=torch.int8, device=device)
        self._device = device
        self._flush.zero_()
        one = launched_ms(lambda: [self._flush.zero_() for _ in range(8)], device) / 8
        self._flushes = max(1, round(_QUEUE_MS / max(one, 1e-3)))
        self._events: list[torch.cuda.Event] = []
        self._overtaken = False

    def start(self) -> None:
        """Flushes L2 and begins the first lap."""
        for _ in range(self._flushes):
            self._flush.zero_()
        self._events, self._overtaken = [], False
        self.lap()

    def lap(self) -> None:
        """Ends a lap and begins the next."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)
        self._overtaken |= len(self._events) > 1 and self._events[0].query()

    def laps_ms(self) -> list[float]:
        """Waits for the device and returns the laps since :meth:`start`."""
        torch.cuda.synchronize(self._device)
        return [a.elapsed_time(b) for a, b in zip(self._events, self._events[1:])]

    def host_bound(self) -> bool:
        """Whether the device had begun the first lap before the host had launched the last, and may have waited."""
        return self._overtaken


def device_name() -> str:
    """The current device's own name, for example "NVIDIA H200"."""
    return torch.cuda.get_device_name()


def device_count() -> int:
    """Devices of this host."""
    return torch.cuda.device_count()


def memory_bytes() -> int:
    """Memory of the current device."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def free_memory_bytes() -> int:
    """Memory of the current device that nothing has taken, what torch's allocator keeps for itself counted as free."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def fingerprint() -> dict[str, Any]:
    """What a record tells of the current device."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": properties.name,
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "gpu_l2_mib": round(properties.L2_cache_size / 2**20, 1),
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
    }


def use_device_of_rank(local_rank: int) -> torch.device:
    """Makes a rank's device the current one."""
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that was queued."""
    torch.cuda.synchronize(device)


def tbe_placement(location: str) -> tuple[Any, Any, dict[str, Any]]:
    """FBGEMM's location, compute device and further arguments of a fused TBE.

    Memory of the host is mapped, not managed: its pages never migrate.

    Args:
        location: one of :data:`torchrec_neuroshard.measure.specs.LOCATIONS`.
    """
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

    found = {
        "device": EmbeddingLocation.DEVICE,
        "managed": EmbeddingLocation.MANAGED,
        "managed_caching": EmbeddingLocation.MANAGED_CACHING,
    }[location]
    return found, ComputeDevice.CUDA, {} if location == "device" else {"uvm_host_mapped": True}


def pinned_buffer(size: int) -> torch.Tensor:
    """[size] bytes of page-locked host memory, which copy engines reach directly."""
    return torch.empty(size, dtype=torch.int8, pin_memory=True)


def launched_ms(work: Callable[[], object], device: torch.device) -> float:
    """Time from the call to the device's end of some work, its queue empty before: what launching it costs the host."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(begin.elapsed_time(end))
