"""Which tables to keep in host memory where device memory does not hold all, and how much of them a cache holds.

Rows that are looked up seldom for the memory they take go first. For each share of rows that a cache may hold, the
fewest tables are taken with which something fits; the cheapest of these choices, by a greedy placement, is searched.
A smaller cache takes fewer tables off the device, and misses more.
"""

from __future__ import annotations

from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.problem import (
    FUSED,
    FUSED_KERNELS,
    KEY_VALUE,
    UVM,
    UVM_CACHING,
    InfeasibleError,
    Placement,
    ShardingProblem,
)
from torchrec_neuroshard.search.feasibility import feasible_placement
from torchrec_neuroshard.search.spread import feasible_spread

# Shares of the rows that a cache may hold, largest first.
LOAD_FACTORS = (0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)

# [tables] (kernel, load factor) of each table.
Kernels = tuple[tuple[str, float], ...]


def required_kernels(problem: ShardingProblem, load_factor: float = LOAD_FACTORS[0]) -> Kernels:
    """The kernels with every table in device memory that may lie there.

    Args:
        problem: the tables and what they may be.
        load_factor: of caches whose share is left to the search.
    """
    return tuple(
        (FUSED, 0.0) if FUSED in option.kernels else _in_host_memory(problem, table, load_factor)
        for table, option in enumerate(problem.options)
    )


def may_offload(problem: ShardingProblem) -> bool:
    """Whether any table may lie in host memory."""
    return any(set(option.kernels) != {FUSED} for option in problem.options)


def choose_offloaded(problem: ShardingProblem, objective: Objective, out_of_time: Callable[[], bool]) -> Kernels:
    """Chooses tables for host memory, so that the others and the caches fit on the devices.

    Args:
        problem: does not fit with :func:`required_kernels`.
        objective: prices the choices.
        out_of_time: asked after a choice that fits was found.

    Raises:
        InfeasibleError: no choice was found with which all fits; the numbers are those of the one that came nearest.
    """
    best: tuple[float, Kernels] | None = None
    failures: list[InfeasibleError] = []
    for load_factor in (*LOAD_FACTORS, 0.0):
        found = _fewest_offloaded(problem, load_factor)
        if isinstance(found, InfeasibleError):
            failures.append(found)
            continue
        kernels, placement = found
        total_ms = simulate(problem.with_kernels(kernels), objective).cost(placement).total_ms
        if best is None or total_ms < best[0]:
            best = total_ms, kernels
        if out_of_time():
            break
    if best is None:
        raise min(failures, key=_excess)
    return best[1]


def _fewest_offloaded(problem: ShardingProblem, load_factor: float) -> tuple[Kernels, Placement] | InfeasibleError:
    """The fewest tables in host memory that make all fit, and where; or why none do.

    Too many do not fit in host memory, and too few leave too much on the devices. So tables are taken, coldest first,
    as long as host memory holds them, and tried from the number on with which totals fit the devices.
    """
    kept = required_kernels(problem, load_factor)
    order = _coldest_first(problem)
    device, host = _bytes(problem, kept), _bytes(problem, _offloaded(problem, order, load_factor))
    room = problem.cluster.capacity.sum(axis=0)
    used, taken = device.sum(axis=0), []
    steps = [used]  # bytes in all when so many tables were taken
    for table in order:
        after = used - device[table] + host[table]
        if after[1] <= room[1]:
            used = after
            taken.append(table)
            steps.append(used)
    first = next((count for count, total in enumerate(steps) if (total <= room).all()), len(taken))
    failures: list[InfeasibleError] = []
    more = 0
    while True:
        count = min(first + more, len(taken))
        kernels = _offloaded(problem, taken[:count], load_factor)
        placement = _fitting(problem, kernels)
        if not isinstance(placement, InfeasibleError):
            return kernels, placement
        failures.append(placement)
        if count == len(taken):
            return min(failures, key=_excess)
        more = 2 * more + 1


def _excess(error: InfeasibleError) -> float:
    """How many times what there is of the scarcer memory is needed."""
    return max(needed / max(available, 1.0) for needed, available in zip(error.needed, error.available))


def _bytes(problem: ShardingProblem, kernels: Kernels) -> NDArray[np.float64]:
    """[tables, 2] bytes of HBM and DDR of whole tables with these kernels."""
    with_kernels = problem.with_kernels(kernels)
    shards = [(table, of.embedding_dim) for table, of in enumerate(problem.tables)]
    with_kernels.prefetch_memory(shards)
    return np.asarray([with_kernels.shard_memory(*shard) for shard in shards])


def _coldest_first(problem: ShardingProblem) -> list[int]:
    """Tables that may lie in host memory and on the device, those with the fewest lookups for their rows first."""
    tables = [
        t for t, option in enumerate(problem.options) if FUSED in option.kernels and set(option.kernels) != {FUSED}
    ]
    return sorted(tables, key=lambda t: (problem.tables[t].pooling_factor / problem.tables[t].num_embeddings, t))


def _offloaded(problem: ShardingProblem, tables: list[int], load_factor: float) -> Kernels:
    """The kernels with these tables in host memory too."""
    kernels = list(required_kernels(problem, load_factor))
    for table in tables:
        kernels[table] = _in_host_memory(problem, table, load_factor)
    return tuple(kernels)


def _in_host_memory(problem: ShardingProblem, table: int, load_factor: float) -> tuple[str, float]:
    """The fastest of a table's kernels off the device; without cache where the load factor is 0 and that is allowed."""
    option = problem.options[table]
    allowed = [kernel for kernel in FUSED_KERNELS if kernel in option.kernels and kernel != FUSED]
    if UVM_CACHING in allowed and (load_factor > 0 or UVM not in allowed or option.load_factor is not None):
        return UVM_CACHING, option.load_factor or load_factor or LOAD_FACTORS[-1]
    return (UVM if UVM in allowed else KEY_VALUE), 0.0


def _fitting(problem: ShardingProblem, kernels: Kernels) -> Placement | InfeasibleError:
    """Where the problem fits with these kernels, or why it does not."""
    try:
        return _feasible(problem.with_kernels(kernels))
    except InfeasibleError as error:
        return error


def _feasible(problem: ShardingProblem) -> Placement:
    """Where the problem's tables fit."""
    if any(option.spread_types for option in problem.options):
        return feasible_spread(problem, exact=False)[1]
    return feasible_placement(problem, exact=False)
