"""What changes to a placement do to the ranks they touch, and which of them promise most."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.search.state import PlacementState

_TOLERANCE = 2e-4  # relative gain below which a change is not worth taking


@dataclass(frozen=True)
class Effects:
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


def improves(before: PlacementState, after: PlacementState) -> bool:
    """A smaller total, or an equal one with less on the loaded ranks (so that ties get resolved)."""
    if after.total_ms < before.total_ms * (1 - _TOLERANCE):
        return True
    if after.total_ms > before.total_ms:
        return False
    old, new = np.sort(before.load)[::-1], np.sort(after.load)[::-1]
    differs = np.flatnonzero(np.abs(old - new) > _TOLERANCE * old[0])
    return bool(differs.size) and bool(new[differs[0]] < old[differs[0]])


def ranked(
    state: PlacementState, effects: Effects, by_total: int, by_compute: int, slack: float = 0.0
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Changes that fit and relieve the ranks they touch: their indices and predicted totals, least total first.

    Changes are chosen by the linear estimate of their total, and by compute alone: the collectives of a measured model
    are no straight line.

    Args:
        state: what is changed.
        effects: of the changes.
        by_total, by_compute: how many, by either, are priced with their collectives.
        slack: share by which the total may rise.
    """
    changes = len(effects.fits)
    after = promised_ms(state, effects)
    worst, before = np.zeros(changes), np.zeros(changes)
    np.maximum.at(worst, effects.owner, effects.rank_ms.sum(axis=1))
    np.maximum.at(before, effects.owner, state.load[effects.rank])
    # Where passes are waited for apart, a rank's sum may rise while the slower pass falls.
    relieves = worst < before * (1.05 if state.simulator.passes_apart else 1.0)
    gains = after < state.total_ms * (1 + slack - 1e-9)
    rules = ((gains, after, worst, by_total), (relieves, worst, after, by_compute))
    parts = []
    for promising, first, second, most in rules:
        indices = np.flatnonzero(effects.fits & promising)
        parts.append(indices[np.lexsort((second[indices], first[indices]))][:most])
    chosen = np.unique(np.concatenate(parts))
    total = _totals(state, effects, chosen) if chosen.size else np.zeros(0)
    order = np.argsort(total, kind="stable")
    return chosen[order], total[order]


def promised_ms(state: PlacementState, effects: Effects) -> NDArray[np.float64]:
    """[changes] ms of an iteration, by the slopes of the collectives."""
    changes = len(effects.fits)

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


def _others_worst(effects: Effects, load: NDArray[np.float64], changes: int) -> NDArray[np.float64]:
    """[changes] the largest load among ranks that a change does not touch."""
    most_touched = int(np.bincount(effects.owner).max(initial=0))
    fullest = np.argsort(-load, kind="stable")[: most_touched + 1]
    place = np.full(len(load), len(fullest))
    place[fullest] = np.arange(len(fullest))
    touched = np.zeros((changes, len(fullest) + 1), dtype=bool)
    touched[effects.owner, place[effects.rank]] = True
    touched[:, -1] = False  # when the fullest are all touched, there is no other rank
    first = touched.argmin(axis=1)
    return np.append(load[fullest], 0.0)[first]


def _totals(state: PlacementState, effects: Effects, chosen: NDArray[np.int64]) -> NDArray[np.float64]:
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
