"""Analytic cost of embedding rows that live in host memory: kernels ``fused_uvm`` and ``fused_uvm_caching``.

FBGEMM's kernels read and write such rows in place over the host link, row by row (the memory is mapped, pages do not
migrate). What counts is the rate at which a GPU's multiprocessors reach host memory, less than what its copy engines
reach. ``fused_uvm`` moves each distinct row of a batch over the link, in the forward and, with its optimizer state both
ways, in the backward; repeated lookups are served by the GPU's L2. ``fused_uvm_caching`` prefetches the rows that its
LRU cache in HBM lacks and writes evicted ones back, so that forward and backward find all rows in HBM; optimizer state
stays in host memory, uncached, but for that of row-wise optimizers, which FBGEMM keeps on the device
(``construct_split_state``).

What an LRU cache lacks follows from the access distribution: a cache of C rows holds the rows of the last T lookups,
T being how many lookups it takes to see C distinct rows [Fagin1977asymptotic], [Che2002hierarchical].

No constant here was fitted to a time of a UVM lookup. Link rates are nvbandwidth results (their sources stand in
:mod:`.hardware`); the bytes of a prefetch are counted from its steps. Held out are the six UVM figures of
NVIDIA/recsys-examples (dynamicemb benchmark, H100, 10 tables of 26.8 million rows): forward 7.93 and 3.36 ms (without
and with cache), backward 5.63 and 0.788 ms with SGD, 16.1 and 11.0 ms with Adam. The tests hold the predictions to
within 30 % of each. Of a later run of that benchmark (jiashuy/recsys-examples, one table of 268 million rows, GPU not
named) both forward figures are underestimated by more: 5.5 for 7.97 and 2.3 for 3.62 ms. With its cache warm a forward
took 2.4 ms there, so a prefetch may cost more, and its misses less, than assumed.

References:
    [Fagin1977asymptotic] R. Fagin. Asymptotic miss ratios over independent references. JCSS 14(2), 1977.
    [Che2002hierarchical] H. Che, Y. Tung, Z. Wang. Hierarchical web caching systems: modeling, design and
        experimental results. IEEE JSAC 20(7), 2002.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.costs.hardware import GATHER_EFFICIENCY, HardwareSpec
from torchrec_neuroshard.problem import UVM, UVM_CACHING

# A prefetch makes ids of all tables distinct keys, drops repeated ones, looks them up, sorts the missing ones by cache
# set, inserts those, and looks up every id's slot: that many passes of the launch cost of a TBE.
_PREFETCH_PASSES = 6
# HBM bytes per id: 8 passes of a radix sort read and write a key of 8 and a position of 4 bytes; then the 32 tags of 8
# bytes of a cache set are read.
_PREFETCH_BYTES = 8 * 2 * (8 + 4) + 32 * 8
_SECTOR_BYTES = 32  # least that crosses the link for a row's optimizer state


def missed_rows(access: AccessDistribution, lookups: float, cache_rows: float) -> float:
    """Distinct rows of a batch that an LRU cache lacks, in expectation and long after its start.

    Args:
        access: how lookups spread over the rows; batches are independent draws.
        lookups: ids in a batch.
        cache_rows: rows that the cache holds.
    """
    if cache_rows >= access.counts.sum() * (1.0 - 1e-9):
        return 0.0
    remembered = remembered_lookups(access, cache_rows)
    return access.expected_unique(remembered + lookups) - access.expected_unique(remembered)


def remembered_lookups(access: AccessDistribution, cache_rows: float) -> float:
    """Lookups whose rows an LRU cache of ``cache_rows`` rows holds: it takes so many to see so many distinct rows."""
    if cache_rows <= 1:
        return 0.0
    low, high = 0.0, 60.0  # log2 of the lookups
    for _ in range(40):
        middle = (low + high) / 2
        if access.expected_unique(2.0**middle) < cache_rows:
            low = middle
        else:
            high = middle
    return float(2.0**low)


def host_memory_ms(
    spec: HardwareSpec, shards: Sequence[ShardWork], kernel: str, load_factor: float = 0.2
) -> tuple[float, float]:
    """What a fused group's forward and backward cost more, in ms, than if its rows lay in the GPU's memory.

    Args:
        spec: the hardware.
        shards: the shards of the group.
        kernel: "fused_uvm" or "fused_uvm_caching".
        load_factor: share of each shard's rows that the cache holds (TorchRec's default 0.2); unused without cache.

    Raises:
        ValueError: another kernel, or hardware without a host link.
    """
    if kernel not in (UVM, UVM_CACHING):
        raise ValueError(f"kernel must be {UVM} or {UVM_CACHING}, got {kernel!r}")
    if spec.host_read_gbps <= 0 or spec.host_write_gbps <= 0:
        raise ValueError(f"a {spec.device} device reaches host memory over no link: it has no {kernel}")
    return host_traffic(shards, kernel, load_factor).milliseconds(spec)


@dataclass(frozen=True)
class HostTraffic:
    """What a group's rows in host memory ask of the link and, where they are cached, of the prefetch.

    Attributes:
        read_bytes: read in the forward.
        exchanged_bytes: (forward, backward) read and written as well.
        prefetched_ids: ids that a prefetch sorts; 0 without a cache.
        cached: whether there is a prefetch.
    """

    read_bytes: float
    exchanged_bytes: tuple[float, float]
    prefetched_ids: float
    cached: bool

    def milliseconds(self, spec: HardwareSpec) -> tuple[float, float]:
        """Further ms of forward and backward on a kind of hardware."""
        forward, backward = (_exchange_ms(spec, size) for size in self.exchanged_bytes)
        forward += self.read_bytes / spec.host_read_gbps * 1e-6
        if self.cached:
            forward += prefetch_launch_ms(spec)
            forward += self.prefetched_ids * _PREFETCH_BYTES / (spec.memory_gbps * GATHER_EFFICIENCY) * 1e-6
        return forward, backward


def host_traffic(shards: Sequence[ShardWork], kernel: str, load_factor: float) -> HostTraffic:
    """What a group's rows in host memory move; arguments as of :func:`host_memory_ms`."""
    lookups = np.asarray([shard.batch_size * shard.pooling_factor for shard in shards])
    unique = np.asarray([shard.access.expected_unique(ids) for shard, ids in zip(shards, lookups)])
    row_bytes = np.asarray([shard.dim * shard.element_bytes for shard in shards])
    state_bytes = np.asarray([_state_bytes(shard) for shard in shards])
    if kernel == UVM:
        return HostTraffic(float(unique @ row_bytes), (0.0, float(unique @ (row_bytes + state_bytes))), 0.0, False)
    missed = np.asarray(
        [missed_rows(s.access, ids, load_factor * float(s.access.counts.sum())) for s, ids in zip(shards, lookups)]
    )
    return HostTraffic(0.0, (float(missed @ row_bytes), float(unique @ state_bytes)), float(lookups.sum()), True)


def prefetch_launch_ms(spec: HardwareSpec) -> float:
    """What starting a group's prefetch takes, however many ids there are; part of :func:`host_memory_ms`'s forward."""
    return _PREFETCH_PASSES * spec.launch_ms


def _exchange_ms(spec: HardwareSpec, size: float) -> float:
    """ms to read ``size`` bytes from host memory and write as many to it: the link carries both ways at once."""
    return size / min(spec.host_read_gbps, spec.host_write_gbps) * 1e-6


def _state_bytes(shard: ShardWork) -> float:
    """Bytes of a row's optimizer state in host memory, which is fp32."""
    whole = {"sgd": 0.0, "rowwise_adagrad": 0.0, "adagrad": 4.0 * shard.dim, "adam": 8.0 * shard.dim}[shard.optimizer]
    return max(whole, _SECTOR_BYTES) if whole else 0.0
