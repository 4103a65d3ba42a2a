"""Times what data sheets promise: copies within a device and over its host link, and what launching a TBE costs.

One figure of each goes on a cost model's card, and is compared there with the constants of
:mod:`torchrec_neuroshard.costs.hardware`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch

from torchrec_neuroshard import cuda
from torchrec_neuroshard.measure.batches import synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.tbe import build_tbe
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing, repeat, stopwatch

POLICY = RepetitionPolicy(warmup=3, minimum=7, maximum=15, seconds=1.0)

# A TBE with next to nothing to do: what is left is the launch.
LAUNCH_GROUP = GroupSpec(1, (ShardSpec(100, 4, 1.0, zipf=0.0),), fixed_length=True)


@dataclass(frozen=True)
class Bandwidth:
    """One figure of a device.

    Attributes:
        name: "copy" (within the device: bytes read plus bytes written), "host_to_device", "device_to_host" (page-locked
            memory where there is a GPU), "launch_forward" or "launch_backward".
        bytes: bytes that moved; 0 for a launch.
        timing: ms.
    """

    name: str
    bytes: int
    timing: Timing

    @property
    def gb_per_s(self) -> float | None:
        """GB/s; None for a launch."""
        return self.bytes / self.timing.median / 1e6 if self.bytes else None

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        speed = self.gb_per_s
        return {
            "name": self.name,
            "bytes": self.bytes,
            "gb_per_s": None if speed is None else round(speed, 3),
            "ms": self.timing.to_json(),
        }


def measure_bandwidths(device: torch.device, mebibytes: int, policy: RepetitionPolicy = POLICY) -> list[Bandwidth]:
    """Measures all figures of a device.

    Args:
        device: the device.
        mebibytes: size of the copies; far larger than any cache.
        policy: how often each is repeated.
    """
    size = mebibytes << 20
    source = torch.ones(size, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    host = cuda.pinned_buffer(size) if device.type == "cuda" else torch.ones(size, dtype=torch.int8)
    copies: list[tuple[str, int, Callable[[], object]]] = [
        ("copy", 2 * size, lambda: target.copy_(source)),
        ("host_to_device", size, lambda: target.copy_(host, non_blocking=True)),
        ("device_to_host", size, lambda: host.copy_(source, non_blocking=True)),
    ]
    watch = stopwatch(device)

    def timed(work: Callable[[], object]) -> Timing:
        def step(_: int) -> list[float]:
            watch.start()
            work()
            watch.lap()
            return watch.laps_ms()

        return Timing.of(np.asarray(repeat(step, policy))[:, 0])

    results = [Bandwidth(name, moved, timed(work)) for name, moved, work in copies]
    forward, backward = _launches(device, policy)
    return [*results, Bandwidth("launch_forward", 0, forward), Bandwidth("launch_backward", 0, backward)]


def _launches(device: torch.device, policy: RepetitionPolicy) -> tuple[Timing, Timing]:
    """Forward and backward of :data:`LAUNCH_GROUP`, the device's queue empty: the host's time counts too."""
    tbe = build_tbe(LAUNCH_GROUP, device)
    batch = synthesize_batch(LAUNCH_GROUP, np.random.default_rng(0)).to(device)
    clock = cuda.launched_ms if device.type == "cuda" else _called_ms

    def step(_: int) -> list[float]:
        outputs: list[torch.Tensor] = []
        forward = clock(lambda: outputs.append(tbe(batch.indices, batch.offsets)), device)
        gradient = torch.ones_like(outputs[0])
        return [forward, clock(lambda: outputs[0].backward(gradient), device)]

    laps = np.asarray(repeat(step, policy))
    return Timing.of(laps[:, 0]), Timing.of(laps[:, 1])


def _called_ms(work: Callable[[], object], device: torch.device) -> float:
    """Time of a call on a device that is done when the call returns."""
    watch = stopwatch(device)
    watch.start()
    work()
    watch.lap()
    return watch.laps_ms()[0]
