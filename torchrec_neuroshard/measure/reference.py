"""Times of fixed lookups, by which records tell how fast the machine ran while they were taken.

A machine's speed drifts over hours (seen: the same groups 25 to 37 % faster six hours later, on a virtual machine
whose neighbours come and go), far more than a cost model's error. Each record therefore carries the times of a few
reference groups, measured right before and after it with the same kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.measure.batches import synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.tbe import build_tbe
from torchrec_neuroshard.measure.timing import stopwatch

# Changing one of these makes older times incomparable: give it another name then.
REFERENCE_GROUPS: dict[str, GroupSpec] = {
    "cached": GroupSpec(512, tuple(ShardSpec(2000, 64, 4.0, zipf=0.5) for _ in range(8)), fixed_length=True),
    "memory": GroupSpec(512, tuple(ShardSpec(250_000, 64, 4.0, zipf=0.0) for _ in range(2)), fixed_length=True),
}
# Order of a record's reference times wherever they are an array: forward and backward of each group.
REFERENCE_TIMES: tuple[str, ...] = tuple(f"{name}/{half}" for name in REFERENCE_GROUPS for half in ("fwd", "bwd"))

_REPETITIONS = 5
_BATCHES = 8
_FLOATS_PER_PAGE = 4096 // 4


class ReferenceProbe:
    """Times :data:`REFERENCE_GROUPS` on a device."""

    def __init__(self, device: torch.device) -> None:
        self._watch = stopwatch(device)
        self._step = 0
        self._groups = []
        for spec in REFERENCE_GROUPS.values():
            rng = np.random.default_rng(0)
            batches = [synthesize_batch(spec, rng).to(device) for _ in range(_BATCHES)]
            gradient = torch.ones(spec.batch_size, sum(shard.dim for shard in spec.shards), device=device)
            self._groups.append((build_tbe(spec, device), batches, gradient))
        self.times()  # the first runs load code and fault pages in

    def times(self) -> NDArray[np.float64]:
        """[repetitions, reference times] ms now."""
        laps: list[list[list[float]]] = []
        for tbe, batches, gradient in self._groups:
            for weight in tbe.parameters():  # pages that lay idle may be gone (see measure.probe)
                weight.view(-1)[::_FLOATS_PER_PAGE].sum()
            laps.append([])
            for _ in range(_REPETITIONS + 1):
                batch = batches[self._step % _BATCHES]
                self._step += 1
                self._watch.start()
                output = tbe(batch.indices, batch.offsets)
                self._watch.lap()
                output.backward(gradient)
                self._watch.lap()
                laps[-1].append(self._watch.laps_ms())
        return np.concatenate([np.asarray(group[1:]) for group in laps], axis=1)


def reference_json(times: NDArray[np.float64]) -> dict[str, Any]:
    """Medians of [repetitions, reference times] as a record holds them."""
    return dict(zip(REFERENCE_TIMES, np.median(times, axis=0).round(4).tolist()))


def reference_of(record: dict[str, Any]) -> NDArray[np.float64]:
    """[reference times] ms of a record; NaN where it has none."""
    found = record.get("reference_ms", {})
    return np.asarray([found.get(name, np.nan) for name in REFERENCE_TIMES], dtype=np.float64)
