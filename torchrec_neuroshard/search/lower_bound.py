"""A proved lower bound for costs that add up: no plan's slowest rank takes less.

A target T is impossible when the tables, each cut as cheaply as it can be with no shard above T, need more than all
ranks can give. "Cheaply" is measured by dual feasible functions [Fekete2001lower]: a function f with
sum(x) <= 1 => sum(f(x)) <= 1 turns the bound of total work into one that sees how large shards fail to share a rank.
The least target that is not shown to be impossible is found by bisection. Memory is left out, which only makes the
bound smaller.

References:
    [Fekete2001lower] S. P. Fekete, J. Schepers. New classes of fast lower bounds for bin packing problems.
        Mathematical Programming 91, 2001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem

_Function = Callable[[NDArray[np.float64]], NDArray[np.float64]]

_BISECTIONS = 24
_SLACK = 1e-9  # relative; the bound must not come from rounding
_LARGEST_K = 8


def lower_bound_ms(simulator: PlanSimulator) -> float:
    """What the slowest rank of any plan takes at least, in ms.

    Raises:
        ValueError: the simulator's costs do not add up, so that this proves nothing.
    """
    if not simulator.additive:
        raise ValueError("a lower bound can only be proved where the costs of shards add up")
    problem = simulator.problem
    ranks = problem.cluster.world_size
    if not problem.tables:
        return 0.0
    if any(option.spread_types for option in problem.options):
        raise ValueError("no bound is known where tables may be row-wise or data-parallel")
    families = _families(simulator)
    low, high = 0.0, sum(float(family.costs[:, -1].sum()) for family in families)  # everything on one rank
    if ranks == 1:
        return sum(float(_cheapest(family.costs).sum()) for family in families)
    for _ in range(_BISECTIONS):
        target = (low + high) / 2
        if _impossible(families, target, ranks):
            low = target
        else:
            high = target
    return low


@dataclass(frozen=True)
class _Family:
    """Tables of as many units of columns.

    Attributes:
        costs: [tables, units] ms of a shard of 1, 2, ... units; infinite where it is not allowed.
    """

    costs: NDArray[np.float64]


def _families(simulator: PlanSimulator) -> list[_Family]:
    problem = simulator.problem
    shards = [(t, width) for t in range(len(problem.tables)) for width in _widths(problem, t)]
    ms = iter(simulator.alone(shards).sum(axis=1).tolist())
    rows: dict[int, list[NDArray[np.float64]]] = {}
    for t, table in enumerate(problem.tables):
        widths = _widths(problem, t)
        units = table.embedding_dim // WIDTH_MULTIPLE if len(widths) > 1 else 1
        row = np.full(units, np.inf)
        for width in widths:
            row[width // WIDTH_MULTIPLE - 1 if len(widths) > 1 else 0] = next(ms)
        rows.setdefault(units, []).append(row)
    return [_Family(np.stack(rows[units])) for units in sorted(rows)]


def _widths(problem: ShardingProblem, table: int) -> list[int]:
    """Widths that a shard of the table may have."""
    dim = problem.tables[table].embedding_dim
    if not problem.splittable(table) or dim % WIDTH_MULTIPLE:
        return [dim]
    least = -(-problem.options[table].min_width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    return [*range(least, dim - least + 1, WIDTH_MULTIPLE), dim]


def _impossible(families: list[_Family], target: float, ranks: int) -> bool:
    """Whether it is proved that no plan keeps every rank within the target."""
    allowed = [np.where(family.costs <= target * (1 + _SLACK), family.costs / target, np.inf) for family in families]
    for function in _dual_feasible_functions():
        needed = sum(float(_cheapest(_applied(function, shares)).sum()) for shares in allowed)
        if needed > ranks * (1 + _SLACK):
            return True
    return False


def _applied(function: _Function, shares: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.where(np.isfinite(shares), function(np.minimum(shares, 1.0)), np.inf)


def _cheapest(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """[tables] least cost of shards that add up to all units, from [tables, units] costs of shards; by recursion."""
    tables, units = costs.shape
    best = np.zeros((tables, units + 1))
    for count in range(1, units + 1):
        best[:, count] = (best[:, count - 1 :: -1][:, :count] + costs[:, :count]).min(axis=1)
    result: NDArray[np.float64] = best[:, units]
    return result


def _dual_feasible_functions() -> Iterator[_Function]:
    """The identity, then functions that round up what is more than a half, a third, ... of a rank.

    With a tolerance, so that a share just below a threshold by rounding error does not count as above it.
    """
    yield lambda x: x
    for k in range(1, _LARGEST_K + 1):
        yield lambda x, k=k: _rounded(x, k)  # type: ignore[misc]
    for share in (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5):
        yield lambda x, share=share: np.where(  # type: ignore[misc]
            x > 1 - share + _SLACK, 1.0, np.where(x < share, 0.0, x)
        )


def _rounded(x: NDArray[np.float64], k: int) -> NDArray[np.float64]:
    """u^(k) of [Fekete2001lower]: x where (k + 1) x is whole, else floor((k + 1) x) / k."""
    scaled = (k + 1) * x
    near = np.rint(scaled)
    return np.where(np.abs(scaled - near) < 1e-7, np.minimum(x, near / k), np.floor(scaled) / k)
