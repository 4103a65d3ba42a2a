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

TABLE_WISE = "table_wise"
COLUMN_WISE = "column_wise"
ROW_WISE = "row_wise"
DATA_PARALLEL = "data_parallel"

# Types whose shards a search places one by one, and those that spread a table over all ranks alike.
COLUMN_TYPES = (TABLE_WISE, COLUMN_WISE)
SPREAD_TYPES = (ROW_WISE, DATA_PARALLEL)

# FBGEMM needs shard widths that are multiples of this many columns.
WIDTH_MULTIPLE = 4

DATA_TYPE_BYTES = {"fp32": 4, "fp16": 2}


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

    @cached_property
    def distribution(self) -> AccessDistribution:
        """The access distribution, or the population default."""
        return self.access if self.access is not None else AccessDistribution.population(self.num_embeddings)

    @property
    def element_bytes(self) -> int:
        """Bytes of one weight."""
        return DATA_TYPE_BYTES[self.data_type]

    def group_key(self, sharding_type: str) -> tuple[str, ...]:
        """What shards on one rank must agree in for one TBE to serve them."""
        weighted = "weighted" if self.weighted else "unweighted"
        return (self.module, sharding_type, self.data_type, weighted, self.optimizer)


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
    """

    sharding_types: tuple[str, ...]
    min_width: int

    def __post_init__(self) -> None:
        if not self.sharding_types or set(self.sharding_types) - {*COLUMN_TYPES, *SPREAD_TYPES}:
            known = ", ".join((*COLUMN_TYPES, *SPREAD_TYPES))
            raise ValueError(f"sharding types must be some of {known}: {self.sharding_types}")

    @property
    def spread_types(self) -> tuple[str, ...]:
        """The allowed types that spread the table over all ranks."""
        return tuple(kind for kind in self.sharding_types if kind in SPREAD_TYPES)

    @property
    def has_columns(self) -> bool:
        """Whether the table may be placed as column shards (a whole table is one)."""
        return any(kind in COLUMN_TYPES for kind in self.sharding_types)


class ShardMemory(Protocol):
    """Bytes of one column shard: weights, optimizer state and buffers.

    One that is faster for many shards at once has a method ``prefetch`` too, which takes (table, width) pairs; one
    that knows what tables take when they are spread over all ranks has ``spread(table, sharding_type)``, which returns
    [ranks, 2] bytes.
    """

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """Returns (HBM bytes, DDR bytes) of a shard of ``width`` columns of table number ``table``."""
        ...


@dataclass(frozen=True)
class Shard:
    """A contiguous block of columns of one table on one rank."""

    table: int
    offset: int
    width: int
    rank: int


@dataclass(frozen=True)
class Placement:
    """A solution: every column of every table on exactly one rank, or the table on all of them.

    Attributes:
        shards: ordered by (table, offset); tables of :data:`SPREAD_TYPES` have none: row-wise ones are cut into equal
            blocks of rows, one on each rank, and data-parallel ones lie whole on every rank.
        sharding_types: [tables] the type each table is written as.
    """

    shards: tuple[Shard, ...]
    sharding_types: tuple[str, ...]


@dataclass(frozen=True)
class ShardingProblem:
    """Tables to be placed on a cluster.

    Attributes:
        tables: the tables.
        options: [tables] what a plan may do with each.
        cluster: the ranks.
        batch_size: samples per rank.
        memory: bytes of a shard.
        spread: [tables] the type of tables that are to be spread over all ranks, "" for others; () for none.
    """

    tables: tuple[Table, ...]
    options: tuple[TableOptions, ...]
    cluster: Cluster
    batch_size: int
    memory: ShardMemory
    spread: tuple[str, ...] = ()
    _memory_cache: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tables) != len(self.options):
            raise ValueError(f"{len(self.tables)} tables but {len(self.options)} options")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        if self.spread and len(self.spread) != len(self.tables):
            raise ValueError(f"{len(self.tables)} tables but {len(self.spread)} ways to spread them")

    def spread_as(self, spread: tuple[str, ...]) -> ShardingProblem:
        """The problem of placing the other tables, once these lie on all ranks and take their memory.

        Args:
            spread: [tables] a type of :data:`SPREAD_TYPES`, or "" for tables to be placed as columns.
        """
        if not any(spread):
            return self
        taken = np.sum([self.spread_memory(t, kind) for t, kind in enumerate(spread) if kind], axis=0)
        return replace(self, spread=spread, cluster=replace(self.cluster, capacity=self.cluster.capacity - taken))

    def spread_memory(self, table: int, sharding_type: str) -> NDArray[np.float64]:
        """[ranks, 2] bytes of HBM and DDR that a table takes when spread over all ranks.

        Raises:
            ValueError: the problem's memory does not know.
        """
        spread = getattr(self.memory, "spread", None)
        if spread is None:
            raise ValueError(f"{type(self.memory).__name__} does not tell what spread tables take")
        return np.asarray(spread(table, sharding_type), dtype=np.float64)

    def is_spread(self, table: int) -> bool:
        """Whether the table lies on all ranks, so that there is nothing to place."""
        return bool(self.spread) and bool(self.spread[table])

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
            if self.is_spread(index):
                types.append(self.spread[index])
                continue
            preferred, other = (COLUMN_WISE, TABLE_WISE) if table.module in split_modules else (TABLE_WISE, COLUMN_WISE)
            types.append(preferred if preferred in option.sharding_types else other)
        return tuple(types)

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
        """Distinct keys of fused groups, (module, sharding type, data type, weighted, optimizer), in a fixed order."""
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
        if self.is_spread(table):
            return (self.spread[table],)
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


def check_placement(problem: ShardingProblem, placement: Placement) -> list[str]:
    """Independent check of a placement; returns what is wrong with it (empty when nothing is).

    Each column of each table lies on exactly one rank, or the table on all, widths and types are allowed, memory
    suffices.
    """
    faults: list[str] = []
    used = np.zeros((problem.cluster.world_size, 2))
    columns: dict[int, int] = dict.fromkeys(range(len(problem.tables)), 0)
    pieces: dict[int, int] = dict.fromkeys(columns, 0)
    for shard in sorted(placement.shards, key=lambda s: (s.table, s.offset)):
        name = problem.tables[shard.table].name
        if shard.offset != columns[shard.table]:
            faults.append(f"{name}: shard at column {shard.offset}, expected {columns[shard.table]}")
        if not 0 <= shard.rank < problem.cluster.world_size:
            faults.append(f"{name}: rank {shard.rank} does not exist")
            continue
        if shard.width < problem.tables[shard.table].embedding_dim and (
            shard.width % WIDTH_MULTIPLE or shard.width < problem.options[shard.table].min_width
        ):
            faults.append(f"{name}: width {shard.width} is not allowed")
        columns[shard.table] = shard.offset + shard.width
        pieces[shard.table] += 1
        used[shard.rank] += problem.shard_memory(shard.table, shard.width)
    for index, table in enumerate(problem.tables):
        kind = placement.sharding_types[index]
        expected = 0 if kind in SPREAD_TYPES else table.embedding_dim
        if columns[index] != expected:
            faults.append(f"{table.name}: {columns[index]} of {expected} columns are placed")
        if kind in SPREAD_TYPES:
            used += problem.spread_memory(index, kind)
        if kind not in problem.options[index].sharding_types:
            faults.append(f"{table.name}: sharding type {kind} is not allowed")
        if kind == TABLE_WISE and pieces[index] > 1:
            faults.append(f"{table.name}: table_wise with {pieces[index]} shards")
    for rank in np.flatnonzero((used > problem.cluster.capacity * (1 + 1e-12)).any(axis=1)):
        faults.append(f"rank {rank}: {used[rank]} bytes used of {problem.cluster.capacity[rank]}")
    return faults
