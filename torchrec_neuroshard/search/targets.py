"""Column splits for a target: every table is cut until none of its shards alone costs more than the target.

Many ranks leave many tables too large for one of them at once, which a search that cuts one table a step never gets
through. As in dual approximation for scheduling [Hochbaum1987dual], a target decides all cuts together; several
targets are tried.

References:
    [Hochbaum1987dual] D. S. Hochbaum, D. B. Shmoys. Using dual approximation algorithms for scheduling problems.
        Journal of the ACM 34(1), 1987.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem
from torchrec_neuroshard.search.splits import Splits, whole_tables

_LOWEST = 0.6  # times the mean compute of a rank: below, cuts cost more than they balance
_TARGETS = 12
_DENSE = 8  # numbers of pieces tried one by one; beyond, in steps of a third


def target_splits(simulator: PlanSimulator, base: Splits) -> list[Splits]:
    """Different splits for targets from the costliest table's cost down to below a rank's mean, coarsest first.

    Args:
        simulator: prices shards.
        base: cuts that are made whatever the target: those of :func:`fitting_splits`.
    """
    problem = simulator.problem
    placed = problem.placed_tables
    if not placed or problem.cluster.world_size == 1:
        return []
    costs_alone = simulator.alone((t, problem.tables[t].embedding_dim) for t in placed).sum(axis=1)
    alone = dict(zip(placed, costs_alone.tolist()))
    lowest = _LOWEST * float(costs_alone.sum()) / problem.cluster.world_size
    large = [t for t in placed if alone[t] > lowest and problem.splittable(t)]
    if not large:
        return []
    ways = {t: [way for way in piece_widths(problem, t) if len(way) >= len(base[t])] or [base[t]] for t in large}
    costs = iter(simulator.alone((t, way[0]) for t in large for way in ways[t]).sum(axis=1).tolist())
    widest_ms = {t: [next(costs) for _ in ways[t]] for t in large}
    highest = max(alone[t] for t in large)
    found: list[Splits] = []
    for target in np.geomspace(highest, lowest, _TARGETS + 1)[1:].tolist():
        splits = list(base)
        for t in large:
            fine = next((k for k, ms in enumerate(widest_ms[t]) if ms <= target), None)
            splits[t] = ways[t][int(np.argmin(widest_ms[t])) if fine is None else fine]
        found.append(tuple(splits))
    return list(dict.fromkeys(found))


def fitting_splits(problem: ShardingProblem) -> Splits:
    """Only the tables too large for any rank are cut, into as few about equal shards as each fits on some rank."""
    capacity = problem.cluster.capacity
    splits = list(whole_tables(problem))
    for table, widths in enumerate(splits):
        if not widths or not problem.splittable(table) or _fits_somewhere(problem, table, widths[0], capacity):
            continue
        ways = piece_widths(problem, table)
        splits[table] = next((way for way in ways if _fits_somewhere(problem, table, way[0], capacity)), ways[-1])
    return tuple(splits)


def _fits_somewhere(problem: ShardingProblem, table: int, width: int, capacity: NDArray[np.float64]) -> bool:
    return bool((capacity >= problem.shard_memory(table, width)).all(axis=1).any())


def piece_widths(problem: ShardingProblem, table: int) -> list[tuple[int, ...]]:
    """Ways to cut a table into about equal shards, from one shard to as many as are allowed, widest first in each."""
    dim, floor = problem.tables[table].embedding_dim, problem.options[table].min_width
    units, least = divmod(dim, WIDTH_MULTIPLE)[0], -(-floor // WIDTH_MULTIPLE)
    most = min(problem.cluster.world_size, units // least)
    ways: list[tuple[int, ...]] = [(dim,)]
    if dim % WIDTH_MULTIPLE:
        return ways
    pieces = 2
    while pieces <= most:
        narrow, wider = divmod(units, pieces)
        ways.append((WIDTH_MULTIPLE * (narrow + 1),) * wider + (WIDTH_MULTIPLE * narrow,) * (pieces - wider))
        pieces += 1 if pieces < _DENSE else pieces // 3
    return ways
