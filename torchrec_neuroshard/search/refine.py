"""Local refinement of a placement: the best move, swap, split or merge around the slowest rank, repeated.

All changes are priced in one batch. A change touches two or three ranks, so it costs the group sums of those,
not a new plan. Sums are rebuilt in canonical order after each change taken, so that the result does not
depend on the path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import segment_sums
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Placement, Shard
from torchrec_neuroshard.search.changes import Changes, ShardArrays, merges, moves, splits, swaps

_TOLERANCE = 2e-4  # relative gain below which a change is not worth taking
_WINDOW, _WORTHWHILE = 24, 1e-3  # changes in a row that must gain this much together
_PARTNER_LIMIT = 16  # ranks considered as partners, lightest first
_FINALISTS = 64  # changes priced with collectives, best compute first
_TRIES = 3  # finalists rebuilt before giving up


def refine(simulator: PlanSimulator, placement: Placement, out_of_time: Callable[[], bool]) -> Placement:
    """Improves a placement until no change helps, gains dwindle or time is up; never returns a worse one."""
    state = _State(simulator, placement.shards)
    totals = [state.total_ms]
    while not out_of_time():
        better = _best_successor(state)
        if better is None:
            break
        state = better
        totals.append(state.total_ms)
        if len(totals) > _WINDOW and totals[-1] > totals[-1 - _WINDOW] * (1 - _WORTHWHILE):
            break
    return Placement(state.arrays.shards, state.types)


class _State:
    """A placement with its sums by rank, rebuilt in canonical order."""

    def __init__(self, simulator: PlanSimulator, shards: tuple[Shard, ...]) -> None:
        problem, ranks = simulator.problem, simulator.problem.cluster.world_size
        pieces = np.bincount([shard.table for shard in shards], minlength=len(problem.tables))
        self.simulator = simulator
        self.types = problem.sharding_types((pieces > 1).tolist())
        self.arrays = arrays = ShardArrays(simulator, shards, self.types)
        self.sums = np.zeros((ranks, len(problem.group_keys), simulator.z.shape[1]))
        self.columns = np.zeros((len(problem.lookup_keys), ranks))
        self.ids = np.zeros_like(self.columns)
        self.free = problem.cluster.capacity.astype(np.float64).copy()
        np.add.at(self.sums, (arrays.rank, arrays.group), simulator.z[arrays.kind])
        np.add.at(self.columns, (arrays.lookup, arrays.rank), simulator.columns[arrays.kind])
        np.add.at(self.ids, (arrays.lookup, arrays.rank), simulator.ids[arrays.kind])
        np.add.at(self.free, arrays.rank, -simulator.memory[arrays.kind])
        self.group_ms = simulator.group_ms(self.sums)  # [ranks, groups, 2]
        self.rank_ms = self.group_ms.sum(axis=1)  # [ranks, 2]
        self.load = self.rank_ms.sum(axis=1)
        comms, input_dist = simulator.comms_ms(self.columns[None]), simulator.input_dist_ms(self.ids[None])
        self.total_ms = float(simulator.total_ms(self.rank_ms[None], comms, input_dist)[0])

    def slowest_ranks(self) -> list[int]:
        """The ranks that decide the objective: one, or two when forward and backward are waited for apart."""
        if self.simulator.passes_apart:
            return sorted({int(self.rank_ms[:, 0].argmax()), int(self.rank_ms[:, 1].argmax())})
        return [int(self.load.argmax())]

    def improves(self, before: _State) -> bool:
        """A smaller total, or an equal one with less on the loaded ranks (so that ties get resolved)."""
        if self.total_ms < before.total_ms * (1 - _TOLERANCE):
            return True
        if self.total_ms > before.total_ms:
            return False
        old, new = np.sort(before.load)[::-1], np.sort(self.load)[::-1]
        differs = np.flatnonzero(np.abs(old - new) > _TOLERANCE * old[0])
        return bool(differs.size) and bool(new[differs[0]] < old[differs[0]])


def _best_successor(state: _State) -> _State | None:
    """The state after the best change that improves, or None."""
    problem = state.simulator.problem
    for structural in (False, True):  # cuts and joins only when moving whole shards does not help
        parts = []
        for slow in state.slowest_ranks():
            others = np.argsort(state.load, kind="stable")
            others = others[others != slow]
            near = others[:_PARTNER_LIMIT]
            if structural:
                parts += [
                    splits(state.arrays, problem, state.simulator, slow, near),
                    merges(state.arrays, state.simulator, slow),
                ]
            else:
                parts += [
                    moves(state.arrays, state.load, slow, others),
                    swaps(state.arrays, state.load, slow, near),
                ]
        changes = Changes.concatenate(parts)
        for index in _ranked(state, changes)[:_TRIES].tolist():
            successor = _State(state.simulator, changes.apply(index, state.arrays.shards))
            if successor.improves(state):
                return successor
    return None


@dataclass(frozen=True)
class _Effects:
    """Ranks touched by changes, one row for each (change, rank).

    Attributes:
        owner: [rows] index of the change.
        rank: [rows] the rank.
        rank_ms: [rows, 2] forward and backward of the rank after the change.
        fits: [changes] whether all touched ranks have enough memory.
    """

    owner: NDArray[np.int64]
    rank: NDArray[np.int64]
    rank_ms: NDArray[np.float64]
    fits: NDArray[np.bool_]


@dataclass(frozen=True)
class _Members:
    """Shards that changes remove and add, flattened."""

    change: NDArray[np.int64]
    rank: NDArray[np.int64]
    table: NDArray[np.int64]
    kind: NDArray[np.int64]
    sign: NDArray[np.float64]

    @classmethod
    def of(cls, arrays: ShardArrays, changes: Changes) -> _Members:
        gone, gone_slot = np.nonzero(changes.removed >= 0)
        come, come_slot = np.nonzero(changes.added_kind >= 0)
        shard = changes.removed[gone, gone_slot]
        added = changes.added[come, come_slot]
        return cls(
            np.concatenate([gone, come]),
            np.concatenate([arrays.rank[shard], added[:, 3]]),
            np.concatenate([arrays.table[shard], added[:, 0]]),
            np.concatenate([arrays.kind[shard], changes.added_kind[come, come_slot]]),
            np.concatenate([np.full(len(gone), -1.0), np.ones(len(come))]),
        )


def _ranked(state: _State, changes: Changes) -> NDArray[np.int64]:
    """Indices of changes that fit and lower the compute of the ranks they touch, least total first."""
    if not len(changes):
        return np.zeros(0, dtype=np.int64)
    members = _Members.of(state.arrays, changes)
    effects = _effects(state, members, len(changes))
    worst, before = np.zeros(len(changes)), np.zeros(len(changes))
    np.maximum.at(worst, effects.owner, effects.rank_ms.sum(axis=1))
    np.maximum.at(before, effects.owner, state.load[effects.rank])
    # Where passes are waited for apart, a rank's sum may rise while the slower pass falls.
    margin = 1.05 if state.simulator.passes_apart else 1.0
    chosen = np.flatnonzero(effects.fits & (worst < before * margin))
    chosen = chosen[np.argsort(worst[chosen], kind="stable")][:_FINALISTS]
    if not chosen.size:
        return chosen
    total = _totals(state, members, effects, chosen)
    result: NDArray[np.int64] = chosen[np.argsort(total, kind="stable")]
    return result


def _effects(state: _State, members: _Members, changes: int) -> _Effects:
    simulator = state.simulator
    ranks, groups = len(state.load), state.group_ms.shape[1]
    keys, row = np.unique(members.change * ranks + members.rank, return_inverse=True)
    owner, rank = keys // ranks, keys % ranks

    free = state.free[rank] - segment_sums(members.sign[:, None] * simulator.memory[members.kind], row, len(keys))
    fits = np.ones(changes, dtype=bool)
    np.logical_and.at(fits, owner, (free >= 0).all(axis=1))

    group = state.arrays.group_of_table[members.table]
    cells, cell = np.unique(row * groups + group, return_inverse=True)
    cell_row, cell_group = cells // groups, cells % groups
    delta = segment_sums(members.sign[:, None] * simulator.z[members.kind], cell, len(cells))
    sums = state.sums[rank[cell_row], cell_group] + delta
    group_ms = state.group_ms[rank].copy()  # [rows, groups, 2]
    group_ms[cell_row, cell_group] = simulator.group_ms(sums)
    return _Effects(owner, rank, group_ms.sum(axis=1), fits)


def _totals(
    state: _State, members: _Members, effects: _Effects, chosen: NDArray[np.int64]
) -> NDArray[np.float64]:
    """[chosen] predicted total, collectives included, as if no table changed its sharding type."""
    simulator = state.simulator
    place = np.full(int(effects.owner.max()) + 1, -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    rank_ms = np.repeat(state.rank_ms[None], len(chosen), axis=0)
    columns = np.repeat(state.columns[None], len(chosen), axis=0)
    ids = np.repeat(state.ids[None], len(chosen), axis=0)
    rows = np.flatnonzero(place[effects.owner] >= 0)
    rank_ms[place[effects.owner[rows]], effects.rank[rows]] = effects.rank_ms[rows]
    inside = np.flatnonzero(place[members.change] >= 0)
    at = (
        place[members.change[inside]],
        state.arrays.lookup_of_table[members.table[inside]],
        members.rank[inside],
    )
    np.add.at(columns, at, members.sign[inside] * simulator.columns[members.kind[inside]])
    np.add.at(ids, at, members.sign[inside] * simulator.ids[members.kind[inside]])
    return simulator.total_ms(rank_ms, simulator.comms_ms(columns), simulator.input_dist_ms(ids))
