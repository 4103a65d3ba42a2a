"""Where tables lie: column shards placed one by one, or pieces whose ranks follow from their sharding type.

Sharding types and their names are TorchRec's. A row-wise table has a block of its rows on every rank, a table-row-wise
one on every rank of one host, and grid sharding cuts columns first and gives each piece to a host; a data-parallel
table lies whole on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

TABLE_WISE = "table_wise"
COLUMN_WISE = "column_wise"
ROW_WISE = "row_wise"
DATA_PARALLEL = "data_parallel"
TABLE_ROW_WISE = "table_row_wise"
TABLE_COLUMN_WISE = "table_column_wise"
GRID_SHARD = "grid_shard"

# Types whose shards a search places one by one; types whose tables lie on all ranks, or on all ranks of a host; and
# types that lie where they are put before the search.
COLUMN_TYPES = (TABLE_WISE, COLUMN_WISE)
EVERYWHERE_TYPES = (ROW_WISE, DATA_PARALLEL)
HOST_TYPES = (TABLE_ROW_WISE, GRID_SHARD, TABLE_COLUMN_WISE)
SPREAD_TYPES = (*EVERYWHERE_TYPES, *HOST_TYPES)
# Types that cut rows into blocks.
ROW_TYPES = (ROW_WISE, TABLE_ROW_WISE, GRID_SHARD)


@dataclass(frozen=True)
class Shard:
    """A contiguous block of columns of one table on one rank."""

    table: int
    offset: int
    width: int
    rank: int


@dataclass(frozen=True)
class Block:
    """A piece of a table on one rank.

    Attributes:
        rank: the rank.
        first_row, rows: its rows; a block of rows may be empty.
        offset, width: its columns.
    """

    rank: int
    first_row: int
    rows: int
    offset: int
    width: int


@dataclass(frozen=True)
class Spread:
    """How a table lies that is not placed shard by shard.

    Attributes:
        kind: its sharding type.
        pieces: (columns, rank) of each piece of columns, in column order; the rank is the first of the host for the
            types that cut a piece's rows among the ranks of a host. () for tables on all ranks.
    """

    kind: str
    pieces: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if (self.kind in EVERYWHERE_TYPES) == bool(self.pieces):
            raise ValueError(f"{self.kind} with pieces {self.pieces}: only tables on all ranks have none")

    def blocks(self, rows: int, dim: int, world_size: int, ranks_per_host: int) -> tuple[Block, ...]:
        """The table's shards in TorchRec's order: by piece, then by rank.

        Args:
            rows: rows of the table.
            dim: its columns.
            world_size: ranks.
            ranks_per_host: ranks among which host types cut rows.
        """
        if self.kind == DATA_PARALLEL:
            return tuple(Block(rank, 0, rows, 0, dim) for rank in range(world_size))
        if self.kind == ROW_WISE:
            return _row_cut(rows, 0, dim, 0, world_size)
        result: list[Block] = []
        offset = 0
        for width, rank in self.pieces:
            if self.kind in ROW_TYPES:
                result += _row_cut(rows, offset, width, rank, ranks_per_host)
            else:
                result.append(Block(rank, 0, rows, offset, width))
            offset += width
        return tuple(result)


@dataclass(frozen=True)
class Placement:
    """A solution: every column of every table on exactly one rank, or the table spread.

    Attributes:
        shards: ordered by (table, offset); spread tables have none.
        sharding_types: [tables] the type each table is written as.
        spread: [tables] how those tables lie that have no shards, None for others; () where the types alone say it,
            because no table lies on ranks of its own choice.
        kernels: [tables] (kernel, load factor) of each table; () where they are as the problem has them.
    """

    shards: tuple[Shard, ...]
    sharding_types: tuple[str, ...]
    spread: tuple[Spread | None, ...] = ()
    kernels: tuple[tuple[str, float], ...] = ()

    @cached_property
    def spreads(self) -> tuple[Spread | None, ...]:
        """[tables] how the tables lie that have no shards; None for others."""
        if self.spread:
            return self.spread
        return tuple(Spread(kind) if kind in EVERYWHERE_TYPES else None for kind in self.sharding_types)


def row_blocks(rows: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """[ranks] (first row, row behind the last) of each rank's block; empty blocks are (rows, rows).

    TorchRec's run time takes for granted that blocks have exactly ``ceil(rows / ranks)`` rows; the last block that has
    any is smaller, and those behind it are empty (TorchRec issue 1861: any other cut is silently wrong).

    Args:
        rows: rows of the table.
        ranks: ranks that share them; for types that stay within a host those of the host.
    """
    if rows < 1 or ranks < 1:
        raise ValueError(f"need at least one row and one rank, got {rows} and {ranks}")
    size = -(-rows // ranks)
    return tuple((min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks))


def _row_cut(rows: int, offset: int, width: int, first_rank: int, ranks: int) -> tuple[Block, ...]:
    return tuple(
        Block(first_rank + index, first, last - first, offset, width)
        for index, (first, last) in enumerate(row_blocks(rows, ranks))
    )
