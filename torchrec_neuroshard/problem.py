"""The sharding problem and its solutions as plain data, free of TorchRec.

Sizes are bytes, times are ms, batch sizes are samples. Arrays over ranks are written [ranks].
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Iterable, Protocol, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.layout import (
    COLUMN_TYPES,
    COLUMN_WISE,
    DATA_PARALLEL,
    EVERYWHERE_TYPES,
    GRID_SHARD,
    HOST_TYPES,
    ROW_TYPES,
    ROW_WISE,
    SPREAD_TYPES,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Block,
    Placement,
    Shard,
    Spread,
)

# FBGEMM needs shard widths that are multiples of this many columns.
WIDTH_MULTIPLE = 4

DATA_TYPE_BYTES = {"fp32": 4, "fp16": 2}

# Kernels of tables whose optimizer is fused: rows in the device's memory, in host memory, or there with a cache.
FUSED = "fused"
UVM = "fused_uvm"
UVM_CACHING = "fused_uvm_caching"
FUSED_KERNELS = (FUSED, UVM_CACHING, UVM)  # fastest first
# Rows in a store of their own, beyond host memory: no cost model covers it, and a search takes it as a last resort,
# where a constraint allows it.
KEY_VALUE = "key_value"
PLANNED_KERNELS = (*FUSED_KERNELS, KEY_VALUE)


class Pipeline(str, Enum):
    """How the training loop overlaps work, which decides where ranks wait for each other.

    Attributes:
        NONE: plain loop; the input all-to-all is a barrier, so forward and backward are waited for apart.
        SPARSE_DIST: ``TrainPipelineSparseDist``; a rank's backward and next forward are contiguous.
        PREFETCH: ``PrefetchTrainPipelineSparseDist``; waits as SPARSE_DIST does.
    """

    NONE = "none"
    SPARSE_DIST = "sparse_dist"
    PREFETCH = "prefetch"


@dataclass(frozen=True)
class Table:
    """One embedding table of the model.

    Attributes:
        name: unique name within the problem.
        num_embeddings: rows.
        embedding_dim: columns.
        pooling_factor: mean ids per sample, summed over all features of the table.
        num_features: features that look the table up; each adds one bag per sample.
        weighted: lookups carry per-sample weights.
        data_type: weight type, a key of :data:`DATA_TYPE_BYTES`.
        optimizer: optimizer fused into the backward pass: sgd, rowwise_adagrad, adagrad or adam.
        access: measured access distribution; None when unknown (the population default is used).
        module: path of the embedding module that holds the table; two modules never share a fused group.
        id_order: how ids lie, one of :data:`~torchrec_neuroshard.access.ID_ORDERS`; it decides what each block of
            rows sees.
        unpooled: every row looked up is returned (EmbeddingCollection), not one sum for each bag.
        kernel: where rows lie, one of :data:`FUSED_KERNELS`.
        load_factor: share of the rows that the cache of "fused_uvm_caching" holds; 0 for other kernels.
        wire_bytes: bytes of an embedding value in the output collectives, the mean of forward and backward.
        settings: kernel settings that all tables of a TBE share.
    """

    name: str
    num_embeddings: int
    embedding_dim: int
    pooling_factor: float = 1.0
    num_features: int = 1
    weighted: bool = False
    data_type: str = "fp32"
    optimizer: str = "sgd"
    access: AccessDistribution | None = None
    module: str = ""
    id_order: str = "scattered"
    unpooled: bool = False
    kernel: str = FUSED
    load_factor: float = 0.0
    wire_bytes: float = 4.0
    settings: str = ""

    @cached_property
    def distribution(self) -> AccessDistribution:
        """The access distribution, or the population default."""
        return self.access if self.access is not None else AccessDistribution.population(self.num_embeddings)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return DATA_TYPE_BYTES[self.data_type]

    @property
    def outputs(self) -> float:
        """Rows of the table's width that a sample gets: one for each bag, or for each id of an unpooled table.

        In fp32: half of one where values of two bytes travel.
        """
        return (self.pooling_factor if self.unpooled else float(self.num_features)) * self.wire_bytes / 4.0

    def group_key(self, sharding_type: str) -> tuple[str, ...]:
        """What shards on one rank must agree in for one TBE to serve them, wherever their rows lie."""
        weighted = "weighted" if self.weighted else "unweighted"
        family = FUSED if self.kernel in FUSED_KERNELS else self.kernel
        return (self.module, sharding_type, self.data_type, weighted, self.optimizer, family, self.settings)


@dataclass(frozen=True)
class Cluster:
    """The ranks that share the work.

    Attributes:
        world_size: number of ranks.
        local_world_size: ranks per host.
        device: "cuda" or "cpu".
        capacity: [ranks, 2] bytes of HBM and DDR that shards may use, after the storage reservation.
        hardware: name of a measured or preset machine (see :mod:`torchrec_neuroshard.costs.hardware`).
        intra_host_gbps: GB/s between two ranks of a host.
        inter_host_gbps: GB/s between two hosts, per rank.
        pipeline: how the training loop overlaps work.
    """

    world_size: int
    local_world_size: int
    device: str
    capacity: NDArray[np.float64]
    hardware: str = "generic_cpu"
    intra_host_gbps: float = 600.0
    inter_host_gbps: float = 12.5
    pipeline: Pipeline = Pipeline.SPARSE_DIST

    @property
    def ranks_per_host(self) -> int:
        """Ranks among which tables are cut that stay within a host, or within a pod of hosts, as TorchRec has it."""
        return self.local_world_size

    @property
    def hosts(self) -> int:
        """Full hosts; where ranks are left over, TorchRec's run time cuts no rows within hosts."""
        return self.world_size // self.ranks_per_host

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 1 <= self.local_world_size <= self.world_size:
            raise ValueError(
                f"need 1 <= local_world_size <= world_size, got {self.local_world_size} and {self.world_size}"
            )
        if self.capacity.shape != (self.world_size, 2):
            raise ValueError(f"capacity must be [{self.world_size} ranks, 2], got {self.capacity.shape}")


