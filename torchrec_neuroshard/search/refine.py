"""Local refinement of a placement: the best move, swap, split or merge around the slowest rank, repeated.

A rank may be slow in compute, or in the columns that its collectives move: what an iteration waits for most is
relieved first. All changes are priced in one batch. A change touches two or three ranks, so it costs the group sums of
those, not a new plan; the collectives of the most promising ones are priced in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import segment_sums
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Placement
from torchrec_neuroshard.search.changes import Changes, merges, moves, splits, swaps
from torchrec_neuroshard.search.state import PlacementState, ShardArrays

_TOLERANCE = 2e-4  # relative gain below which a change is not worth taking
_WINDOW, _WORTHWHILE = 24, 1e-3  # changes in a row that must gain this much together
_PARTNER_LIMIT = 16  # ranks considered as partners, lightest first
_COUNTS = 0.02  # share of the total below which a pressure is left alone
_FINALISTS = 12  # changes priced with collectives, the most promising first
_TRIES = 3  # finalists rebuilt before giving up


def refine(simulator: PlanSimulator, placement: Placement, out_of_time: Callable[[], bool]) -> Placement:
    """Improves a placement until no change helps, gains dwindle or time is up; never returns a worse one."""
    state = PlacementState.of(simulator, placement.shards)
    totals = [state.total_ms]
    while not out_of_time():
        better = _best_successor(state)
        if better is None:
            break
        state = better
        totals.append(state.total_ms)
        if len(totals) > _WINDOW and totals[-1] > totals[-1 - _WINDOW] * (1 - _WORTHWHILE):
            break
    return state.arrays.placement(simulator.problem)


def _improves(before: PlacementState, after: PlacementState) -> bool:
    """A smaller total, or an equal one with less on the loaded ranks (so that ties get resolved)."""
    if after.total_ms < before.total_ms * (1 - _TOLERANCE):
        return True
    if after.total_ms > before.total_ms:
        return False
    old, new = np.sort(before.load)[::-1], np.sort(after.load)[::-1]
    differs = np.flatnonzero(np.abs(old - new) > _TOLERANCE * old[0])
    return bool(differs.size) and bool(new[differs[0]] < old[differs[0]])


def _best_successor(state: PlacementState) -> PlacementState | None:
    """The state after the best change that improves, or None."""
    problem = state.simulator.problem
    counting = [pressure for pressure in state.pressures() if pressure.share_ms > _COUNTS * state.total_ms]
    for structural in (False, True):  # cuts and joins only when moving whole shards does not help
        parts: list[Changes] = []
        for pressure in counting:
            slow = int(pressure.load.argmax())
            others = np.argsort(pressure.load, kind="stable")
            others = others[others != slow]
            near = others[:_PARTNER_LIMIT]
            if structural:
                parts.append(splits(state.arrays, problem, state.simulator, slow, near))
                parts.append(merges(state.arrays, state.simulator, slow))
            else:
                parts.append(moves(state.arrays, pressure, slow, others))
                parts.append(swaps(state.arrays, pressure, slow, near))
        changes = Changes.concatenate(parts)
        for index in _ranked(state, changes)[:_TRIES].tolist():
            arrays, touched = changes.apply(index, state.simulator, state.arrays)
            successor = PlacementState(state.simulator, arrays, state, touched)
            if _improves(state, successor):
                return successor
    return None


@dataclass(frozen=True)
class _Effects:
    """Ranks touched by changes, one row for each (change, rank).

    Attributes:
        owner: [rows] index of the change.
        rank: [rows] the rank.
        rank_ms: [rows, 2] forward and backward of the rank after the change.
        columns, ids: [rows, lookups] the rank's sums after the change, as if no table changed its sharding type.
        fits: [changes] whether all touched ranks have enough memory.
    """

    owner: NDArray[np.int64]
    rank: NDArray[np.int64]
    rank_ms: NDArray[np.float64]
    columns: NDArray[np.float64]
    ids: NDArray[np.float64]
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


def _ranked(state: PlacementState, changes: Changes) -> NDArray[np.int64]:
    """Indices of changes that fit and relieve the ranks they touch, least total first.

    Changes are chosen by the linear estimate of their total, and by compute alone: the collectives of a measured model
    are no straight line.
    """
    if not len(changes):
        return np.zeros(0, dtype=np.int64)
    effects = _effects(state, _Members.of(state.arrays, changes), len(changes))
    after = _promised(state, effects, len(changes))
    worst, before = np.zeros(len(changes)), np.zeros(len(changes))
    np.maximum.at(worst, effects.owner, effects.rank_ms.sum(axis=1))
    np.maximum.at(before, effects.owner, state.load[effects.rank])
    # Where passes are waited for apart, a rank's sum may rise while the slower pass falls.
    by_compute = worst < before * (1.05 if state.simulator.passes_apart else 1.0)
    by_total = after < state.total_ms * (1 - 1e-9)
    parts = []
    for promising, first, second, most in ((by_total, after, worst, 12), (by_compute, worst, after, 36)):
        indices = np.flatnonzero(effects.fits & promising)
        parts.append(indices[np.lexsort((second[indices], first[indices]))][:most])
    chosen = np.unique(np.concatenate(parts))
    if not chosen.size:
        return chosen
    total = _totals(state, effects, chosen)
    result: NDArray[np.int64] = chosen[np.argsort(total, kind="stable")]
    return result


def _promised(state: PlacementState, effects: _Effects, changes: int) -> NDArray[np.float64]:
    """[changes] ms of an iteration, by the slopes of the collectives."""

    def fullest(values: NDArray[np.float64], load: NDArray[np.float64]) -> NDArray[np.float64]:
        """[changes] the largest load after each change, from [rows] those of the touched ranks and [ranks] now."""
        worst = np.zeros(changes)
        np.maximum.at(worst, effects.owner, values)
        return np.maximum(worst, _others_worst(effects, load, changes))

    if state.simulator.passes_apart:
        compute = sum(fullest(effects.rank_ms[:, i], state.rank_ms[:, i]) for i in (0, 1))
    else:
        compute = fullest(effects.rank_ms.sum(axis=1), state.load)
    comms, input_dist = np.full(changes, state.comms_ms), np.full(changes, state.input_dist_ms)
    for lookup, (columns, ids) in enumerate(zip(state.columns, state.ids)):
        comms += state.column_slopes[lookup] * (fullest(effects.columns[:, lookup], columns) - columns.max())
        input_dist += state.id_slopes[lookup] * (fullest(effects.ids[:, lookup], ids) - ids.max())
    return state.simulator.joined_ms(np.asarray(compute), comms, input_dist)


def _others_worst(effects: _Effects, load: NDArray[np.float64], changes: int) -> NDArray[np.float64]:
    """[changes] the largest load among ranks that a change does not touch; changes touch at most three."""
    fullest = np.argsort(-load, kind="stable")[:4]
    place = np.full(len(load), len(fullest))
    place[fullest] = np.arange(len(fullest))
    touched = np.zeros((changes, len(fullest) + 1), dtype=bool)
    touched[effects.owner, place[effects.rank]] = True
    touched[:, -1] = False  # when the fullest are all touched, there is no other rank
    first = touched.argmin(axis=1)
    return np.append(load[fullest], 0.0)[first]


def _effects(state: PlacementState, members: _Members, changes: int) -> _Effects:
    simulator, arrays = state.simulator, state.arrays
    ranks, groups = len(state.load), state.group_ms.shape[1]
    keys, row = np.unique(members.change * ranks + members.rank, return_inverse=True)
    owner, rank = keys // ranks, keys % ranks

    lookups = len(state.columns)
    amounts = np.zeros((len(members.kind), 2 + 2 * lookups))  # bytes, columns and ids by lookup
    amounts[:, :2] = simulator.memory[members.kind]
    each, lookup = np.arange(len(members.kind)), arrays.lookup_of_table[members.table]
    amounts[each, 2 + lookup] = simulator.columns[members.kind]
    amounts[each, 2 + lookups + lookup] = simulator.ids[members.kind]
    change = segment_sums(members.sign[:, None] * amounts, row, len(keys))
    fits = np.ones(changes, dtype=bool)
    np.logical_and.at(fits, owner, (state.free[rank] - change[:, :2] >= 0).all(axis=1))

    cells, cell = np.unique(row * groups + arrays.group_of_table[members.table], return_inverse=True)
    cell_row, cell_group = cells // groups, cells % groups
    delta = segment_sums(members.sign[:, None] * simulator.z[members.kind], cell, len(cells))
    group_ms = state.group_ms[rank]  # [rows, groups, 2]
    group_ms[cell_row, cell_group] = simulator.group_ms(state.sums[rank[cell_row], cell_group] + delta)
    columns = state.columns.T[rank] + change[:, 2 : 2 + lookups]
    return _Effects(owner, rank, group_ms.sum(axis=1), columns, state.ids.T[rank] + change[:, 2 + lookups :], fits)


def _totals(state: PlacementState, effects: _Effects, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
    """[chosen] predicted total, collectives included, as if no table changed its sharding type."""
    simulator = state.simulator
    place = np.full(int(effects.owner.max()) + 1, -1, dtype=np.int64)
    place[chosen] = np.arange(len(chosen))
    rows = np.flatnonzero(place[effects.owner] >= 0)
    at, rank = place[effects.owner[rows]], effects.rank[rows]
    rank_ms = np.repeat(state.rank_ms[None], len(chosen), axis=0)
    columns, ids = (np.repeat(sums[None], len(chosen), axis=0) for sums in (state.columns, state.ids))
    rank_ms[at, rank] = effects.rank_ms[rows]
    columns[at, :, rank] = effects.columns[rows]
    ids[at, :, rank] = effects.ids[rows]
    return simulator.total_ms(rank_ms, simulator.comms_ms(columns), simulator.input_dist_ms(ids))
