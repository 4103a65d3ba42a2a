"""Greedy grid search of the paper: one split of the tables, placed under each cap on a rank's columns.

Shards are taken by falling predicted cost; each goes to the rank with the least predicted compute so far, among those
with enough memory and no more columns than the cap. Two forms with the same result: :class:`SinglePlacer` asks the cost
model for one group at a time, as the paper's code does; :class:`BatchPlacer` places all candidates under all caps at
once and predicts each distinct group once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper_search_costs import CLOSE, GroupQueries, GroupTable, PlanObjective
from torchrec_neuroshard.problem import ShardingProblem

ShardList = tuple[tuple[int, int], ...]  # (table, width) of each shard

_ROUNDING = 1e-9  # of sums of columns


@dataclass(frozen=True)
class GridSettings:
    """Settings of the grid search.

    Attributes:
        caps: [grid] most columns of a rank, as multiples of the mean over ranks.
        siblings_share_ranks: let a rank hold several shards of a table, which TorchRec cannot run.
    """

    caps: tuple[float, ...]
    siblings_share_ranks: bool


@dataclass(frozen=True)
class Placed:
    """The best grid point of one candidate.

    Attributes:
        objective_ms: infinite where no grid point fits in memory.
        ranks: [shards] in the candidate's order.
    """

    objective_ms: float
    ranks: tuple[int, ...]


class Placer(Protocol):
    """Places candidates."""

    def place(self, candidates: Sequence[ShardList], keep: int) -> list[Placed]:
        """The best placement of each candidate; only the ``keep`` lowest objectives have to be exact."""
        ...


@dataclass(frozen=True)
class _Candidate:
    """A candidate's shards in placing order, all [shards].

    Attributes:
        order: index into the candidate's shards.
        kinds: see :class:`~torchrec_neuroshard.costs.simulator.PlanSimulator`.
        groups: fused group that serves each.
        lookups: lookup that serves each.
        tables: table of each.
    """

    order: NDArray[np.int64]
    kinds: NDArray[np.int64]
    groups: NDArray[np.int64]
    lookups: NDArray[np.int64]
    tables: NDArray[np.int64]


@dataclass
class SingleCosts:
    """Predicted cost of shards alone, one model call each.

    Attributes:
        queries: asked.
        remember: ask once for each kind.
    """

    queries: GroupQueries
    remember: bool
    _known: dict[int, float] = field(default_factory=dict)

    def __call__(self, kinds: Sequence[int]) -> list[float]:
        """[shards] forward plus backward ms."""
        if not self.remember:
            return [float(self.queries.group_ms((kind,)).sum()) for kind in kinds]
        for kind in kinds:
            if kind not in self._known:
                self._known[kind] = float(self.queries.group_ms((kind,)).sum())
        return [self._known[kind] for kind in kinds]


def _prepare(problem: ShardingProblem, queries: GroupQueries, alone: SingleCosts, shards: ShardList) -> _Candidate:
    kinds = queries.kinds(shards)
    cost = alone(kinds.tolist())
    order = np.asarray(sorted(range(len(shards)), key=lambda i: (-cost[i], i)), dtype=np.int64)
    tables = np.asarray([table for table, _ in shards], dtype=np.int64)
    types = problem.sharding_types((np.bincount(tables, minlength=len(problem.tables)) > 1).tolist())
    groups = np.asarray([problem.group_of(table, types[table]) for table, _ in shards], dtype=np.int64)
    lookups = np.asarray([problem.lookup_of(table, types[table]) for table, _ in shards], dtype=np.int64)
    return _Candidate(order, kinds[order], groups[order], lookups[order], tables[order])


class SinglePlacer:
    """Asks for each (candidate, cap, shard, rank), and remembers nothing.

    Args:
        objective: of plans.
        queries: asked for fused groups.
        alone: asked for single shards.
        settings: of the grid.
    """

    def __init__(
        self, objective: PlanObjective, queries: GroupQueries, alone: SingleCosts, settings: GridSettings
    ) -> None:
        self._objective, self._queries, self._alone, self._settings = objective, queries, alone, settings
        self._problem = objective.simulator.problem

    def place(self, candidates: Sequence[ShardList], keep: int) -> list[Placed]:
        """The best placement of each candidate, all exact."""
        return [self._best(_prepare(self._problem, self._queries, self._alone, shards)) for shards in candidates]

    def _best(self, candidate: _Candidate) -> Placed:
        best = Placed(np.inf, ())
        for cap in self._settings.caps:
            placed = self._under_cap(candidate, cap)
            if placed.objective_ms < best.objective_ms:
                best = placed
        return best

    def _under_cap(self, candidate: _Candidate, cap: float) -> Placed:
        problem, simulator = self._problem, self._objective.simulator
        world = problem.cluster.world_size
        width = simulator.columns[candidate.kinds]
        allowed = cap * float(width.sum()) / world + _ROUNDING
        free = problem.cluster.capacity.astype(np.float64).copy()
        columns = np.zeros((len(problem.lookup_keys), world))
        ids = np.zeros_like(columns)
        groups: list[list[list[int]]] = [[[] for _ in problem.group_keys] for _ in range(world)]
        holders: dict[int, set[int]] = {}
        ranks = [0] * len(candidate.kinds)
        for step, (kind, table) in enumerate(zip(candidate.kinds.tolist(), candidate.tables.tolist())):
            held = holders.setdefault(table, set())
            chosen, least = -1, np.inf
            for rank in range(world):
                if (free[rank] < simulator.memory[kind]).any() or columns[:, rank].sum() + width[step] > allowed:
                    continue
                if rank in held and not self._settings.siblings_share_ranks:
                    continue
                load = float(self._queries.rank_ms(groups[rank]).sum())
                if load < least:
                    chosen, least = rank, load
            if chosen < 0:
                return Placed(np.inf, ())
            members = groups[chosen][candidate.groups[step]]
            members.append(kind)
            members.sort()
            held.add(chosen)
            free[chosen] -= simulator.memory[kind]
            columns[candidate.lookups[step], chosen] += simulator.columns[kind]
            ids[candidate.lookups[step], chosen] += simulator.ids[kind]
            ranks[candidate.order[step]] = chosen
        rank_ms = np.stack([self._queries.rank_ms(of_rank) for of_rank in groups])
        return Placed(float(self._objective(rank_ms[None], columns[None], ids[None])[0]), tuple(ranks))


class BatchPlacer:
    """Places all candidates under all caps step by step; groups with the same shards are predicted once.

    Args:
        objective: of plans.
        queries: asked for fused groups where batched predictions are too close to decide.
        alone: asked for single shards.
        settings: of the grid.
    """

    def __init__(
        self, objective: PlanObjective, queries: GroupQueries, alone: SingleCosts, settings: GridSettings
    ) -> None:
        self._objective, self._queries, self._alone, self._settings = objective, queries, alone, settings
        self._problem = objective.simulator.problem
        self._table = GroupTable(objective.simulator, queries)

    def place(self, candidates: Sequence[ShardList], keep: int) -> list[Placed]:
        """The best placement of each candidate; the ``keep`` lowest objectives are exact."""
        prepared = [_prepare(self._problem, self._queries, self._alone, shards) for shards in candidates]
        rows: dict[tuple[int, ...], int] = {}  # candidates that place the same shards in the same order
        row_of = [rows.setdefault(tuple(candidate.kinds.tolist()), len(rows)) for candidate in prepared]
        distinct = [prepared[row_of.index(row)] for row in range(len(rows))]
        grid = _Grid(self._objective, self._table, distinct, self._settings)
        chosen = grid.run()
        costs = grid.objectives(keep)  # [rows, grid]
        best = costs.argmin(axis=1)
        result = []
        for candidate, row in zip(prepared, row_of):
            objective_ms = float(costs[row, best[row]])
            ranks = np.zeros(len(candidate.kinds), dtype=np.int64)
            ranks[candidate.order] = chosen[row, best[row], : len(ranks)]
            result.append(Placed(objective_ms, tuple(ranks.tolist()) if np.isfinite(objective_ms) else ()))
        return result


class _Grid:
    """All (candidate, cap) pairs while they are placed; arrays over pairs, candidate by candidate."""

    def __init__(
        self, objective: PlanObjective, table: GroupTable, candidates: list[_Candidate], settings: GridSettings
    ) -> None:
        problem = objective.simulator.problem
        self._objective, self._table, self._settings = objective, table, settings
        self._rows, self._caps = len(candidates), len(settings.caps)
        pairs, world = self._rows * self._caps, problem.cluster.world_size
        self._longest = max(len(candidate.kinds) for candidate in candidates)
        self._owner = np.repeat(np.arange(self._rows), self._caps)
        self._kinds, self._groups, self._lookups, self._tables = (
            self._padded([getattr(candidate, name) for candidate in candidates])
            for name in ("kinds", "groups", "lookups", "tables")
        )
        self._lengths = np.asarray([len(candidate.kinds) for candidate in candidates])
        self._width = np.where(
            np.arange(self._longest) < self._lengths[:, None], objective.simulator.columns[self._kinds], 0.0
        )
        totals = self._width.sum(axis=1)[self._owner]
        self._allowed = np.tile(settings.caps, self._rows) * totals / world + _ROUNDING
        self._numbers = np.zeros((pairs, world, len(problem.group_keys)), dtype=np.int64)
        self._free = np.repeat(problem.cluster.capacity[None].astype(np.float64), pairs, axis=0)
        self._columns = np.zeros((pairs, len(problem.lookup_keys), world))
        self._ids = np.zeros_like(self._columns)
        self._held = np.zeros((pairs, len(problem.tables), world), dtype=bool)
        self._possible = np.ones(pairs, dtype=bool)

    def run(self) -> NDArray[np.int64]:
        """[rows, grid, steps] rank that each shard goes to, in placing order."""
        simulator, world = self._objective.simulator, self._free.shape[1]
        chosen = np.zeros((len(self._owner), self._longest), dtype=np.int64)
        for step in range(self._longest):
            pairs = np.flatnonzero(self._possible & (step < self._lengths[self._owner]))
            owner = self._owner[pairs]
            kind, table = self._kinds[owner, step], self._tables[owner, step]
            usable = (self._free[pairs] >= simulator.memory[kind][:, None, :]).all(axis=-1)
            used = self._columns[pairs].sum(axis=1)
            usable &= used + self._width[owner, step, None] <= self._allowed[pairs, None]
            if not self._settings.siblings_share_ranks:
                usable &= ~self._held[pairs, table]
            alive = usable.any(axis=1)
            self._possible[pairs[~alive]] = False
            pairs, owner, kind, table = pairs[alive], owner[alive], kind[alive], table[alive]
            if not pairs.size:
                continue
            rank = self._lightest(pairs, usable[alive])
            assert (rank < world).all()
            chosen[pairs, step] = rank
            group, lookup = self._groups[owner, step], self._lookups[owner, step]
            self._numbers[pairs, rank, group] = self._table.add(self._numbers[pairs, rank, group], kind)
            self._free[pairs, rank] -= simulator.memory[kind]
            self._columns[pairs, lookup, rank] += simulator.columns[kind]
            self._ids[pairs, lookup, rank] += simulator.ids[kind]
            self._held[pairs, table, rank] = True
        return chosen.reshape(self._rows, self._caps, -1)

    def objectives(self, keep: int) -> NDArray[np.float64]:
        """[rows, grid] objective of each pair, infinite where it does not fit; exact for the ``keep`` best rows."""
        costs = np.full(len(self._owner), np.inf)
        pairs = np.flatnonzero(self._possible)
        if not pairs.size:
            return costs.reshape(self._rows, self._caps)
        # Plans with the same groups are one plan.
        _, first, plan = np.unique(
            self._numbers[pairs].reshape(len(pairs), -1), axis=0, return_index=True, return_inverse=True
        )
        plan = plan.reshape(-1)
        samples = pairs[first]
        of_plan = self._objective(self._rank_ms(samples), self._columns[samples], self._ids[samples])
        costs[pairs] = of_plan[plan]
        by_row = np.sort(costs.reshape(self._rows, self._caps).min(axis=1))
        limit = by_row[min(keep, self._rows) - 1] * (1 + 2 * CLOSE)
        for index in np.flatnonzero(of_plan <= limit).tolist():
            pair = samples[index : index + 1]
            self._table.make_exact(self._numbers[pair].ravel())
            of_plan[index] = self._objective(self._rank_ms(pair), self._columns[pair], self._ids[pair])[0]
        costs[pairs] = of_plan[plan]
        return costs.reshape(self._rows, self._caps)

    def _lightest(self, pairs: NDArray[np.int64], usable: NDArray[np.bool_]) -> NDArray[np.int64]:
        """[pairs] usable rank with the least compute so far."""
        load = np.where(usable, self._rank_ms(pairs).sum(axis=2), np.inf)
        close = load <= load.min(axis=1, keepdims=True) * (1 + CLOSE)
        undecided = np.flatnonzero(close.sum(axis=1) > 1)
        if undecided.size:
            self._table.make_exact(self._numbers[pairs[undecided]][close[undecided]].ravel())
            exact = self._rank_ms(pairs[undecided]).sum(axis=2)
            load[undecided] = np.where(close[undecided], exact, np.inf)
        result: NDArray[np.int64] = load.argmin(axis=1)
        return result

    def _rank_ms(self, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
        """[pairs, ranks, 2] forward and backward ms, added up in the order of the groups."""
        result = np.zeros((len(pairs), self._free.shape[1], 2))
        for group in range(self._numbers.shape[2]):
            result += self._table.ms(self._numbers[pairs, :, group])
        return result

    def _padded(self, rows: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        """[rows, longest] zeros after the end of each."""
        result = np.zeros((len(rows), self._longest), dtype=np.int64)
        for index, row in enumerate(rows):
            result[index, : len(row)] = row
        return result