@dataclass(frozen=True)
class TableOptions:
    """What a plan may do with one table.

    Attributes:
        sharding_types: allowed types, a subset of :data:`COLUMN_TYPES` and :data:`SPREAD_TYPES`.
        min_width: narrowest column shard; the table's whole dim when it must not be split.
        kernels: allowed of :data:`PLANNED_KERNELS`.
        load_factor: share of the rows that a cache is to hold; None leaves it to the search.
        even_width: columns of each shard of a table that may only be cut into equal shards, which are then put on ranks
            before the search; 0 where cuts are free.
    """

    sharding_types: tuple[str, ...]
    min_width: int
    kernels: tuple[str, ...] = (FUSED,)
    load_factor: float | None = None
    even_width: int = 0

    def __post_init__(self) -> None:
        if not self.sharding_types or set(self.sharding_types) - {*COLUMN_TYPES, *SPREAD_TYPES}:
            known = ", ".join((*COLUMN_TYPES, *SPREAD_TYPES))
            raise ValueError(f"sharding types must be some of {known}: {self.sharding_types}")

    @property
    def spread_types(self) -> tuple[str, ...]:
        """The allowed types whose tables are not placed shard by shard."""
        even = (COLUMN_WISE,) if self.even_width else ()
        return tuple(kind for kind in self.sharding_types if kind in (*SPREAD_TYPES, *even))

    @property
    def has_columns(self) -> bool:
        """Whether the table may be placed as column shards (a whole table is one)."""
        return any(kind in COLUMN_TYPES and kind not in self.spread_types for kind in self.sharding_types)


class ShardMemory(Protocol):
    """Bytes of one column shard: weights, optimizer state and buffers.

    One that is faster for many shards at once has a method ``prefetch`` too, which takes (table, width) pairs; one
    that knows what spread tables take has ``spread(table, spread)``, which returns [blocks, 2] bytes of the blocks that
    ``ShardingProblem.blocks`` has; one that knows other kernels than "fused" has ``with_kernels(kernels)``, which takes
    and returns what ``ShardingProblem.with_kernels`` does.
    """

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """Returns (HBM bytes, DDR bytes) of a shard of ``width`` columns of table number ``table``."""
        ...


