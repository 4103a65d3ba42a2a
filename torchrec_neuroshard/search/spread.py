"""Which tables to spread over ranks, by rows or as replicas, before the others are placed as columns.

A hot table whose columns no cut balances is best cut by rows, among all ranks or, where links between hosts are slow,
those of one host, and a tiny one replicated, when what that adds to every rank and to the collectives costs less than
what it relieves the slowest rank of. Candidates are weighed by the greedy placement of the other tables: first by how
many of the costliest tables to cut by rows and of the smallest to replicate, then table by table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable, Iterator, NoReturn, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_TYPES,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    InfeasibleError,
    Placement,
    ShardingProblem,
    Spread,
)
from torchrec_neuroshard.search.beam import score
from torchrec_neuroshard.search.config import SearchConfig
from torchrec_neuroshard.search.feasibility import feasible_placement, fitting_nowhere
from torchrec_neuroshard.search.hosts import Kinds, fills_ranks, host_column_kinds, settle
from torchrec_neuroshard.search.targets import fitting_splits, target_splits

_SHARDS_PLACED = 60_000  # by all trials together, which bounds their time
_FEWEST_TRIALS, _MOST_TRIALS = 12, 120
_TARGETS = 2  # splits for a target tried in each trial, beside whole tables
_GRID = 3  # caps on the widest rank in each trial
_PREFIXES = 5  # more and more tables spread together, without finding anything
_PATIENCE = 8  # trials of single tables in a row that find nothing
_WORTHWHILE = 1e-3  # relative gain of a table spread

# Of what a table may be when it must be spread, the first that fits is taken.
_REQUIRED_ORDER = (ROW_WISE, TABLE_ROW_WISE, GRID_SHARD, TABLE_COLUMN_WISE, COLUMN_WISE, DATA_PARALLEL)


def choose_spread(
    simulator: PlanSimulator, required: Kinds, config: SearchConfig, out_of_time: Callable[[], bool]
) -> tuple[Spread | None, ...]:
    """Chooses the tables to spread.

    Args:
        simulator: of the problem with nothing spread.
        required: tables that must be, as :func:`feasible_spread` says.
        config: of the greedy placements.
        out_of_time: asked before each trial.

    Returns:
        [tables] how each table lies that is to be spread, None for others.
    """
    trials = _Trials(simulator, config, out_of_time)
    return trials.settled(trials.run(required))


def must_be_spread(problem: ShardingProblem) -> Kinds:
    """The tables that cannot be placed as columns, by what they may be or by their size.

    Raises:
        InfeasibleError: such a table does not fit when it is spread.
    """
    kinds = [""] * len(problem.tables)
    capacity = problem.cluster.capacity
    left = [t for t, option in enumerate(problem.options) if option.spread_types]
    columns = {t for t in left if problem.options[t].has_columns}
    while True:  # what is spread leaves less room for the others
        nowhere = set(fitting_nowhere(problem, [t for t in left if t in columns], capacity))
        found = [t for t in left if t in nowhere or t not in columns]
        if not found:
            return tuple(kinds)
        for table in found:
            kinds[table] = _required_kind(problem, table, capacity)
        left = [t for t in left if not kinds[t]]
        capacity = problem.spread_as(settle(problem, tuple(kinds), _sizes(problem))).cluster.capacity


def feasible_spread(problem: ShardingProblem, exact: bool = True) -> tuple[Kinds, Placement]:
    """The fewest tables spread with which the others fit, largest first, and where all of them fit.

    Args:
        problem: with nothing spread.
        exact: where all else fails, as :func:`feasible_placement` takes it.

    Raises:
        InfeasibleError: nothing was found that fits.
    """
    required = must_be_spread(problem)
    size = _sizes(problem)
    more: dict[int, str] = {}
    for t, option in enumerate(problem.options):
        kind = next((k for k in _REQUIRED_ORDER if k in option.spread_types), "")
        if kind and not required[t] and (kind not in ROW_TYPES or fills_ranks(problem, t, kind)):
            more[t] = kind
    order = sorted(more, key=lambda t: (-size[t], t))
    counts = [0, *(2**power for power in range(len(order).bit_length()) if 2**power < len(order)), len(order)]
    for count in dict.fromkeys(counts):
        kinds = _with(required, [(t, more[t]) for t in order[:count]])
        try:
            return kinds, feasible_placement(problem.spread_as(settle(problem, kinds, size)), exact=False)
        except InfeasibleError:
            continue
    return required, feasible_placement(problem.spread_as(settle(problem, required, size)), exact)


def _sizes(problem: ShardingProblem) -> list[float]:
    """[tables] elements."""
    return [float(table.num_embeddings) * table.embedding_dim for table in problem.tables]


def _required_kind(problem: ShardingProblem, table: int, capacity: NDArray[np.float64]) -> str:
    """The type of a table that must be spread: the first that fits.

    Raises:
        InfeasibleError: none fits.
    """
    allowed = [kind for kind in _REQUIRED_ORDER if kind in problem.options[table].spread_types]
    needed: list[NDArray[np.float64]] = []
    least: list[NDArray[np.float64]] = []
    left = replace(problem, cluster=replace(problem.cluster, capacity=capacity))
    for kind in allowed:
        spread = settle(left, *_only(problem, table, kind))[table]
        assert spread is not None
        memory = problem.spread_memory(table, spread)
        if (capacity >= memory).all():
            return kind
        short = (memory > capacity).any(axis=1)
        needed.append(memory[short].max(axis=0))
        least.append(capacity[short].min(axis=0))
    excess = [float((n / np.maximum(c, 1.0)).max()) for n, c in zip(needed, least)]
    nearest = int(np.argmin(excess))
    _raise_too_large(problem, table, allowed, needed[nearest], least[nearest])


def _only(problem: ShardingProblem, table: int, kind: str) -> tuple[Kinds, list[float]]:
    """That table alone spread, and no weights."""
    return _with(("",) * len(problem.tables), [(table, kind)]), [0.0] * len(problem.tables)


def _raise_too_large(
    problem: ShardingProblem, table: int, kinds: list[str], needed: NDArray[np.float64], least: NDArray[np.float64]
) -> NoReturn:
    name = problem.tables[table].name
    scarce = int((needed / np.maximum(least, 1.0)).argmax())
    raise InfeasibleError(
        f"table {name!r} does not fit: as {' or '.join(kinds)} it needs {needed[scarce] / 2**30:.4g} GiB of "
        f"{('HBM', 'DDR')[scarce]} on a rank that has {max(least[scarce], 0.0) / 2**30:.4g} GiB",
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
        self._tried: dict[Kinds, float] = {}
        tables = max(1, len(self._problem.tables))
        self._left = min(_MOST_TRIALS, max(_FEWEST_TRIALS, _SHARDS_PLACED // (tables * (1 + _TARGETS))))

    def settled(self, kinds: Kinds) -> tuple[Spread | None, ...]:
        """Where the tables of these types lie."""
        spread = [t for t, kind in enumerate(kinds) if kind]
        weight = np.zeros(len(kinds))
        weight[spread] = list(self._alone(spread).values())
        return settle(self._problem, kinds, weight.tolist())

    def run(self, best: Kinds) -> Kinds:
        """The best choice found, starting from the given one."""
        if self._out_of_time():
            return best
        best_ms = self._ms(best)
        first_cuts = [kinds[0] for kinds in self._column_kinds() if kinds]
        for candidates in (self._by_rows(ROW_WISE), self._within_hosts(), first_cuts, self._replicated()):
            start = best
            failures = 0
            for table_kinds in _prefixes(candidates):
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

    def _better(self, best: Kinds, best_ms: float, kinds: Kinds) -> tuple[Kinds, float]:
        """The given choice, or the new one where it is better."""
        if self._left <= 0 or self._out_of_time() or self._hopeless(kinds, best_ms):
            return best, best_ms
        ms = self._ms(kinds)
        return (kinds, ms) if ms < best_ms * (1 - _WORTHWHILE) else (best, best_ms)

    def _ms(self, kinds: Kinds) -> float:
        """Predicted ms of the greedy placement with these tables spread; infinite where it does not fit."""
        if kinds not in self._tried:
            self._left -= 1
            self._tried[kinds] = self._place(kinds)
        return self._tried[kinds]

    def _hopeless(self, kinds: Kinds, best_ms: float) -> bool:
        """Whether, under costs that add up, even perfectly balanced ranks would take too long: no trial is needed.

        Cuts are taken to make a table no cheaper in all, as for TorchRec's estimates.
        """
        if not self._simulator.additive or kinds in self._tried:
            return False
        simulator = self._simulator.spread_as(self.settled(kinds))
        load = simulator.group_ms(simulator.background.sums).sum(axis=(1, 2))  # [ranks] of what is spread
        others = sum(self._alone(simulator.problem.placed_tables).values())
        least = max(float(load.max()), (float(load.sum()) + others) / len(load))
        return least >= best_ms * (1 - _WORTHWHILE)

    def _place(self, kinds: Kinds) -> float:
        simulator = self._simulator.spread_as(self.settled(kinds))
        problem = simulator.problem
        if (problem.cluster.capacity < 0).any() or any(
            not option.has_columns and not kinds[table] for table, option in enumerate(problem.options)
        ):
            return np.inf
        if not problem.placed_tables:
            return simulator.cost(problem.placement((), [False] * len(kinds))).total_ms
        base = fitting_splits(problem)
        targets = target_splits(simulator, base)
        some = targets[:: max(1, len(targets) // _TARGETS)][:_TARGETS]
        return score(simulator, list(dict.fromkeys([base, *some])), self._config)[0].total_ms

    def _by_rows(self, kind: str) -> list[tuple[int, str]]:
        """Tables whose rows may be cut like this, costliest first."""
        options = enumerate(self._problem.options)
        tables = [t for t, option in options if kind in option.sharding_types and fills_ranks(self._problem, t, kind)]
        cost = self._alone(tables)
        return [(t, kind) for t in sorted(tables, key=lambda t: (-cost[t], t))]

    def _within_hosts(self) -> list[tuple[int, str]]:
        """Tables whose rows may be cut within hosts; on one host that is no different from cutting them among all."""
        found = [pair for kind in (TABLE_ROW_WISE, GRID_SHARD) for pair in self._by_rows(kind)]
        if self._problem.cluster.hosts > 1:
            return found
        return [(t, kind) for t, kind in found if ROW_WISE not in self._problem.options[t].sharding_types]

    def _column_kinds(self) -> list[list[tuple[int, str]]]:
        """For each table, costliest first, its cuts into column shards within a host, most shards first."""
        kinds = {t: host_column_kinds(self._problem, t) for t in range(len(self._problem.tables))}
        tables = [t for t, found in kinds.items() if found]
        cost = self._alone(tables)
        return [[(t, kind) for kind in kinds[t]] for t in sorted(tables, key=lambda t: (-cost[t], t))]

    def _replicated(self) -> list[tuple[int, str]]:
        """Tables that may be data-parallel, those first that cost much for their size."""
        tables = [t for t, option in enumerate(self._problem.options) if DATA_PARALLEL in option.sharding_types]
        cost = self._alone(tables)
        size = {t: self._problem.tables[t].num_embeddings * self._problem.tables[t].embedding_dim for t in tables}
        return [(t, DATA_PARALLEL) for t in sorted(tables, key=lambda t: (-cost[t] / size[t], t))]

    def _one_by_one(self) -> Iterator[tuple[int, str]]:
        """Tables and types worth a trial of their own: costliest first, then smallest."""
        cuts = [pair for kinds in self._column_kinds() for pair in kinds]
        lists = [self._by_rows(ROW_WISE), self._within_hosts(), cuts, self._replicated()]
        for place in range(max(map(len, lists))):
            yield from (candidates[place] for candidates in lists if place < len(candidates))

    def _alone(self, tables: Sequence[int]) -> dict[int, float]:
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


def _with(kinds: Kinds, changes: list[tuple[int, str]]) -> Kinds:
    result = list(kinds)
    for table, kind in changes:
        result[table] = kind
    return tuple(result)
