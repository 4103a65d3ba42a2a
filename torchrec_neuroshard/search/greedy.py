"""Greedy grid placement of split candidates, batched over candidates and grid points.

Shards are taken by falling cost; each goes to the rank with the least compute so far among those with enough
memory and a column sum under the grid point's cap [Zha2023neuroshard, section 3.3]. Only the group that just
grew is predicted again, so a step costs one head evaluation per (candidate, grid point).

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.search.config import SearchConfig
from torchrec_neuroshard.search.splits import Splits, shards_of

_STATE_BYTES = 96 << 20  # candidates are placed in chunks whose group sums stay below this


@dataclass(frozen=True)
class GreedyPlacement:
    """The best grid point of one candidate.

    Attributes:
        total_ms: predicted time of an iteration; infinite where no grid point fits in memory.
        ranks: [shards] in the order of :func:`~torchrec_neuroshard.search.splits.shards_of`.
    """

    total_ms: float
    ranks: NDArray[np.int64]


@dataclass(frozen=True)
class _Candidate:
    """A candidate's shards in placing order."""

    order: NDArray[np.int64]  # [shards] index into shards_of order
    kinds: NDArray[np.int64]
    groups: NDArray[np.int64]
    lookups: NDArray[np.int64]


def grid_caps(config: SearchConfig) -> NDArray[np.float64]:
    """[grid] caps on a rank's columns as multiples of the mean; the last is no cap at all."""
    caps = np.linspace(1.0, config.grid_span, config.grid)
    caps[-1] = np.inf
    return caps


def place_candidates(
    simulator: PlanSimulator, candidates: Sequence[Splits], config: SearchConfig
) -> list[GreedyPlacement]:
    """Places every candidate; results are in the order given."""
    problem = simulator.problem
    prepared = [_prepare(simulator, splits) for splits in candidates]
    per_candidate = 8 * config.grid * problem.cluster.world_size * len(problem.group_keys) * simulator.z.shape[1]
    chunk = max(1, _STATE_BYTES // max(per_candidate, 1))
    results: list[GreedyPlacement] = []
    for start in range(0, len(prepared), chunk):
        results += _place_chunk(simulator, prepared[start : start + chunk], config)
    return results


def _prepare(simulator: PlanSimulator, splits: Splits) -> _Candidate:
    problem = simulator.problem
    shards = list(shards_of(splits))
    kinds = simulator.kinds((table, width) for table, _, width in shards)
    types = problem.sharding_types([len(widths) > 1 for widths in splits])
    alone = simulator.alone_ms[kinds].sum(axis=1)
    order = np.asarray(sorted(range(len(shards)), key=lambda i: (-alone[i], i)), dtype=np.int64)
    groups = np.asarray([problem.group_of(table, types[table]) for table, _, _ in shards], dtype=np.int64)
    lookups = np.asarray([problem.lookup_of(table, types[table]) for table, _, _ in shards], dtype=np.int64)
    return _Candidate(order, kinds[order], groups[order], lookups[order])


def _place_chunk(
    simulator: PlanSimulator, candidates: list[_Candidate], config: SearchConfig
) -> list[GreedyPlacement]:
    problem, cluster = simulator.problem, simulator.problem.cluster
    caps, ranks = grid_caps(config), cluster.world_size
    count, grid = len(candidates), len(caps)
    longest = max(len(candidate.kinds) for candidate in candidates)
    placing, point = np.arange(count), np.arange(grid)[None, :]

    kinds = np.zeros((count, longest), dtype=np.int64)
    groups, lookups, active = np.zeros_like(kinds), np.zeros_like(kinds), np.zeros((count, longest), dtype=bool)
    for index, candidate in enumerate(candidates):
        length = len(candidate.kinds)
        kinds[index, :length], groups[index, :length] = candidate.kinds, candidate.groups
        lookups[index, :length], active[index, :length] = candidate.lookups, True

    width = np.where(active, simulator.columns[kinds], 0.0)
    allowed = caps[None, :] * width.sum(axis=1, keepdims=True) / ranks  # [candidates, grid]
    sums = np.zeros((count, grid, ranks, len(problem.group_keys), simulator.z.shape[1]))
    group_ms = np.zeros((count, grid, ranks, len(problem.group_keys), 2))
    load = np.zeros((count, grid, ranks))
    free = np.broadcast_to(cluster.capacity, (count, grid, ranks, 2)).copy()
    columns = np.zeros((count, grid, len(problem.lookup_keys), ranks))
    ids = np.zeros_like(columns)
    chosen = np.full((count, grid, longest), -1, dtype=np.int64)
    possible = np.ones((count, grid), dtype=bool)

    for step in range(longest):
        kind, group, lookup, live = kinds[:, step], groups[:, step], lookups[:, step], active[:, step]
        fits = (free >= simulator.memory[kind][:, None, None, :]).all(axis=-1)
        within = columns.sum(axis=2) + width[:, step, None, None] <= allowed[:, :, None] + 1e-9
        # A table wider than the cap may still start an empty rank.
        within |= columns.sum(axis=2) == 0
        usable = fits & within
        possible &= usable.any(axis=-1) | ~live[:, None]
        rank = np.where(usable, load, np.inf).argmin(axis=-1)  # [candidates, grid]
        update = possible & live[:, None]
        chosen[:, :, step] = np.where(update, rank, -1)
        row, cell = np.nonzero(update)
        if not row.size:
            continue
        r, q = rank[row, cell], group[row]
        sums[row, cell, r, q] += simulator.z[kind[row]]
        fresh = simulator.group_ms(sums[row, cell, r, q])
        load[row, cell, r] += fresh.sum(axis=-1) - group_ms[row, cell, r, q].sum(axis=-1)
        group_ms[row, cell, r, q] = fresh
        free[row, cell, r] -= simulator.memory[kind[row]]
        columns[row, cell, lookup[row], r] += simulator.columns[kind[row]]
        ids[row, cell, lookup[row], r] += simulator.ids[kind[row]]

    flat = (count * grid, len(problem.lookup_keys), ranks)
    total = simulator.total_ms(
        group_ms.sum(axis=3).reshape(count * grid, ranks, 2),
        simulator.comms_ms(columns.reshape(flat)),
        simulator.input_dist_ms(ids.reshape(flat)),
    ).reshape(count, grid)
    total = np.where(possible, total, np.inf)
    best = total.argmin(axis=1)
    assert point.shape == (1, grid)
    return [
        GreedyPlacement(
            float(total[index, best[index]]),
            _unsort(candidates[index].order, chosen[index, best[index], : len(candidates[index].kinds)]),
        )
        for index in placing
    ]


def _unsort(order: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    result = np.empty_like(values)
    result[order] = values
    return result