@dataclass(frozen=True)
class ShardingProblem:
    """Tables to be placed on a cluster.

    Attributes:
        tables: the tables.
        options: [tables] what a plan may do with each.
        cluster: the ranks.
        batch_size: samples per rank.
        memory: bytes of a shard.
        spread: [tables] how those tables lie that are not to be placed, None for others; () for none.
        occupied_ms: [ranks, 2] forward and backward that ranks spend on what is not planned here; None for nothing.
    """

    tables: tuple[Table, ...]
    options: tuple[TableOptions, ...]
    cluster: Cluster
    batch_size: int
    memory: ShardMemory
    spread: tuple[Spread | None, ...] = ()
    occupied_ms: NDArray[np.float64] | None = None
    _memory_cache: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.options):
            raise ValueError(f"{len(self.tables)} tables but {len(self.options)} options")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.spread and len(self.spread) != len(self.tables):
            raise ValueError(f"{len(self.tables)} tables but {len(self.spread)} ways to spread them")

    def spread_as(self, spread: tuple[Spread | None, ...]) -> ShardingProblem:
        """The problem of placing the other tables, once these lie somewhere and take their memory.

        Args:
            spread: [tables] how a table lies, or None for tables to be placed as columns.
        """
        if not any(spread):
            return self
        taken = np.sum([self.spread_memory(t, how) for t, how in enumerate(spread) if how], axis=0)
        return replace(self, spread=spread, cluster=replace(self.cluster, capacity=self.cluster.capacity - taken))

    def with_kernels(self, kernels: tuple[tuple[str, float], ...]) -> ShardingProblem:
        """The problem with these kernels.

        Args:
            kernels: [tables] (kernel, load factor) of each table; () leaves all as they are.

        Raises:
            ValueError: the problem's memory knows no other kernels.
        """
        if not kernels or kernels == self.kernels:
            return self
        with_kernels = getattr(self.memory, "with_kernels", None)
        if with_kernels is None:
            raise ValueError(f"{type(self.memory).__name__} does not tell what tables of other kernels take")
        tables = tuple(
            replace(table, kernel=kernel, load_factor=load_factor)
            for table, (kernel, load_factor) in zip(self.tables, kernels)
        )
        return replace(self, tables=tables, memory=with_kernels(kernels), _memory_cache={})

    @property
    def kernels(self) -> tuple[tuple[str, float], ...]:
        """[tables] (kernel, load factor) of each table."""
        return tuple((table.kernel, table.load_factor) for table in self.tables)

    def blocks(self, table: int, spread: Spread) -> tuple[Block, ...]:
        """The pieces of a spread table, in TorchRec's order of its shards."""
        of, cluster = self.tables[table], self.cluster
        return spread.blocks(of.num_embeddings, of.embedding_dim, cluster.world_size, cluster.ranks_per_host)

    def block_memory(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[blocks, 2] bytes of HBM and DDR that the blocks of a spread table take.

        Raises:
            ValueError: the problem's memory does not know.
        """
        of_blocks = getattr(self.memory, "spread", None)
        if of_blocks is None:
            raise ValueError(f"{type(self.memory).__name__} does not tell what spread tables take")
        return np.asarray(of_blocks(table, spread), dtype=np.float64)

    def spread_memory(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[ranks, 2] bytes of HBM and DDR that a spread table takes."""
        taken = np.zeros((self.cluster.world_size, 2))
        ranks = [block.rank for block in self.blocks(table, spread)]
        np.add.at(taken, ranks, self.block_memory(table, spread))
        return taken

    def is_spread(self, table: int) -> bool:
        """Whether it is settled where the table lies, so that there is nothing to place."""
        return bool(self.spread) and self.spread[table] is not None

    @property
    def placed_tables(self) -> tuple[int, ...]:
        """The tables that have to be placed."""
        return tuple(table for table in range(len(self.tables)) if not self.is_spread(table))

    @property
    def global_batch_size(self) -> int:
        """Samples that the TBE of a table-wise or column-wise shard sees: those of all ranks."""
        return self.batch_size * self.cluster.world_size

    def shard_memory(self, table: int, width: int) -> tuple[float, float]:
        """(HBM, DDR) bytes of a shard, memoised."""
        key = (table, width)
        if key not in self._memory_cache:
            self._memory_cache[key] = self.memory(table, width)
        return self._memory_cache[key]

    def prefetch_memory(self, shards: Iterable[tuple[int, int]]) -> None:
        """Tells that the bytes of these shards, given as (table, width), are going to be asked for."""
        prefetch = getattr(self.memory, "prefetch", None)
        if prefetch is not None:
            prefetch(shards)

    def splittable(self, table: int) -> bool:
        """Whether the table may be cut into two column shards or more."""
        return (
            not self.is_spread(table)
            and COLUMN_WISE in self.options[table].sharding_types
            and not self.options[table].even_width
            and (self.tables[table].embedding_dim >= 2 * self.options[table].min_width)
        )

    def sharding_types(self, split: Sequence[bool]) -> tuple[str, ...]:
        """[tables] the type to write each table as, given which tables are split.

        Each (module, sharding type) has its own TBE and its own collectives, so a plan that mixes table-wise
        and column-wise in one module pays for both. Unsplit tables are therefore written as one-shard
        column-wise in modules where some table is split, where their constraints allow it.
        """
        split_modules = {table.module for table, is_split in zip(self.tables, split) if is_split}
        types = []
        for index, (table, option) in enumerate(zip(self.tables, self.options)):
            spread = self.spread[index] if self.spread else None
            if spread is not None:
                types.append(spread.kind)
                continue
            preferred, other = (COLUMN_WISE, TABLE_WISE) if table.module in split_modules else (TABLE_WISE, COLUMN_WISE)
            types.append(preferred if preferred in option.sharding_types else other)
        return tuple(types)

    def placement(self, shards: tuple[Shard, ...], split: Sequence[bool]) -> Placement:
        """The placement of these shards, and of what is spread.

        Args:
            shards: ordered by (table, offset).
            split: [tables] whether a table is split.
        """
        return Placement(shards, self.sharding_types(split), self.spread if any(self.spread) else ())

    def groups_and_lookups(self, split: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """[tables] indices into :attr:`group_keys` and :attr:`lookup_keys`, given which tables are split."""
        modules, group, lookup = self._type_indices
        cut = np.zeros(int(modules.max(initial=-1)) + 1, dtype=bool)
        cut[modules[split]] = True
        preferred = cut[modules].astype(np.int64)  # columns are of table-wise and column-wise
        each = np.arange(len(modules))
        kind = np.where(group[each, preferred] >= 0, preferred, 1 - preferred)
        return group[each, kind], lookup[each, kind]

    @cached_property
    def _type_indices(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """[tables] module, and [tables, 2] group and lookup when table-wise and column-wise; -1 where not allowed."""
        order = {module: index for index, module in enumerate(dict.fromkeys(table.module for table in self.tables))}
        modules = np.asarray([order[table.module] for table in self.tables], dtype=np.int64)
        group = np.full((len(self.tables), 2), -1, dtype=np.int64)
        lookup = np.full_like(group, -1)
        for table in range(len(self.tables)):
            for column, kind in enumerate((TABLE_WISE, COLUMN_WISE)):
                if kind in self._types(table):
                    group[table, column] = self.group_of(table, kind)
                    lookup[table, column] = self.lookup_of(table, kind)
        return modules, group, lookup

    @cached_property
    def group_keys(self) -> tuple[tuple[str, ...], ...]:
        """Distinct keys of fused groups (see ``Table.group_key``), in a fixed order."""
        kinds = ((table, kind) for index, table in enumerate(self.tables) for kind in self._types(index))
        return tuple(sorted({table.group_key(kind) for table, kind in kinds}))

    @cached_property
    def lookup_keys(self) -> tuple[tuple[str, str], ...]:
        """Distinct (module, sharding type), in a fixed order: each has its own collectives."""
        kinds = ((table, kind) for index, table in enumerate(self.tables) for kind in self._types(index))
        return tuple(sorted({(table.module, kind) for table, kind in kinds}))

    @cached_property
    def _group_index(self) -> dict[tuple[str, ...], int]:
        return {key: index for index, key in enumerate(self.group_keys)}

    @cached_property
    def _groups_of_tables(self) -> dict[tuple[int, str], int]:
        return {
            (table, kind): self._group_index[self.tables[table].group_key(kind)]
            for table in range(len(self.tables))
            for kind in self._types(table)
        }

    @cached_property
    def _lookup_index(self) -> dict[tuple[str, str], int]:
        return {key: index for index, key in enumerate(self.lookup_keys)}

    def group_of(self, table: int, sharding_type: str) -> int:
        """Index into :attr:`group_keys` of the TBE that serves the table's shards."""
        return self._groups_of_tables[(table, sharding_type)]

    def lookup_of(self, table: int, sharding_type: str) -> int:
        """Index into :attr:`lookup_keys` of the lookup, and so the collectives, that serve the table."""
        return self._lookup_index[(self.tables[table].module, sharding_type)]

    def _types(self, table: int) -> tuple[str, ...]:
        """The types that the table's shards may be written as, given what is spread."""
        spread = self.spread[table] if self.spread else None
        if spread is not None:
            return (spread.kind,)
        return tuple(kind for kind in self.options[table].sharding_types if kind in COLUMN_TYPES)


class InfeasibleError(Exception):
    """No placement fits in memory within the allowed splits.

    Attributes:
        needed: (HBM, DDR) bytes that the tables need at least, or that the offending table needs.
        available: (HBM, DDR) bytes that there are.
        table: name of a table that can never fit, or None when only the total does not.
    """

    def __init__(
        self, message: str, needed: tuple[float, float], available: tuple[float, float], table: str | None = None
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available
        self.table = table


__all__ = [
    "Block",
    "COLUMN_TYPES",
    "COLUMN_WISE",
    "Cluster",
    "DATA_PARALLEL",
    "DATA_TYPE_BYTES",
    "EVERYWHERE_TYPES",
    "FUSED",
    "FUSED_KERNELS",
    "GRID_SHARD",
    "HOST_TYPES",
    "InfeasibleError",
    "KEY_VALUE",
    "PLANNED_KERNELS",
    "Pipeline",
    "Placement",
    "ROW_TYPES",
    "ROW_WISE",
    "SPREAD_TYPES",
    "Shard",
    "ShardMemory",
    "ShardingProblem",
    "Spread",
    "TABLE_COLUMN_WISE",
    "TABLE_ROW_WISE",
    "TABLE_WISE",
    "Table",
    "TableOptions",
    "UVM",
    "UVM_CACHING",
    "WIDTH_MULTIPLE",
]
