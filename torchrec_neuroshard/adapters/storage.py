"""Memory by TorchRec's own rules: bytes of any column shard, and what a rank has left for shards."""

from __future__ import annotations

import copy
import math
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.shard_estimators import _get_optimizer_multipler as torchrec_optimizer_multiplier
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.adapters.compat import estimate
from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.sharding_plan import option_of_widths, spread_option
from torchrec_neuroshard.problem import DATA_PARALLEL, FUSED, UVM, UVM_CACHING, Cluster, Spread

_PERCENTAGE_RESERVATIONS = (FixedPercentageStorageReservation, HeuristicalStorageReservation)


class ShardStorage:
    """Bytes of a shard by TorchRec's storage estimator, plus what it overlooks.

    TorchRec's estimator sees an optimizer only when ``apply_optimizer_in_backward`` set it, not one in the
    sharder's fused params, and charges row-wise state once per table although every column shard keeps its own. It
    takes cache slots to be as wide as the table, when they are as wide as the widest table of the TBE.

    Args:
        tables: the tables.
        enumerator: its storage estimators are used.
        sharder_maps: what :func:`compat.sharder_maps` made of the sharders.
        batch_size: samples per rank.
        cluster: the ranks.
    """

    def __init__(
        self,
        tables: Sequence[ShardableTable],
        enumerator: Enumerator,
        sharder_maps: Mapping[str, Any],
        batch_size: int,
        cluster: Cluster,
    ) -> None:
        self._tables = tables
        self._enumerator = enumerator
        self._sharder_maps = dict(sharder_maps)
        self._batch_size = batch_size
        self._cluster = cluster
        self._cache_widths = _cache_widths(tables)
        self._spread: dict[tuple[int, Spread], NDArray[np.float64]] = {}
        self._known: dict[tuple[int, int], tuple[float, float]] = {}

    def with_kernels(self, kernels: tuple[tuple[str, float], ...]) -> ShardStorage:
        """The bytes of shards with these kernels, as ``ShardingProblem.with_kernels`` takes them."""
        other = copy.copy(self)
        other._tables = tuple(entry.with_kernel(*kernel) for entry, kernel in zip(self._tables, kernels))
        other._cache_widths = _cache_widths(other._tables)
        kept = {
            number
            for number, (old, new) in enumerate(zip(self._tables, other._tables))
            if old is new and new.table.kernel != UVM_CACHING
        }
        other._spread = {key: value for key, value in self._spread.items() if key[0] in kept}
        other._known = {key: value for key, value in self._known.items() if key[0] in kept}
        return other

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """Returns (HBM bytes, DDR bytes) of a shard of ``width`` columns of table number ``table``."""
        self.prefetch([(table, width)])
        return self._known[table, width]

    def prefetch(self, shards: Iterable[tuple[int, int]]) -> None:
        """Estimates shards, given as (table, width), in one go: TorchRec's estimator is slow to call."""
        widths: dict[int, list[int]] = {}
        for table, width in dict.fromkeys(shards):
            if (table, width) not in self._known:
                widths.setdefault(table, []).append(width)
        if not widths:
            return
        options = [option_of_widths(self._tables[table], wanted, self._batch_size) for table, wanted in widths.items()]
        self._estimate(options)
        for table, option in zip(widths, options):
            for shard in option.shards:
                assert shard.storage is not None  # estimated
                hbm, ddr = self._overlooked(table, shard.size[1], shard.size[0])
                self._known[table, shard.size[1]] = float(shard.storage.hbm + hbm), float(shard.storage.ddr + ddr)

    def spread(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[blocks, 2] bytes of HBM and DDR of a spread table; hosts are alike."""
        anywhere = Spread(spread.kind, tuple((width, 0) for width, _ in spread.pieces))
        if (table, anywhere) not in self._spread:
            option = spread_option(self._tables[table], anywhere, self._batch_size, self._cluster)
            self._estimate([option])
            rows = []
            for shard in option.shards:
                assert shard.storage is not None  # estimated
                hbm = ddr = 0
                if spread.kind != DATA_PARALLEL:  # the state of replicas is the dense optimizer's
                    hbm, ddr = self._overlooked(table, shard.size[1], shard.size[0])
                rows.append((float(shard.storage.hbm + hbm), float(shard.storage.ddr + ddr)))
            self._spread[table, anywhere] = np.asarray(rows)
        return self._spread[table, anywhere]

    def _estimate(self, options: list[ShardingOption]) -> None:
        """Lets TorchRec estimate the storage of the options' shards."""
        estimate(self._enumerator, EmbeddingStorageEstimator, options, self._sharder_maps)
        if any(shard.storage is None for option in options for shard in option.shards):
            raise ValueError(
                f"{type(self._enumerator).__name__} does not estimate storage; "
                "give an enumerator with an EmbeddingStorageEstimator"
            )

    def _overlooked(self, number: int, width: int, rows: int) -> tuple[int, int]:
        """(HBM, DDR) bytes of a shard that TorchRec's estimator does not charge: optimizer state, width of cache slots.

        Args:
            number: number of the table.
            width: columns of the shard.
            rows: its rows.
        """
        entry = self._tables[number]
        table, charged = entry.table, 0
        optimizer_class = getattr(entry.parameter, "_optimizer_classes", [None])[0]
        if optimizer_class is not None:
            multiplier = torchrec_optimizer_multiplier(optimizer_class, entry.parameter.shape)
            charged = math.ceil(rows * width * table.element_bytes * multiplier)
        state = entry.optimizer.state_bytes(rows, width)
        missing = max(0, state - charged)
        if table.kernel in (UVM, UVM_CACHING):
            # FBGEMM keeps row-wise state on the device (construct_split_state); TorchRec charges it to host memory.
            hbm, ddr = (0, missing) if entry.optimizer.elementwise else (state, 0)
            if table.kernel == UVM_CACHING:
                slots = math.ceil(table.load_factor * rows)
                hbm += slots * (self._cache_widths[number] - width) * table.element_bytes
            return hbm, ddr
        on_device = self._cluster.device != "cpu" and table.kernel == FUSED
        return (missing, 0) if on_device else (0, missing)


def _cache_widths(tables: Sequence[ShardableTable]) -> list[int]:
    """[tables] columns of a slot of the cache that serves each table: those of the widest cached table of its TBE.

    FBGEMM has one cache for a TBE. Where its widest table is cut, slots are narrower than this.
    """
    keys = [entry.table.group_key("") for entry in tables]
    widest: dict[tuple[str, ...], int] = {}
    for key, entry in zip(keys, tables):
        if entry.table.kernel == UVM_CACHING:
            widest[key] = max(widest.get(key, 0), entry.table.embedding_dim)
    return [widest.get(key, 0) for key in keys]


def reserved_topology(
    reservation: StorageReservation,
    topology: Topology,
    batch_size: int,
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    constraints: dict[str, ParameterConstraints] | None,
) -> Topology:
    """A copy of the topology with what the storage reservation leaves for shards.

    On a CPU topology the percentage of TorchRec's own reservations is taken off DDR, which they leave alone.

    Raises:
        PlannerError: the reservation alone exceeds the memory.
    """
    available = copy.deepcopy(topology)
    if topology.compute_device == "cpu" and type(reservation) in _PERCENTAGE_RESERVATIONS:
        # They take their share off HBM alone, which a CPU has none of; a subclass may know better.
        for device in available.devices:
            device.storage.ddr = int((1 - reservation._percentage) * device.storage.ddr)
    return reservation.reserve(
        topology=available,
        batch_size=batch_size,
        module=module,
        sharders=sharders,
        constraints=constraints,
    )


def capacity_of(topology: Topology) -> NDArray[np.float64]:
    """[ranks, 2] bytes of HBM and DDR of a topology's devices."""
    return np.asarray(
        [[max(0, device.storage.hbm), max(0, device.storage.ddr)] for device in topology.devices], dtype=np.float64
    )
