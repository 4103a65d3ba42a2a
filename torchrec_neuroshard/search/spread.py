"""Which tables to spread over all ranks, row-wise or data-parallel, before the others are placed as columns.

A hot table whose columns no cut balances is best cut by rows, and a tiny one replicated, when what that adds to every
rank and to the collectives costs less than what it relieves the slowest rank of. Candidates are weighed by the greedy
placement of the other tables: first by how many of the costliest tables to cut by rows and of the smallest to
replicate, then table by table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.row_wise import row_blocks
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import DATA_PARALLEL, ROW_WISE, InfeasibleError, Placement, ShardingProblem
from torchrec_neuroshard.search.beam import score
from torchrec_neuroshard.search.config import SearchConfig
from torchrec_neuroshard.search.feasibility import feasible_placement, least_width
from torchrec_neuroshard.search.targets import fitting_splits, target_splits

Spread = tuple[str, ...]

_SHARDS_PLACED = 60_000  # by all trials together, which bounds their time
_FEWEST_TRIALS, _MOST_TRIALS = 12, 120
_TARGETS = 2  # splits for a target tried in each trial, beside whole tables
_GRID = 3  # caps on the widest rank in each trial
_PREFIXES = 5  # more and more tables spread together, without finding anything
_PATIENCE = 8  # trials of single tables in a row that find nothing
_WORTHWHILE = 1e-3  # relative gain of a table spread


def choose_spread(
    simulator: PlanSimulator, required: Spread, config: SearchConfig, out_of_time: Callable[[], bool]
) -> Spread:
    """Chooses the tables to spread.

    Args:
        simulator: of the problem with nothing spread.
        required: tables that must be, as :func:`feasible_spread` says.
        config: of the greedy placements.
        out_of_time: asked before each trial.

    Returns:
        [tables] the type of each table that is to lie on all ranks, "" for others.
    """
    return _Trials(simulator, config, out_of_time).run(required)


def must_be_spread(problem: ShardingProblem) -> Spread:
    """The tables that cannot be placed as columns, by what they may be or by their size.

    Raises:
        InfeasibleError: such a table does not fit when it is spread.
    """
    spread = [""] * len(problem.tables)
    tables = [t for t, option in enumerate(problem.options) if option.has_columns]
    problem.prefetch_memory((t, least_width(problem, t)) for t in tables)
    capacity = problem.cluster.capacity.astype(np.float64).copy()
    found = True
    while found:  # what is spread leaves less room for the others
        found = False
        for table, option in enumerate(problem.options):
            if spread[table] or not option.spread_types or _fits_as_columns(problem, table, capacity):
                continue
            fitting = [k for k in option.spread_types if (capacity >= problem.spread_memory(table, k)).all()]
            if not fitting:
                _raise_too_large(problem, table, option.spread_types, capacity)
            spread[table] = ROW_WISE if ROW_WISE in fitting else fitting[0]
            capacity -= problem.spread_memory(table, spread[table])
            found = True
    return tuple(spread)


def feasible_spread(problem: ShardingProblem) -> tuple[Spread, Placement]:
    """The fewest tables on all ranks with which the others fit, largest first, and where those fit.

    Raises:
        InfeasibleError: nothing was found that fits.
    """
    required = must_be_spread(problem)
    more = [
        t
        for t, option in enumerate(problem.options)
        if not required[t] and option.spread_types and (option.spread_types[0] != ROW_WISE or _fills_ranks(problem, t))
    ]
    size = {t: max(problem.shard_memory(t, problem.tables[t].embedding_dim)) for t in more}
    order = sorted(more, key=lambda t: (-size[t], t))
    counts = [0, *(2**power for power in range(len(order).bit_length()) if 2**power < len(order)), len(order)]
    for count in dict.fromkeys(counts):
        kinds = [(t, problem.options[t].spread_types[0]) for t in order[:count]]
        spread = _with(required, kinds)
        try:
            return spread, feasible_placement(problem.spread_as(spread), exact=False)
        except InfeasibleError:
            continue
    return required, feasible_placement(problem.spread_as(required))


def _fills_ranks(problem: ShardingProblem, table: int) -> bool:
    """Whether every rank gets rows of a row-wise table; TorchRec 1.9 with FBGEMM 1.8 fails on a rank without."""
    last, _ = row_blocks(problem.tables[table].num_embeddings, problem.cluster.world_size)[-1]
    return last < problem.tables[table].num_embeddings


def _fits_as_columns(problem: ShardingProblem, table: int, capacity: NDArray[np.float64]) -> bool:
    """Whether some rank holds the narrowest column shard of the table."""
    if not problem.options[table].has_columns:
        return False
    return bool((capacity >= problem.shard_memory(table, least_width(problem, table))).all(axis=1).any())


def _raise_too_large(
    problem: ShardingProblem, table: int, kinds: tuple[str, ...], capacity: NDArray[np.float64]
) -> None:
    name = problem.tables[table].name
    least = capacity.min(axis=0)
    each = [problem.spread_memory(table, kind).max(axis=0) for kind in kinds]
    needed = min(each, key=lambda memory: float((memory / np.maximum(least, 1.0)).max()))
    scarce = int((needed / np.maximum(least, 1.0)).argmax())
    raise InfeasibleError(
        f"table {name!r} does not fit: as {' or '.join(kinds)} it needs {needed[scarce] / 2**30:.3f} GiB of "
        f"{('HBM', 'DDR')[scarce]} on a rank that has {max(least[scarce], 0.0) / 2**30:.3f} GiB",
        (float(needed[0]), float(needed[1])),
        (float(least[0]), float(least[1])),
        name,
    )


class _Trials:
    """Greedy placements under different choices, and the best so far."""

    def __init__(self, simulator: PlanSimulator, config: SearchConfig, out_of_time: Callable[[], bool]) -> None:
        self._simulator, self._out_of_time = simulator, out_of_time
        self._config = replace(config, grid=min(config.grid, _GRID))
        self._problem = simulator.problem
        self._tried: dict[Spread, float] = {}
        tables = max(1, len(self._problem.tables))
        self._left = min(_MOST_TRIALS, max(_FEWEST_TRIALS, _SHARDS_PLACED // (tables * (1 + _TARGETS))))

    def run(self, best: Spread) -> Spread:
        """The best choice found, starting from the given one."""
        if self._out_of_time():
            return best
        best_ms = self._ms(best)
        for candidates in (self._row_wise(), self._replicated()):
            start = best
            failures = 0
            for table_kinds in _prefixes(list(candidates)):
                before = best
                best, best_ms = self._better(best, best_ms, _with(start, table_kinds))
                failures = 0 if best is not before or not np.isfinite(best_ms) else failures + 1
                if failures >= _PREFIXES:
                    break
        failures = 0
        for table, kind in self._one_by_one():
            if failures >= _PATIENCE:
                break
            other = kind if best[table] != kind else ""
            if other or self._problem.options[table].has_columns:
                before = best
                best, best_ms = self._better(best, best_ms, _with(best, [(table, other)]))
                failures = 0 if best is not before else failures + 1
        return best

    def _better(self, best: Spread, best_ms: float, spread: Spread) -> tuple[Spread, float]:
        """The given choice, or the new one where it is better."""
        if self._left <= 0 or self._out_of_time():
            return best, best_ms
        ms = self._ms(spread)
        return (spread, ms) if ms < best_ms * (1 - _WORTHWHILE) else (best, best_ms)

    def _ms(self, spread: Spread) -> float:
        """Predicted ms of the greedy placement with these tables spread; infinite where it does not fit."""
        if spread not in self._tried:
            self._left -= 1
            self._tried[spread] = self._place(spread)
        return self._tried[spread]

    def _place(self, spread: Spread) -> float:
        simulator = self._simulator.spread_as(spread)
        problem = simulator.problem
        if (problem.cluster.capacity < 0).any() or any(
            not option.has_columns and not spread[table] for table, option in enumerate(problem.options)
        ):
            return np.inf
        if not problem.placed_tables:
            return simulator.cost(Placement((), spread)).total_ms
        base = fitting_splits(problem)
        targets = target_splits(simulator, base)
        some = targets[:: max(1, len(targets) // _TARGETS)][:_TARGETS]
        return score(simulator, list(dict.fromkeys([base, *some])), self._config)[0].total_ms

    def _row_wise(self) -> Iterator[tuple[int, str]]:
        """Tables that may be row-wise, costliest first."""
        options = enumerate(self._problem.options)
        tables = [t for t, option in options if ROW_WISE in option.sharding_types and _fills_ranks(self._problem, t)]
        cost = self._alone(tables)
        yield from ((t, ROW_WISE) for t in sorted(tables, key=lambda t: (-cost[t], t)))

    def _replicated(self) -> Iterator[tuple[int, str]]:
        """Tables that may be data-parallel, those first that cost much for their size."""
        tables = [t for t, option in enumerate(self._problem.options) if DATA_PARALLEL in option.sharding_types]
        cost = self._alone(tables)
        size = {t: self._problem.tables[t].num_embeddings * self._problem.tables[t].embedding_dim for t in tables}
        yield from ((t, DATA_PARALLEL) for t in sorted(tables, key=lambda t: (-cost[t] / size[t], t)))

    def _one_by_one(self) -> Iterator[tuple[int, str]]:
        """Tables and types worth a trial of their own: costliest first, then smallest."""
        rows, replicas = list(self._row_wise()), list(self._replicated())
        for pair in zip(rows, replicas):
            yield from pair
        shorter = min(len(rows), len(replicas))
        yield from [*rows[shorter:], *replicas[shorter:]]

    def _alone(self, tables: list[int]) -> dict[int, float]:
        """What each table costs whole and alone."""
        shards = [(t, self._problem.tables[t].embedding_dim) for t in tables]
        return dict(zip(tables, self._simulator.alone(shards).sum(axis=1).tolist()))


def _prefixes(candidates: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The first 1, 2, 3, 5, 8, ... of the candidates, and all."""
    count, after = 1, 2
    while count < len(candidates):
        yield candidates[:count]
        count, after = after, count + after
    if candidates:
        yield candidates


def _with(spread: Spread, changes: list[tuple[int, str]]) -> Spread:
    result = list(spread)
    for table, kind in changes:
        result[table] = kind
    return tuple(result)
