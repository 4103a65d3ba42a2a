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
from typing import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.search.config import SearchConfig
from torchrec_neuroshard.search.splits import Splits

_STEPS_PER_LOOK = 16  # shards placed between two looks at the clock
_SPREAD_NORM = 8
_STATE_BYTES = 12 << 20  # candidates are placed in chunks whose group sums stay below this


@dataclass(frozen=True)
class GreedyPlacement:
    """The best grid point of one candidate.

    Attributes:
        total_ms: predicted time of an iteration; infinite where no grid point fits in memory.
        spread_ms: a high norm of the ranks' compute, which tells candidates with equal bottlenecks apart.
        ranks: [shards] in the order of :func:`~torchrec_neuroshard.search.splits.shards_of`.
    """

    total_ms: float
    spread_ms: float
    ranks: NDArray[np.int64]


@dataclass(frozen=True)
class _Candidate:
    """A candidate's shards in placing order."""

    order: NDArray[np.int64]  # [shards] index into shards_of order
    kinds: NDArray[np.int64]
    groups: NDArray[np.int64]
    lookups: NDArray[np.int64]
    siblings: NDArray[np.int64]  # number of the split table that a shard belongs to; -1 for unsplit tables


def grid_caps(config: SearchConfig) -> NDArray[np.float64]:
    """[grid] caps on a rank's columns as multiples of the mean; the last is no cap at all."""
    caps = np.linspace(1.0, config.grid_span, config.grid)
    caps[-1] = np.inf
    return caps


