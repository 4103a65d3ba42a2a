"""Packing as an integer program, for memory so tight that heuristics fail: finds a placement, or proves there is none.

Each splittable table gives some units of columns to some ranks; a shard takes bytes for being there and bytes per
unit. HiGHS [Huangfu2018highs] solves it.

References:
    [Huangfu2018highs] Q. Huangfu, J. A. J. Hall. Parallelizing the dual revised simplex method. Mathematical
        Programming Computation 10, 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem

LARGEST = 4000  # tables x ranks: beyond, an integer program takes minutes
_SECONDS, _NODES = 20.0, 20_000
_PROVED_INFEASIBLE = 2  # scipy's status
_ROUNDING = 1e-9  # of a rank's memory: what the solver's tolerances may break


@dataclass(frozen=True)
class Packing:
    """What the integer program found.

    Attributes:
        pieces: [tables] (width, rank) of each shard; None without a packing.
        impossible: it was proved that there is none.
    """

    pieces: list[list[tuple[int, int]]] | None
    impossible: bool


def pack(problem: ShardingProblem) -> Packing:
    """Solves the packing of a problem of at most :data:`LARGEST` tables x ranks; larger ones are given up."""
    placed, ranks = problem.placed_tables, problem.cluster.world_size
    tables = len(placed)
    if tables * ranks > LARGEST:
        return Packing(None, False)
    whole = np.asarray([_units(problem, t) for t in placed])
    least = np.asarray([_least_units(problem, t) for t in placed])
    fixed, per_unit = _bytes(problem, placed, whole, least)
    scale = np.maximum(problem.cluster.capacity.max(axis=0), 1.0)
    # Variables: y[t, r], whether rank r has a shard of table t, then u[t, r], its units.
    cells = tables * ranks
    table, rank = np.divmod(np.arange(cells), ranks)
    y, u = np.arange(cells), cells + np.arange(cells)
    ones = np.ones(cells)
    capacity = problem.cluster.capacity * (1 - _ROUNDING) / scale
    rows = [
        (_matrix([(table, u, ones)], tables, 2 * cells), whole, whole),
        (_matrix([(y, u, ones), (y, y, -whole[table])], cells, 2 * cells), -np.inf, 0.0),
        (_matrix([(y, u, ones), (y, y, -least[table])], cells, 2 * cells), 0.0, np.inf),
        *(
            (
                _matrix(
                    [(rank, y, fixed[table, kind] / scale[kind]), (rank, u, per_unit[table, kind] / scale[kind])],
                    ranks,
                    2 * cells,
                ),
                -np.inf,
                capacity[:, kind],
            )
            for kind in (0, 1)
        ),
    ]
    answer = milp(
        np.concatenate([np.ones(cells), np.zeros(cells)]),  # few shards
        integrality=np.ones(2 * cells),
        bounds=Bounds(0, np.concatenate([ones, whole[table].astype(float)])),
        constraints=[LinearConstraint(matrix, low, high) for matrix, low, high in rows],
        options={"time_limit": _SECONDS, "node_limit": _NODES, "mip_rel_gap": 1.0},
    )
    if answer.x is None:
        return Packing(None, answer.status == _PROVED_INFEASIBLE)
    units = np.rint(answer.x[cells:]).astype(np.int64).reshape(tables, ranks)
    pieces: list[list[tuple[int, int]]] = [[] for _ in problem.tables]
    for row, t in zip(units, placed):
        pieces[t] = [(_width(problem, t, int(row[r])), int(r)) for r in np.flatnonzero(row)]
    return Packing(pieces if _fits(problem, pieces) else None, False)


def _units(problem: ShardingProblem, table: int) -> int:
    """Columns of a table in FBGEMM's multiples; 1 for one that is never cut."""
    dim = problem.tables[table].embedding_dim
    return dim // WIDTH_MULTIPLE if _divisible(problem, table) else 1


def _least_units(problem: ShardingProblem, table: int) -> int:
    return -(-problem.options[table].min_width // WIDTH_MULTIPLE) if _divisible(problem, table) else 1


def _width(problem: ShardingProblem, table: int, units: int) -> int:
    return units * WIDTH_MULTIPLE if _divisible(problem, table) else problem.tables[table].embedding_dim


def _divisible(problem: ShardingProblem, table: int) -> bool:
    return problem.splittable(table) and problem.tables[table].embedding_dim % WIDTH_MULTIPLE == 0


def _bytes(
    problem: ShardingProblem, placed: tuple[int, ...], whole: NDArray[np.int64], least: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[tables, 2] bytes of a shard for being there and of each unit, from the narrowest and the whole one."""
    pairs = [[(t, _width(problem, t, int(count))) for t, count in zip(placed, units)] for units in (least, whole)]
    for shards in pairs:
        problem.prefetch_memory(shards)
    narrow, full = (np.asarray([problem.shard_memory(*pair) for pair in shards]) for shards in pairs)
    step = np.maximum(whole - least, 1)[:, None]
    per_unit = np.where((whole > least)[:, None], (full - narrow) / step, full)
    return np.maximum(full - per_unit * whole[:, None], 0.0), per_unit


def _matrix(
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]], rows: int, columns: int
) -> coo_array:
    row, column, value = (np.concatenate([part[i] for part in parts]) for i in range(3))
    return coo_array((value, (row, column)), shape=(rows, columns)).tocsc()


def _fits(problem: ShardingProblem, pieces: list[list[tuple[int, int]]]) -> bool:
    used = np.zeros_like(problem.cluster.capacity)
    for table, shards in enumerate(pieces):
        for width, rank in shards:
            used[rank] += problem.shard_memory(table, width)
    return bool((used <= problem.cluster.capacity).all())
