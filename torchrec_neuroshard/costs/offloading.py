"""What tables in host memory add to the sums of their fused group, beside what they would cost in device memory.

A group's extra time is a sum over its shards, but for what starting its prefetch takes, which counts once
(:mod:`torchrec_neuroshard.costs.host_memory`). So it is carried along with the sums that a cost model predicts from.
"""

from __future__ import annotations

from typing import Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.costs.hardware import HardwareSpec
from torchrec_neuroshard.costs.host_memory import host_memory_ms, prefetch_launch_ms
from torchrec_neuroshard.problem import UVM, UVM_CACHING, Table

EXTRAS = 3  # forward and backward ms without the start of a prefetch, and the number of cached shards


class HostMemory:
    """Prices the host memory of one kind of machine.

    Args:
        spec: the hardware; one without a host link has no tables in host memory.
    """

    def __init__(self, spec: HardwareSpec) -> None:
        self._spec = spec

    def contributions(self, tables: Sequence[Table], works: Sequence[ShardWork]) -> NDArray[np.float64]:
        """[shards, EXTRAS] what shards add.

        Args:
            tables: [shards] the table of each shard.
            works: [shards] what a TBE does for it.
        """
        result = np.zeros((len(works), EXTRAS))
        for row, table, work in zip(result, tables, works):
            if table.kernel not in (UVM, UVM_CACHING) or work.kernel == "dense":
                continue
            forward, backward = host_memory_ms(self._spec, [work], table.kernel, table.load_factor)
            if table.kernel == UVM_CACHING:
                row[:] = forward - prefetch_launch_ms(self._spec), backward, 1.0
            else:
                row[:2] = forward, backward
        return result

    def group_ms(self, extras: NDArray[np.float64]) -> NDArray[np.float64]:
        """[..., 2] forward and backward ms that groups take longer, from sums [..., EXTRAS]."""
        result = extras[..., :2].copy()
        result[..., 0] += np.where(extras[..., 2] > 0.5, prefetch_launch_ms(self._spec), 0.0)
        return result
