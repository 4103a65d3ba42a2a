"""What a known optimum is, and how its tables may be cut.

The reference knows three ways to cut a table: whole, 1/2 + 1/2 and 3/4 + 1/4. A search that may cut more finely can
find better; so a reference is an upper bound of the true optimum over all column splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Iterator

from torchrec_neuroshard.problem import COLUMN_WISE, WIDTH_MULTIPLE, Placement, Shard, ShardingProblem

SHARES = ((1.0,), (0.5, 0.5), (0.75, 0.25))
PROVED = 1e-6  # relative distance to the bound within which an optimum counts as proved


@dataclass(frozen=True)
class Optimum:
    """The best placement of a problem, as far as it is known.

    Attributes:
        total_ms: cost of the placement; infinite where there is none.
        bound_ms: no placement costs less; infinite where it is proved that none fits in memory.
        placement: None where none fits, or none was found in time.
    """

    total_ms: float
    bound_ms: float
    placement: Placement | None

    @property
    def proved(self) -> bool:
        """Whether nothing better exists: the optimum, or that there is no placement, is certain."""
        return self.bound_ms >= self.total_ms * (1 - PROVED)


NO_PLACEMENT = Optimum(float("inf"), float("inf"), None)

# [tables] ways to cut each table: the widths of its shards.
Ways = tuple[tuple[tuple[int, ...], ...], ...]


def allowed_width(problem: ShardingProblem, table: int, width: int) -> bool:
    """Whether a plan may have a shard of ``width`` columns of the table."""
    options = problem.options[table]
    if width == problem.tables[table].embedding_dim:
        return True
    return COLUMN_WISE in options.sharding_types and width % WIDTH_MULTIPLE == 0 and width >= options.min_width


def reference_ways(problem: ShardingProblem) -> Ways:
    """The ways to cut tables that the reference knows and the problem allows."""
    return tuple(_reference_ways(problem, table) for table in range(len(problem.tables)))


def _reference_ways(problem: ShardingProblem, table: int) -> tuple[tuple[int, ...], ...]:
    dim = problem.tables[table].embedding_dim
    ways = []
    for shares in SHARES:
        widths = tuple(int(dim * share) for share in shares)
        if (
            len(widths) <= problem.cluster.world_size
            and sum(widths) == dim
            and all(allowed_width(problem, table, width) for width in widths)
        ):
            ways.append(widths)
    return tuple(ways)


def finer_ways(problem: ShardingProblem, parts: int) -> Ways:
    """The reference's ways, and all that cut each table into multiples of about ``1 / parts`` of its columns."""
    result = []
    for table, (of, known) in enumerate(zip(problem.tables, reference_ways(problem))):
        unit = WIDTH_MULTIPLE * max(1, round(of.embedding_dim / parts / WIDTH_MULTIPLE))
        ways = (
            widths
            for widths in _sums(of.embedding_dim, unit, of.embedding_dim, problem.cluster.world_size)
            if all(allowed_width(problem, table, width) for width in widths)
        )
        result.append(tuple(dict.fromkeys([*known, *ways])))
    return tuple(result)


def _sums(total: int, unit: int, most: int, count: int) -> Iterator[tuple[int, ...]]:
    """Falling numbers of at most ``most``, at most ``count`` of them and multiples of ``unit``, that give ``total``."""
    if total == 0:
        yield ()
    elif count:
        for first in range(min(most, total) // unit * unit, 0, -unit):
            for rest in _sums(total - first, unit, first, count - 1):
                yield (first, *rest)


def interchangeable_ranks(problem: ShardingProblem) -> bool:
    """Whether renumbering the ranks changes nothing: one host, equal memory."""
    cluster = problem.cluster
    return cluster.local_world_size == cluster.world_size and bool((cluster.capacity == cluster.capacity[0]).all())


def placement_from(problem: ShardingProblem, pieces: Iterable[tuple[int, int, int]]) -> Placement:
    """The placement of shards given as (table, width, rank); a table's columns are dealt out in that order."""
    columns = [0] * len(problem.tables)
    count = [0] * len(problem.tables)
    shards = []
    for table, width, rank in pieces:
        shards.append(Shard(table, columns[table], width, rank))
        columns[table] += width
        count[table] += 1
    shards.sort(key=lambda shard: (shard.table, shard.offset))
    return Placement(tuple(shards), problem.sharding_types([pieces > 1 for pieces in count]))
