"""Feasibility first: a placement that fits in memory, whatever it costs in time.

Three constructions are tried: size-first halving with first-fit-decreasing, which keeps shards few, then a
fill that cuts tables exactly to the space that is left, which packs almost to the last column, then an integer program.
"""

from __future__ import annotations

import heapq
from typing import Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.problem import (
    WIDTH_MULTIPLE,
    InfeasibleError,
    Placement,
    Shard,
    ShardingProblem,
)
from torchrec_neuroshard.search.packing import Packing, pack
from torchrec_neuroshard.search.splits import Splits, divide, shards_of, whole_tables

_MAX_PASSES = 40


def feasible_placement(problem: ShardingProblem, exact: bool = True) -> Placement:
    """Finds a placement that fits in memory.

    Args:
        problem: the tables and ranks.
        exact: where heuristics fail, solve an integer program too, which may take twenty seconds.

    Raises:
        InfeasibleError: none was found; carries the table or the totals, with bytes needed and available.
    """
    if not problem.placed_tables:
        _check_spread(problem)
        return problem.placement((), [False] * len(problem.tables))
    _check_bounds(problem)
    splits: Splits | None = whole_tables(problem)
    cuts = 1
    for _ in range(_MAX_PASSES):
        assert splits is not None
        ranks = first_fit_decreasing(problem, splits)
        if ranks is not None:
            return placement_of(problem, splits, ranks)
        splits = _halve_largest(problem, splits, cuts)
        if splits is None:
            break
        cuts += (cuts + 1) // 2  # ever more cuts a pass: packing again is what takes time
    filled = _fill(problem)
    if filled is not None:
        return filled
    packing = pack(problem) if exact else Packing(None, False)
    if packing.pieces is not None:
        return _placement_of_pieces(problem, packing.pieces)
    raise _infeasible(problem, packing.impossible)


def placement_of(problem: ShardingProblem, splits: Splits, ranks: NDArray[np.int64]) -> Placement:
    """Builds a placement from splits and the [shards] ranks of :func:`shards_of` order."""
    shards = tuple(
        Shard(table, offset, width, int(rank)) for (table, offset, width), rank in zip(shards_of(splits), ranks)
    )
    return problem.placement(shards, [len(widths) > 1 for widths in splits])


def first_fit_decreasing(problem: ShardingProblem, splits: Splits) -> NDArray[np.int64] | None:
    """[shards] ranks by first-fit-decreasing on the scarcer memory; None where something does not fit."""
    shards = list(shards_of(splits))
    memory = np.asarray([problem.shard_memory(table, width) for table, _, width in shards])
    free = problem.cluster.capacity.astype(np.float64).copy()
    size = _relative_size(problem, memory)
    ranks = np.full(len(shards), -1, dtype=np.int64)
    holders: dict[int, list[int]] = {}  # no rank holds two shards of a table
    for index in sorted(range(len(shards)), key=lambda i: (-size[i], i)):
        usable = (free >= memory[index]).all(axis=1)
        usable[holders.setdefault(shards[index][0], [])] = False
        fits = np.flatnonzero(usable)
        if not fits.size:
            return None
        ranks[index] = fits[0]
        holders[shards[index][0]].append(int(fits[0]))
        free[fits[0]] -= memory[index]
    return ranks


def _relative_size(problem: ShardingProblem, memory: NDArray[np.float64]) -> NDArray[np.float64]:
    """[shards] the larger share of total HBM or DDR that each shard takes."""
    total = np.maximum(problem.cluster.capacity.sum(axis=0), 1.0)
    return (memory / total).max(axis=1)


