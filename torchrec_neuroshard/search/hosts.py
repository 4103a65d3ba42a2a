"""On which hosts, or ranks, those tables lie that a sharding type keeps within a host."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    EVERYWHERE_TYPES,
    GRID_SHARD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    WIDTH_MULTIPLE,
    ShardingProblem,
    Spread,
)

# [tables] the type of each table that is to be spread, "" for others; "table_column_wise:4" for that many shards.
Kinds = tuple[str, ...]


def settle(problem: ShardingProblem, kinds: Kinds, weight: Sequence[float]) -> tuple[Spread | None, ...]:
    """Says where spread tables lie: heaviest first, each goes to the host with the least weight that has room.

    Args:
        problem: with nothing spread.
        kinds: the tables' types.
        weight: [tables] what each table costs.

    Returns:
        [tables] how each lies. Where a table fits on no host, it overfills one: the capacity left tells.
    """
    result = [Spread(kind) if kind in EVERYWHERE_TYPES else None for kind in kinds]
    chosen = [t for t, kind in enumerate(kinds) if kind and kind not in EVERYWHERE_TYPES]
    within = sorted(chosen, key=lambda t: (-weight[t], t))
    if not within:
        return tuple(result)
    hosts = _Hosts(problem, problem.spread_as(tuple(result)).cluster.capacity)
    for table in within:
        result[table] = hosts.place(table, kinds[table], float(weight[table]))
    return tuple(result)


def fills_ranks(problem: ShardingProblem, table: int, kind: str = ROW_WISE) -> bool:
    """Whether every rank gets rows where rows are cut; TorchRec 1.9 with FBGEMM 1.8 fails on a rank without."""
    rows, cluster = problem.tables[table].num_embeddings, problem.cluster
    ranks = cluster.world_size if kind == ROW_WISE else cluster.ranks_per_host
    return (ranks - 1) * -(-rows // ranks) < rows  # the blocks before the last one leave some (see row_blocks)


class _Hosts:
    """What is on the hosts so far."""

    def __init__(self, problem: ShardingProblem, capacity: NDArray[np.float64]) -> None:
        cluster = problem.cluster
        self._problem, self._size = problem, cluster.ranks_per_host
        used = cluster.hosts * self._size  # ranks of a host that is not full stay without
        self._free = capacity[:used].reshape(cluster.hosts, self._size, 2).astype(np.float64).copy()
        self._load = np.zeros((cluster.hosts, self._size))

    def place(self, table: int, kind: str, weight: float) -> Spread:
        """Puts a table on a host; one of columns on several ranks of it, one cut by grid on several hosts."""
        if kind.startswith(TABLE_COLUMN_WISE):
            return self._place_columns(table, weight, int(kind.partition(":")[2] or 1))
        if kind == COLUMN_WISE:
            return self._place_evenly(table, weight)
        dim = self._problem.tables[table].embedding_dim
        widths = grid_widths(self._problem, table) if kind == GRID_SHARD else (dim,)
        needed = self._memory(table, Spread(kind, tuple((width, 0) for width in widths)))
        pieces = []
        for width, piece in zip(widths, needed.reshape(len(widths), self._size, 2)):
            host = self._lightest((self._free >= piece).all(axis=(1, 2)), self._load.sum(axis=1))
            self._free[host] -= piece
            self._load[host] += weight * width / dim / self._size
            pieces.append((width, host * self._size))
        return Spread(kind, tuple(pieces))

    def _place_columns(self, table: int, weight: float, least: int) -> Spread:
        """The fewest equal column shards, but ``least``, that fit on ranks of one host."""
        cuts = _equal_widths(self._problem, table, self._size)
        spreads = [
            Spread(TABLE_COLUMN_WISE, tuple((width, 0) for width in widths))
            for widths in ([widths for widths in cuts if len(widths) >= least] or cuts[-1:])
        ]
        for spread in spreads:
            needed = self._memory(table, spread)[0]
            room = (self._free >= needed).all(axis=2)  # [hosts, ranks]
            fits = room.sum(axis=1) >= len(spread.pieces)
            if fits.any() or spread is spreads[-1]:
                break
        host = self._lightest(fits, self._load.sum(axis=1))
        order = np.lexsort((self._load[host], ~room[host]))[: len(spread.pieces)].tolist()
        for rank in order:
            self._free[host, rank] -= needed
            self._load[host, rank] += weight / len(spread.pieces)
        ranks = [host * self._size + rank for rank in order]
        return Spread(TABLE_COLUMN_WISE, tuple((width, rank) for (width, _), rank in zip(spread.pieces, ranks)))

    def _place_evenly(self, table: int, weight: float) -> Spread:
        """Equal column shards on the ranks with the least weight that have room, on a rank each while there are any."""
        width = self._problem.options[table].even_width
        count = self._problem.tables[table].embedding_dim // width
        needed = self._memory(table, Spread(COLUMN_WISE, ((width, 0),) * count))[0]
        free, load = self._free.reshape(-1, 2), self._load.reshape(-1)
        held = np.zeros(len(load), dtype=np.int64)
        for _ in range(count):
            rank = int(np.lexsort((load, held, ~(free >= needed).all(axis=1)))[0])
            free[rank] -= needed
            load[rank] += weight / count
            held[rank] += 1
        ranks = np.repeat(np.arange(len(held)), held).tolist()
        return Spread(COLUMN_WISE, tuple((width, rank) for rank in ranks))

    def _memory(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[blocks, 2] bytes; hosts are alike."""
        return self._problem.block_memory(table, spread)

    @staticmethod
    def _lightest(fits: Any, load: NDArray[np.float64]) -> int:
        return int(np.where(fits, load, np.inf).argmin()) if fits.any() else int(load.argmin())


def host_column_kinds(problem: ShardingProblem, table: int) -> list[str]:
    """The table's kinds of several column shards within a host, most shards first."""
    if TABLE_COLUMN_WISE not in problem.options[table].sharding_types:
        return []
    counts = [len(widths) for widths in _equal_widths(problem, table, problem.cluster.ranks_per_host)]
    return [f"{TABLE_COLUMN_WISE}:{count}" for count in reversed(counts) if count > 1]


def grid_widths(problem: ShardingProblem, table: int) -> tuple[int, ...]:
    """Columns of each piece of a grid-sharded table: equal pieces, one for each host where they are wide enough."""
    return list(_equal_widths(problem, table, problem.cluster.hosts))[-1]


def _equal_widths(problem: ShardingProblem, table: int, most: int) -> list[tuple[int, ...]]:
    """Cuts of a table into 1 to ``most`` equal column shards, each as wide as allowed."""
    dim, least = problem.tables[table].embedding_dim, problem.options[table].min_width
    counts = [
        count for count in range(1, most + 1) if dim % (count * WIDTH_MULTIPLE) == 0 and dim // count >= least
    ] or [1]
    return [(dim // count,) * count for count in counts]
