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
from torchrec_neuroshard.search.effects import Effects, improves, ranked
from torchrec_neuroshard.search.state import PlacementState, ShardArrays

_WINDOW, _WORTHWHILE = 24, 1e-3  # changes in a row that must gain this much together
_PARTNER_LIMIT = 16  # ranks considered as partners, lightest first
_COUNTS = 0.02  # share of the total below which a pressure is left alone
_BY_TOTAL, _BY_COMPUTE = 12, 36  # changes priced with collectives
_TRIES = 3  # finalists rebuilt before giving up
_ROUNDING = 1e-9  # relative, between a total that is updated and one that is summed up afresh


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
        if not len(changes):
            continue
        effects = _effects(state, _Members.of(state.arrays, changes), len(changes))
        best, totals = ranked(state, effects, _BY_TOTAL, _BY_COMPUTE)
        for index, total_ms in zip(best[:_TRIES].tolist(), totals.tolist()):
            if not structural and total_ms > state.total_ms * (1 + _ROUNDING):
                break  # whole shards keep their tables' sharding types, so this total is what would come out
            arrays, touched = changes.apply(index, state.simulator, state.arrays)
            successor = PlacementState(state.simulator, arrays, state, touched)
            if improves(state, successor):
                return successor
    return None


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


def _effects(state: PlacementState, members: _Members, changes: int) -> Effects:
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
    return Effects(owner, rank, group_ms.sum(axis=1), columns, state.ids.T[rank] + change[:, 2 + lookups :], fits)
