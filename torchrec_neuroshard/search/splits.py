"""Column splits: how each table is cut, independent of where the pieces go."""

from __future__ import annotations

from typing import Iterator

from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem

# [tables] widths of each table's column shards, in column order.
Splits = tuple[tuple[int, ...], ...]


def whole_tables(problem: ShardingProblem) -> Splits:
    """No table is split; those spread over all ranks have no column shards."""
    return tuple(
        () if problem.is_spread(index) else (table.embedding_dim,) for index, table in enumerate(problem.tables)
    )


def divide(width: int, min_width: int, share: float = 0.5) -> tuple[int, int] | None:
    """Cuts a width in two, the first piece about ``share`` of it; None where a piece would be too narrow.

    Both pieces are multiples of FBGEMM's :data:`WIDTH_MULTIPLE` and at least ``min_width`` wide.
    """
    floor = -(-min_width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    if width % WIDTH_MULTIPLE or width < 2 * floor:
        return None
    first = round(width * share / WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    first = min(max(first, floor), width - floor)
    return first, width - first


def split_table(problem: ShardingProblem, splits: Splits, table: int, share: float = 0.5) -> Splits | None:
    """Cuts the widest shard of a table in two; None where the table may not be split further.

    No rank holds two shards of a table, so there are never more shards than ranks.
    """
    if not problem.splittable(table) or len(splits[table]) >= problem.cluster.world_size:
        return None
    widths = list(splits[table])
    position = widths.index(max(widths))
    pieces = divide(widths[position], problem.options[table].min_width, share)
    if pieces is None:
        return None
    widths[position : position + 1] = pieces
    return (*splits[:table], tuple(widths), *splits[table + 1 :])


def shards_of(splits: Splits) -> Iterator[tuple[int, int, int]]:
    """(table, offset, width) of every shard, in canonical order."""
    for table, widths in enumerate(splits):
        offset = 0
        for width in widths:
            yield table, offset, width
            offset += width
