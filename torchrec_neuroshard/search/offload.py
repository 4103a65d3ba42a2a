"""Which tables to keep in host memory where device memory does not hold all, and how much of them a cache holds.

Rows that are looked up seldom for the memory they take go first. For each share of rows that a cache may hold, the
fewest tables are taken with which something fits; the cheapest of these choices, by a greedy placement, is searched.
A smaller cache takes fewer tables off the device, and misses more.
"""

from __future__ import annotations

from typing import Callable, Iterator

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
        InfeasibleError: whatever lies in host memory, something does not fit; the numbers are those of the choice that
            takes the least memory.
    """
    best: tuple[float, Kernels] | None = None
    failure: InfeasibleError | None = None
    for kernels, fits in _fewest_offloaded(problem):
        if isinstance(fits, InfeasibleError):
            failure = fits
            continue
        total_ms = simulate(fits, objective).cost(_feasible(fits)).total_ms
        if best is None or total_ms < best[0]:
            best = total_ms, kernels
        if out_of_time():
            break
    if best is None:
        assert failure is not None
        raise failure
    return best[1]


def _fewest_offloaded(problem: ShardingProblem) -> Iterator[tuple[Kernels, ShardingProblem | InfeasibleError]]:
    """For each load factor the fewest tables in host memory that make the rest fit, or why none do."""
    order = _coldest_first(problem)
    most = len(order)
    for load_factor in (*LOAD_FACTORS, 0.0):
        everything = _offloaded(problem, order[:most], load_factor)
        fits = _fitting(problem, everything)
        if isinstance(fits, InfeasibleError):
            yield everything, fits
            continue
        low, high, found = -1, most, (everything, fits)  # ``low`` tables are too few
        while high - low > 1:
            middle = (low + high) // 2
            kernels = _offloaded(problem, order[:middle], load_factor)
            outcome = _fitting(problem, kernels)
            if isinstance(outcome, InfeasibleError):
                low = middle
            else:
                high, found = middle, (kernels, outcome)
        yield found
        most = high  # a smaller cache takes no more tables


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
    """The fastest of a table's kernels in host memory; without cache where the load factor is 0 and that is allowed."""
    option = problem.options[table]
    if KEY_VALUE in option.kernels:
        return KEY_VALUE, 0.0
    allowed = [kernel for kernel in FUSED_KERNELS if kernel in option.kernels and kernel != FUSED]
    if UVM_CACHING in allowed and (load_factor > 0 or UVM not in allowed or option.load_factor is not None):
        return UVM_CACHING, option.load_factor or load_factor or LOAD_FACTORS[-1]
    return UVM, 0.0


def _fitting(problem: ShardingProblem, kernels: Kernels) -> ShardingProblem | InfeasibleError:
    """The problem with these kernels, or why it does not fit."""
    offloaded = problem.with_kernels(kernels)
    try:
        _feasible(offloaded)
    except InfeasibleError as error:
        return error
    return offloaded


def _feasible(problem: ShardingProblem) -> Placement:
    """Where the problem's tables fit."""
    if any(option.spread_types for option in problem.options):
        return feasible_spread(problem, exact=False)[1]
    return feasible_placement(problem, exact=False)