def place_candidates(
    simulator: PlanSimulator,
    candidates: Sequence[Splits],
    config: SearchConfig,
    out_of_time: Callable[[], bool] = lambda: False,
) -> list[GreedyPlacement]:
    """Places candidates; results are in the order given, and fewer when time runs out."""
    problem = simulator.problem
    if not candidates:
        return []
    prepared = _prepare(simulator, candidates)
    per_candidate = 8 * config.grid * problem.cluster.world_size * len(problem.group_keys) * simulator.z.shape[1]
    chunk = max(1, _STATE_BYTES // max(per_candidate, 1))
    results: list[GreedyPlacement] = []
    for start in range(0, len(prepared), chunk):
        placed = _place_chunk(simulator, prepared[start : start + chunk], config, out_of_time)
        if placed is None:
            break
        results += placed
    return results


def _prepare(simulator: PlanSimulator, candidates: Sequence[Splits]) -> list[_Candidate]:
    """Arranges the shards of every candidate; candidates share most tables' cuts, which are looked up once."""
    problem = simulator.problem
    cuts = list(dict.fromkeys((table, widths) for splits in candidates for table, widths in enumerate(splits)))
    kinds = iter(simulator.kinds((table, width) for table, widths in cuts for width in widths).tolist())
    kinds_of = {(table, widths): [next(kinds) for _ in widths] for table, widths in cuts}
    alone = simulator.alone_ms.sum(axis=1)
    result = []
    for splits in candidates:
        kind = np.asarray([k for cut in enumerate(splits) for k in kinds_of[cut]], dtype=np.int64)
        pieces = np.asarray([len(widths) for widths in splits], dtype=np.int64)
        split = pieces > 1
        group_of_table, lookup_of_table = problem.groups_and_lookups(split)
        number = np.where(split, np.cumsum(split) - 1, -1)
        order = np.argsort(-alone[kind], kind="stable")
        table = np.repeat(np.arange(len(splits)), pieces)[order]
        result.append(_Candidate(order, kind[order], group_of_table[table], lookup_of_table[table], number[table]))
    return result


class _Lineages:
    """Partial placements that (candidate, grid point) pairs share.

    Grid points of a candidate make the same choices until a cap binds, so pairs with equal choices so far
    share one state, and a state is copied when its pairs part.
    """

    def __init__(self, simulator: PlanSimulator, candidates: int, grid: int, split_tables: int) -> None:
        problem, ranks = simulator.problem, simulator.problem.cluster.world_size
        room = candidates * grid
        self.of_pair = np.repeat(np.arange(candidates), grid)  # [pairs] state of each pair
        self.count = candidates  # states in use; the arrays have room for one a pair
        background = simulator.background
        self.sums = np.repeat(background.sums[None], room, axis=0)
        self.group_ms = np.repeat(simulator.group_ms(background.sums)[None], room, axis=0)
        self.load = self.group_ms.sum(axis=(2, 3))  # compute so far, in ms
        self.free = np.repeat(problem.cluster.capacity[None].astype(np.float64), room, axis=0)
        self.columns = np.repeat(background.columns[None], room, axis=0)
        self.ids = np.repeat(background.ids[None], room, axis=0)
        self.held = np.zeros((room, split_tables, ranks), dtype=bool)  # ranks that hold a shard of a split table

    def branch(self, pairs: NDArray[np.int64], ranks: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Gives ``pairs`` that chose different ``ranks`` states of their own.

        Returns:
            States that receive a shard, the rank that each gives it to, and a pair that each serves.
        """
        world = self.free.shape[1]
        keys, first, inverse = np.unique(self.of_pair[pairs] * world + ranks, return_index=True, return_inverse=True)
        parents, chosen = keys // world, keys % world
        again = np.concatenate([[False], parents[1:] == parents[:-1]])  # keys are sorted by parent
        states = parents.copy()
        fresh = self.count + np.arange(int(again.sum()))
        states[again] = fresh
        self.count += fresh.size
        for array in (self.sums, self.group_ms, self.load, self.free, self.columns, self.ids, self.held):
            array[fresh] = array[parents[again]]
        self.of_pair[pairs] = states[inverse]
        return states, chosen, pairs[first]


def _place_chunk(
    simulator: PlanSimulator, candidates: list[_Candidate], config: SearchConfig, out_of_time: Callable[[], bool]
) -> list[GreedyPlacement] | None:
    """Places candidates together; None when time runs out on the way."""
    caps, ranks = grid_caps(config), simulator.problem.cluster.world_size
    count, grid = len(candidates), len(caps)
    longest = max(len(candidate.kinds) for candidate in candidates)
    kinds = np.zeros((count, longest), dtype=np.int64)
    groups, lookups, siblings = np.zeros_like(kinds), np.zeros_like(kinds), np.full_like(kinds, -1)
    active = np.zeros((count, longest), dtype=bool)
    for index, candidate in enumerate(candidates):
        length = len(candidate.kinds)
        kinds[index, :length], groups[index, :length] = candidate.kinds, candidate.groups
        lookups[index, :length], siblings[index, :length] = candidate.lookups, candidate.siblings
        active[index, :length] = True

    owner = np.repeat(np.arange(count), grid)  # [pairs] candidate of each pair
    width = np.where(active, simulator.columns[kinds], 0.0)
    mean = np.maximum(width.sum(axis=1) / ranks, np.finfo(np.float64).tiny)  # sequences without ids have no columns
    allowed = np.tile(caps, count) * mean[owner]  # [pairs]
    states = _Lineages(simulator, count, grid, int(siblings.max()) + 1)
    chosen = np.full((count * grid, longest), -1, dtype=np.int64)
    possible = np.ones(count * grid, dtype=bool)

    for step in range(longest):
        if step % _STEPS_PER_LOOK == 0 and out_of_time():
            return None
        pairs = np.flatnonzero(possible & active[owner, step])
        kind, state = kinds[owner[pairs], step], states.of_pair[pairs]
        fits = (states.free[state] >= simulator.memory[kind][:, None, :]).all(axis=-1)
        used = states.columns.sum(axis=1)[state]
        # A table wider than the cap may still start an empty rank.
        within = (used + width[owner[pairs], step, None] <= allowed[pairs, None] + 1e-9) | (used == 0)
        sibling = siblings[owner[pairs], step]
        usable = fits & within
        related = np.flatnonzero(sibling >= 0)
        usable[related] &= ~states.held[state[related], sibling[related]]
        alive = usable.any(axis=1)
        possible[pairs[~alive]] = False
        pairs = pairs[alive]
        if not pairs.size:
            continue
        rank = np.where(usable[alive], states.load[state[alive]], np.inf).argmin(axis=1)
        chosen[pairs, step] = rank
        target, target_rank, pair = states.branch(pairs, rank)
        kind, group, lookup = kinds[owner[pair], step], groups[owner[pair], step], lookups[owner[pair], step]
        states.sums[target, target_rank, group] += simulator.z[kind]
        states.group_ms[target, target_rank, group] = simulator.group_ms(states.sums[target, target_rank, group])
        states.load[target, target_rank] = states.group_ms[target, target_rank].sum(axis=(1, 2))
        states.free[target, target_rank] -= simulator.memory[kind]
        states.columns[target, lookup, target_rank] += simulator.columns[kind]
        states.ids[target, lookup, target_rank] += simulator.ids[kind]
        sibling = siblings[owner[pair], step]
        related = np.flatnonzero(sibling >= 0)
        states.held[target[related], sibling[related], target_rank[related]] = True

    used_states = states.count
    total = simulator.total_ms(
        states.group_ms[:used_states].sum(axis=2),
        simulator.comms_ms(states.columns[:used_states]),
        simulator.input_dist_ms(states.ids[:used_states]),
    )
    spread = np.linalg.norm(states.load[:used_states], ord=_SPREAD_NORM, axis=1)
    by_pair = np.where(possible, total[states.of_pair], np.inf).reshape(count, grid)
    best = by_pair.argmin(axis=1)
    results = []
    for index, candidate in enumerate(candidates):
        winner = index * grid + int(best[index])
        ranks_of = _unsort(candidate.order, chosen[winner, : len(candidate.kinds)])
        results.append(
            GreedyPlacement(float(by_pair[index, best[index]]), float(spread[states.of_pair[winner]]), ranks_of)
        )
    return results


def _unsort(order: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.int64]:
    result = np.empty_like(values)
    result[order] = values
    return result
