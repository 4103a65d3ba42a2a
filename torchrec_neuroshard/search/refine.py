"""Local refinement of a placement: moves, swaps, splits and merges around the slowest rank.

All changes of one kind are priced in one batch. A change touches two ranks (or one more for a merge), so it
costs the group sums of those ranks, not a new plan. The best change is taken until none helps; sums are
rebuilt in canonical order after each, so that the result does not depend on the path.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Pipeline, Placement, Shard
from torchrec_neuroshard.search.splits import divide

_TOLERANCE = 1e-6  # relative gain below which a change is not worth taking
_PARTNER_LIMIT = 24  # ranks considered as partners of a swap, lightest first
_SPLIT_SHARES = (0.25, 0.5, 0.75)
_FINALISTS = 64  # changes priced with collectives, best compute first


@dataclass(frozen=True)
class _Change:
    """Shards that leave and shards that arrive."""

    removed: tuple[Shard, ...]
    added: tuple[Shard, ...]


class _State:
    """A placement with its sums by rank, rebuilt in canonical order."""

    def __init__(self, simulator: PlanSimulator, placement: Placement) -> None:
        problem = simulator.problem
        self.simulator = simulator
        self.shards = tuple(sorted(placement.shards, key=lambda s: (s.table, s.offset)))
        self.types = placement.sharding_types
        ranks = problem.cluster.world_size
        self.sums = np.zeros((ranks, len(problem.group_keys), simulator.z.shape[1]))
        self.columns = np.zeros((len(problem.lookup_keys), ranks))
        self.ids = np.zeros_like(self.columns)
        self.free = problem.cluster.capacity.astype(np.float64).copy()
        for shard, kind in zip(self.shards, simulator.kinds((s.table, s.width) for s in self.shards)):
            self.sums[shard.rank, self.group(shard)] += simulator.z[kind]
            self.columns[self.lookup(shard), shard.rank] += simulator.columns[kind]
            self.ids[self.lookup(shard), shard.rank] += simulator.ids[kind]
            self.free[shard.rank] -= simulator.memory[kind]
        self.rank_ms = simulator.group_ms(self.sums).sum(axis=1)  # [ranks, 2]
        self.load = self.rank_ms.sum(axis=1)
        self.total_ms = float(
            simulator.total_ms(
                self.rank_ms[None], simulator.comms_ms(self.columns[None]), simulator.input_dist_ms(self.ids[None])
            )[0]
        )

    def group(self, shard: Shard) -> int:
        return self.simulator.problem.group_of(shard.table, self.types[shard.table])

    def lookup(self, shard: Shard) -> int:
        return self.simulator.problem.lookup_of(shard.table, self.types[shard.table])

    def slowest_ranks(self) -> list[int]:
        """The ranks that decide the objective: one, or two when forward and backward are waited for apart."""
        if self.simulator.problem.cluster.pipeline is Pipeline.NONE:
            return sorted({int(self.rank_ms[:, 0].argmax()), int(self.rank_ms[:, 1].argmax())})
        return [int(self.load.argmax())]

    def apply(self, change: _Change) -> Placement:
        removed = set(change.removed)
        shards = [shard for shard in self.shards if shard not in removed] + list(change.added)
        shards.sort(key=lambda s: (s.table, s.offset))
        pieces = np.bincount([shard.table for shard in shards], minlength=len(self.types))
        types = self.simulator.problem.sharding_types((pieces > 1).tolist())
        return Placement(tuple(shards), types)


def refine(
    simulator: PlanSimulator, placement: Placement, out_of_time: Callable[[], bool]
) -> Placement:
    """Improves a placement until no change helps or time is up; never returns a worse one."""
    state = _State(simulator, placement)
    while not out_of_time():
        better = _best_change(state)
        if better is None:
            break
        state = better
    return Placement(state.shards, state.types)


def _best_change(state: _State) -> _State | None:
    """The state after the best change that improves, or None."""
    for changes in (_moves_and_swaps, _splits_and_merges):
        candidates = [change for rank in state.slowest_ranks() for change in changes(state, rank)]
        for change in _rank_changes(state, candidates):
            successor = _State(state.simulator, state.apply(change))
            if _improves(state, successor):
                return successor
    return None


def _improves(before: _State, after: _State) -> bool:
    """A smaller total, or an equal one with less on the loaded ranks (so that ties get resolved)."""
    if after.total_ms < before.total_ms * (1 - _TOLERANCE):
        return True
    if after.total_ms > before.total_ms * (1 + _TOLERANCE):
        return False
    old, new = np.sort(before.load)[::-1], np.sort(after.load)[::-1]
    differs = np.flatnonzero(np.abs(old - new) > _TOLERANCE * old[0])
    return bool(differs.size) and bool(new[differs[0]] < old[differs[0]])


def _moves_and_swaps(state: _State, slow: int) -> Iterator[_Change]:
    ranks = [r for r in np.argsort(state.load, kind="stable").tolist() if r != slow]
    partners = set(ranks[:_PARTNER_LIMIT])
    here = [shard for shard in state.shards if shard.rank == slow]
    there = [shard for shard in state.shards if shard.rank in partners]
    for shard in here:
        for rank in ranks:
            yield _Change((shard,), (replace(shard, rank=rank),))
        for other in there:
            yield _Change((shard, other), (replace(shard, rank=other.rank), replace(other, rank=slow)))


def _splits_and_merges(state: _State, slow: int) -> Iterator[_Change]:
    problem = state.simulator.problem
    ranks = [r for r in np.argsort(state.load, kind="stable").tolist() if r != slow][:_PARTNER_LIMIT]
    for index, shard in enumerate(state.shards):
        if shard.rank != slow:
            continue
        if problem.splittable(shard.table):
            pieces = {divide(shard.width, problem.options[shard.table].min_width, share) for share in _SPLIT_SHARES}
            for first, second in sorted(piece for piece in pieces if piece is not None):
                kept = replace(shard, width=first)
                for rank in ranks:
                    yield _Change((shard,), (kept, Shard(shard.table, shard.offset + first, second, rank)))
        for neighbour in state.shards[max(index - 1, 0) : index + 2]:
            if neighbour.table == shard.table and neighbour.offset != shard.offset:
                offset, width = min(shard.offset, neighbour.offset), shard.width + neighbour.width
                for rank in sorted({slow, neighbour.rank}):
                    yield _Change((shard, neighbour), (Shard(shard.table, offset, width, rank),))


def _rank_changes(state: _State, changes: list[_Change]) -> list[_Change]:
    """Changes that fit in memory and lower the compute of the ranks they touch, most promising first."""
    if not changes:
        return []
    problem, simulator = state.simulator.problem, state.simulator
    members: list[tuple[int, Shard, float]] = []
    for index, change in enumerate(changes):
        members += [(index, shard, -1.0) for shard in change.removed]
        members += [(index, shard, 1.0) for shard in change.added]
    kinds = simulator.kinds((shard.table, shard.width) for _, shard, _ in members)
    touched = [sorted({shard.rank for shard in (*change.removed, *change.added)}) for change in changes]
    owner = np.repeat(np.arange(len(changes)), [len(ranks) for ranks in touched])
    rank = np.asarray([r for ranks in touched for r in ranks], dtype=np.int64)
    row_of = {(int(o), int(r)): row for row, (o, r) in enumerate(zip(owner, rank))}
    row = np.asarray([row_of[(index, shard.rank)] for index, shard, _ in members], dtype=np.int64)
    sign = np.asarray([s for _, _, s in members])
    group = np.asarray([state.group(shard) for _, shard, _ in members], dtype=np.int64)

    free = state.free[rank].copy()
    np.add.at(free, row, -sign[:, None] * simulator.memory[kinds])
    compute = _rank_compute(state, rank, row, group, sign[:, None] * simulator.z[kinds])

    fits = np.ones(len(changes), dtype=bool)
    np.logical_and.at(fits, owner, (free >= 0).all(axis=1))
    worst = np.zeros(len(changes))
    np.maximum.at(worst, owner, compute.sum(axis=1))
    before = np.zeros(len(changes))
    np.maximum.at(before, owner, state.load[rank])
    if problem.cluster.pipeline is Pipeline.NONE:
        promising = fits & (worst < before * 1.05)
    else:
        promising = fits & (worst < before * (1 - _TOLERANCE))
    chosen = np.flatnonzero(promising)
    chosen = chosen[np.argsort(worst[chosen], kind="stable")][:_FINALISTS]
    return [changes[index] for index in _order_by_total(state, chosen, owner, rank, compute, members)
            for index in [int(index)]]  # fmt: skip


def _rank_compute(
    state: _State,
    rank: NDArray[np.int64],
    row: NDArray[np.int64],
    group: NDArray[np.int64],
    delta: NDArray[np.float64],
) -> NDArray[np.float64]:
    """[rows, 2] forward and backward of the touched ranks after their changes."""
    simulator = state.simulator
    groups = len(simulator.problem.group_keys)
    group_ms = simulator.group_ms(state.sums)[rank].copy()  # [rows, groups, 2]
    cells, inverse = np.unique(row * groups + group, return_inverse=True)
    sums = state.sums[rank[cells // groups], cells % groups].copy()
    np.add.at(sums, inverse, delta)
    group_ms[cells // groups, cells % groups] = simulator.group_ms(sums)
    result: NDArray[np.float64] = group_ms.sum(axis=1)
    return result


def _order_by_total(
    state: _State,
    chosen: NDArray[np.int64],
    owner: NDArray[np.int64],
    rank: NDArray[np.int64],
    compute: NDArray[np.float64],
    members: list[tuple[int, Shard, float]],
) -> NDArray[np.int64]:
    """``chosen`` by predicted total, collectives included (as if no table changed its sharding type)."""
    if not chosen.size:
        return chosen
    simulator = state.simulator
    position = {int(index): place for place, index in enumerate(chosen)}
    rank_ms = np.repeat(state.rank_ms[None], len(chosen), axis=0)
    columns = np.repeat(state.columns[None], len(chosen), axis=0)
    ids = np.repeat(state.ids[None], len(chosen), axis=0)
    for place, index in enumerate(chosen):
        rows = np.flatnonzero(owner == index)
        rank_ms[place, rank[rows]] = compute[rows]
    for index, shard, sign in members:
        if index in position:
            table = simulator.problem.tables[shard.table]
            columns[position[index], state.lookup(shard), shard.rank] += sign * shard.width * table.num_features
            ids[position[index], state.lookup(shard), shard.rank] += sign * table.pooling_factor
    total = simulator.total_ms(rank_ms, simulator.comms_ms(columns), simulator.input_dist_ms(ids))
    result: NDArray[np.int64] = chosen[np.argsort(total, kind="stable")]
    return result