def _halve_largest(problem: ShardingProblem, splits: Splits, cuts: int) -> Splits | None:
    """Halves the shard that takes the most memory, ``cuts`` times over; None where nothing can be halved."""
    total = np.maximum(problem.cluster.capacity.sum(axis=0), 1.0).tolist()

    def entry(table: int, position: int, width: int) -> tuple[float, int, int, int]:
        memory = problem.shard_memory(table, width)
        return -max(memory[0] / total[0], memory[1] / total[1]), table, position, width

    widths = [list(shards) for shards in splits]
    heap = [
        entry(table, position, width)
        for table, shards in enumerate(widths)
        if problem.splittable(table)
        for position, width in enumerate(shards)
    ]
    heapq.heapify(heap)
    done = 0
    while heap and done < cuts:
        _, table, position, width = heapq.heappop(heap)
        pieces = divide(width, problem.options[table].min_width)
        if pieces is None or len(widths[table]) >= problem.cluster.world_size:
            continue
        # The second piece goes to the end: the order of a table's columns is free, other positions stay valid.
        widths[table][position] = pieces[0]
        widths[table].append(pieces[1])
        heapq.heappush(heap, entry(table, position, pieces[0]))
        heapq.heappush(heap, entry(table, len(widths[table]) - 1, pieces[1]))
        done += 1
    return tuple(tuple(shards) for shards in widths) if done else None


def _fill(problem: ShardingProblem) -> Placement | None:
    """Places unsplittable tables first, then cuts the others to the space that is left."""
    free = problem.cluster.capacity.astype(np.float64).copy()
    pieces: dict[int, list[tuple[int, int]]] = {}  # table -> (width, rank) in column order
    placed = problem.placed_tables
    memory = np.asarray([problem.shard_memory(t, problem.tables[t].embedding_dim) for t in placed])
    sizes = dict(zip(placed, _relative_size(problem, memory)))
    order = sorted(placed, key=lambda t: (problem.splittable(t), -sizes[t], t))
    for table in order:
        left = problem.tables[table].embedding_dim
        pieces[table] = []
        while left:
            width, rank = _widest_piece(problem, table, left, free, {rank for _, rank in pieces[table]})
            if width == 0:
                return None
            free[rank] -= problem.shard_memory(table, width)
            pieces[table].append((width, rank))
            left -= width
    return _placement_of_pieces(problem, [pieces.get(t, []) for t in range(len(problem.tables))])


def _placement_of_pieces(problem: ShardingProblem, pieces: list[list[tuple[int, int]]]) -> Placement:
    """Builds a placement from each table's (width, rank) in column order."""
    splits = tuple(tuple(width for width, _ in of_table) for of_table in pieces)
    ranks = np.asarray([rank for of_table in pieces for _, rank in of_table], dtype=np.int64)
    return placement_of(problem, splits, ranks)


def _widest_piece(
    problem: ShardingProblem, table: int, left: int, free: NDArray[np.float64], taken: set[int]
) -> tuple[int, int]:
    """The whole rest on the tightest rank that holds it, else the widest piece that any rank holds.

    Ranks in ``taken`` hold a piece of the table already.
    """
    whole = np.flatnonzero((free >= problem.shard_memory(table, left)).all(axis=1))
    whole = whole[~np.isin(whole, sorted(taken))]
    if whole.size:
        slack = (free[whole] - problem.shard_memory(table, left)).sum(axis=1)
        return left, int(whole[np.argmin(slack)])
    if not problem.splittable(table):
        return 0, -1
    floor = -(-problem.options[table].min_width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    width = left - floor
    best = (0, -1)
    for rank in sorted(set(range(len(free))) - taken):
        low, high = 0, max(width, 0) // WIDTH_MULTIPLE
        while low < high:  # bytes grow with the width
            middle = (low + high + 1) // 2
            if (np.asarray(problem.shard_memory(table, middle * WIDTH_MULTIPLE)) <= free[rank]).all():
                low = middle
            else:
                high = middle - 1
        if low * WIDTH_MULTIPLE >= floor and low * WIDTH_MULTIPLE > best[0]:
            best = (low * WIDTH_MULTIPLE, rank)
    return best


def least_width(problem: ShardingProblem, table: int) -> int:
    """Columns of the narrowest shard that the table may be cut into."""
    width = problem.tables[table].embedding_dim
    if problem.splittable(table):
        width = min(width, -(-problem.options[table].min_width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    return width


def fitting_nowhere(
    problem: ShardingProblem, tables: Iterable[int], capacity: NDArray[np.float64] | None = None
) -> list[int]:
    """Those of some tables of which no rank holds even the narrowest column shard.

    Args:
        problem: the tables and ranks.
        tables: what to look at.
        capacity: [ranks, 2] bytes in place of the problem's.

    """
    room = problem.cluster.capacity if capacity is None else capacity
    left = list(tables)
    # Wider shards take more memory: where the whole table fits, which is estimated anyway, the narrowest need not be.
    for width in (lambda t: problem.tables[t].embedding_dim, lambda t: least_width(problem, t)):
        problem.prefetch_memory((t, width(t)) for t in left)
        left = [t for t in left if not (room >= problem.shard_memory(t, width(t))).all(axis=1).any()]
    return left


def _check_bounds(problem: ShardingProblem) -> None:
    """Raises where a single table or the total cannot fit, however it is cut."""
    _check_spread(problem)
    capacity = problem.cluster.capacity
    for index in fitting_nowhere(problem, problem.placed_tables):
        table = problem.tables[index]
        least = np.asarray(problem.shard_memory(index, least_width(problem, index)))
        best = capacity[np.argmax((capacity - least).min(axis=1))]
        raise InfeasibleError(
            f"table {table.name!r} does not fit on any rank even in its narrowest allowed shard: "
            f"it needs {_gib(least)}, the roomiest rank has {_gib(best)}",
            (float(least[0]), float(least[1])),
            (float(best[0]), float(best[1])),
            table.name,
        )
    # Whole tables need the least in total: each further shard repeats the input buffers.
    needed = _whole_bytes(problem)
    available = np.maximum(capacity, 0.0).sum(axis=0)
    if (needed > available).any():
        raise InfeasibleError(
            f"the tables need {_gib(needed)} in all, the {len(capacity)} ranks have {_gib(available)}",
            (float(needed[0]), float(needed[1])),
            (float(available[0]), float(available[1])),
        )


def _whole_bytes(problem: ShardingProblem) -> NDArray[np.float64]:
    """[2] bytes of all tables that have to be placed, whole."""
    shards = ((t, problem.tables[t].embedding_dim) for t in problem.placed_tables)
    total: NDArray[np.float64] = np.sum([problem.shard_memory(*shard) for shard in shards], axis=0)
    return total


def _check_spread(problem: ShardingProblem) -> None:
    """Raises where the tables spread over all ranks alone take more than some rank has."""
    short = problem.cluster.capacity.min(axis=0)
    if (short < 0).any():
        missing = np.maximum(-short, 0.0)
        raise InfeasibleError(
            f"the tables that lie on all ranks take {_gib(missing)} more than a rank has",
            (float(missing[0]), float(missing[1])),
            (0.0, 0.0),
        )


def _infeasible(problem: ShardingProblem, proved: bool) -> InfeasibleError:
    needed = _whole_bytes(problem)
    available = problem.cluster.capacity.sum(axis=0)
    # The program packs columns; where tables may lie on all ranks instead, it proves nothing about them.
    proved = proved and not any(problem.options[t].spread_types for t in problem.placed_tables)
    found = "there is no way (an integer program proves it)" if proved else "found no way"
    return InfeasibleError(
        f"{found} to pack the tables: they need {_gib(needed)}, the ranks have {_gib(available)} in all, but "
        "not in pieces that hold the shards; allow narrower column shards (column_split='any', min_partition) or "
        "give more memory",
        (float(needed[0]), float(needed[1])),
        (float(available[0]), float(available[1])),
    )


def _gib(memory: NDArray[np.float64]) -> str:
    return " and ".join(
        f"{amount / 2**30:.3f} GiB {kind}" for amount, kind in zip(memory, ("HBM", "DDR")) if amount > 0
    ) or "0 GiB"  # fmt: skip
