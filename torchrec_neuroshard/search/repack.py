"""Large neighbourhood search [Shaw1998using]: a few tables are taken off a few ranks and put back the best other way.

Moves around the slowest rank end where two or three tables have to change places, or cuts, at once, above all when
memory is tight. Here all ways to put them back are weighed, cuts included: by what shards cost alone first, the best of
them as fused groups. The way taken may be a little worse than the best plan so far, ever less so [Dueck1993new].

References:
    [Dueck1993new] G. Dueck. New optimization heuristics: the great deluge algorithm and the record-to-record travel.
        Journal of Computational Physics 104, 1993.
    [Shaw1998using] P. Shaw. Using constraint programming and local search methods to solve vehicle routing problems.
        CP 1998.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, Placement, ShardingProblem
from torchrec_neuroshard.search.effects import Effects, improves, ranked
from torchrec_neuroshard.search.state import PlacementState, ShardArrays

_RANKS = (2, 3, 3, 4)  # whose tables are put back at a time
_WAYS = 16_000  # weighed at a time
_EXACT = 160  # of them priced as fused groups
_BY_TOTAL, _BY_COMPUTE = 8, 8  # of these priced with collectives
_TRIES = 2
_RETURNED, _NEARLY_AS_GOOD = 12, 1.01  # placements, and times the best one's cost
_SLACK = 0.02  # share by which a way taken may be worse than the best plan, at the start
# Shares of the columns at which a table is cut in two, by the number of tables taken off.
_SHARES = {
    1: tuple(part / 32 for part in range(1, 32)),
    2: tuple(part / 16 for part in range(1, 16)),
    3: (0.25, 0.5, 0.75),
    4: (0.5,),
}
_CUT_IN_THREE = 3  # tables, at most, are


def repack(
    simulator: PlanSimulator,
    placement: Placement,
    rounds: int,
    patience: int,
    seed: int,
    out_of_time: Callable[[], bool],
) -> list[Placement]:
    """Takes tables off and puts them back, at most ``rounds`` times.

    Returns the best placement met, never worse than the given one, then others that are nearly as good.

    Args:
        simulator: prices plans.
        placement: the start.
        rounds: most tries.
        patience: stops after so many tries in a row that find nothing.
        seed: of the choice of ranks and tables.
        out_of_time: asked before each try.
    """
    rng = np.random.default_rng(seed)
    state = best = PlacementState.of(simulator, placement.shards)
    options: dict[tuple[int, int, int], _Options] = {}
    met = [state]
    failures = 0
    for index in range(rounds):
        if out_of_time() or failures >= patience:
            break
        failures += 1
        limit = best.total_ms * (1 + _SLACK * (1 - index / rounds))
        found = _try(state, rng, limit, options)
        if found is None:
            continue
        state = found
        met.append(state)
        if improves(best, state):
            best, failures = state, 0
    close = sorted((state.total_ms, index) for index, state in enumerate(met))[:_RETURNED]
    others = [met[index] for total_ms, index in close if total_ms <= best.total_ms * _NEARLY_AS_GOOD]
    return list(dict.fromkeys(state.arrays.placement(simulator.problem) for state in (best, *others)))


def _try(
    state: PlacementState, rng: np.random.Generator, limit: float, known: dict[tuple[int, int, int], _Options]
) -> PlacementState | None:
    """The state after the best other way to put back some tables; None where each takes longer than ``limit`` ms.

    ``known`` keeps the options of (table, number of ranks, number of tables).
    """
    simulator, arrays = state.simulator, state.arrays
    taken = _choose(state, rng)
    if taken is None:
        return None
    ranks, tables = taken
    keys = [(table, len(ranks), len(tables)) for table in tables.tolist()]
    for key in keys:
        if key not in known:
            known[key] = _Options.of(simulator, *key)
    options = [known[key] for key in keys]
    ways = _ways([len(option.kinds) for option in options], rng)
    kinds = np.stack([option.kinds[way] for option, way in zip(options, ways.T)], axis=1)  # [ways, tables, ranks]
    off = np.isin(arrays.table, tables)
    kinds = kinds[(kinds != _kinds_now(arrays, tables, ranks)).any(axis=(1, 2))]
    base = _Base.of(state, ranks, arrays, off)
    kinds = kinds[_fitting(simulator, base, kinds)]
    kinds = kinds[_promising(simulator, base, kinds)]
    if not len(kinds):
        return None
    effects = _effects(state, base, tables, kinds)
    slack = limit / state.total_ms - 1
    best, _ = ranked(state, effects, _BY_TOTAL, _BY_COMPUTE, slack)
    for index in best[:_TRIES].tolist():
        rebuilt = _rebuilt(simulator, arrays, off, tables, ranks, kinds[index])
        successor = PlacementState(simulator, rebuilt, state, ranks)
        if successor.total_ms <= limit:
            return successor
    return None


def _kinds_now(arrays: ShardArrays, tables: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """[tables, ranks] kind of the shard that each rank has now; -1 for none."""
    kinds = np.full((len(tables), len(ranks)), -1, dtype=np.int64)
    for place, table in enumerate(tables.tolist()):
        mine = np.flatnonzero(arrays.table == table)
        kinds[place, np.searchsorted(ranks, arrays.rank[mine])] = arrays.kind[mine]
    return kinds


def _choose(state: PlacementState, rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Ranks, the slowest among them, and some tables that lie on these ranks alone, one of them on the slowest."""
    arrays, world = state.arrays, len(state.load)
    pressures = [pressure for pressure in state.pressures() if pressure.share_ms > 0]
    if world < 2 or not pressures:
        return None
    shares = np.asarray([pressure.share_ms for pressure in pressures])
    slow = int(pressures[int(rng.choice(len(shares), p=shares / shares.sum()))].load.argmax())
    others = np.delete(np.arange(world), slow)
    partners = min(int(rng.choice(_RANKS)), world) - 1
    ranks = np.sort(np.append(rng.choice(others, size=partners, replace=False), slow))
    inside = (arrays.held[:, ranks].sum(axis=1) == arrays.pieces) & (arrays.pieces > 0)
    first = np.flatnonzero(inside & (arrays.held[:, slow] > 0))
    if not first.size:
        return None
    chosen = int(rng.choice(first))
    rest = np.flatnonzero(inside)
    rest = rest[rest != chosen]
    more = min(int(rng.choice(list(_SHARES))) - 1, len(rest))
    return ranks, np.append(chosen, rng.choice(rest, size=more, replace=False))


@dataclass(frozen=True)
class _Options:
    """Ways to put one table on the chosen ranks.

    Attributes:
        kinds: [ways, ranks] kind of the shard that each rank gets; -1 for none.
    """

    kinds: NDArray[np.int64]

    @classmethod
    def of(cls, simulator: PlanSimulator, table: int, ranks: int, tables: int) -> _Options:
        widths = np.asarray(
            sorted({way for cut in _cuts(simulator.problem, table, ranks, tables) for way in _homes(cut, ranks)})
        )
        kinds = np.full(widths.shape, -1, dtype=np.int64)
        held = widths > 0
        kinds[held] = simulator.kinds((table, width) for width in widths[held].tolist())
        return cls(kinds)


def _cuts(problem: ShardingProblem, table: int, ranks: int, tables: int) -> Iterator[tuple[int, ...]]:
    """Widths of a table's shards, whole, in two, in three: the finer, the fewer tables are taken off."""
    dim = problem.tables[table].embedding_dim
    yield (dim,)
    if not problem.splittable(table) or dim % WIDTH_MULTIPLE:
        return
    least = -(-problem.options[table].min_width // WIDTH_MULTIPLE)
    units = dim // WIDTH_MULTIPLE
    firsts = {round(units * share) for share in _SHARES[tables]}
    yield from (
        (WIDTH_MULTIPLE * first, WIDTH_MULTIPLE * (units - first))
        for first in firsts
        if least <= first <= units - least
    )
    if ranks > 2 and tables <= _CUT_IN_THREE:
        for first, second in ((units // 2, units // 4), (units // 3, units // 3)):
            third = units - first - second
            if min(first, second, third) >= least:
                yield tuple(WIDTH_MULTIPLE * piece for piece in (first, second, third))


def _homes(cut: tuple[int, ...], ranks: int) -> set[tuple[int, ...]]:
    """Ways to put the shards on different ranks, as [ranks] widths."""
    return set(itertools.permutations((*cut, *(0,) * (ranks - len(cut))))) if len(cut) <= ranks else set()


def _ways(counts: list[int], rng: np.random.Generator) -> NDArray[np.int64]:
    """[ways, tables] an option of each table: all combinations, or a sample where there are too many."""
    total = math.prod(counts)
    flat = np.arange(total) if total <= _WAYS else np.sort(rng.choice(total, size=_WAYS, replace=False))
    return np.stack(np.unravel_index(flat, counts), axis=1)


@dataclass(frozen=True)
class _Base:
    """The chosen ranks without the tables taken off.

    Attributes:
        ranks: [n] the ranks.
        sums: [n, groups, z_dim] of the shards that stay.
        group_ms: [n, groups, 2] what those cost.
        columns, ids: [n, lookups].
        free: [n, 2] bytes.
    """

    ranks: NDArray[np.int64]
    sums: NDArray[np.float64]
    group_ms: NDArray[np.float64]
    columns: NDArray[np.float64]
    ids: NDArray[np.float64]
    free: NDArray[np.float64]

    @classmethod
    def of(cls, state: PlacementState, ranks: NDArray[np.int64], arrays: ShardArrays, off: NDArray[np.bool_]) -> _Base:
        simulator = state.simulator
        place = np.full(len(state.load), -1, dtype=np.int64)
        place[ranks] = np.arange(len(ranks))
        stays = (place[arrays.rank] >= 0) & ~off
        at, kind = place[arrays.rank[stays]], arrays.kind[stays]
        sums = simulator.background.sums[ranks].copy()
        columns = simulator.background.columns.T[ranks].copy()
        ids = simulator.background.ids.T[ranks].copy()
        free = simulator.problem.cluster.capacity[ranks].astype(np.float64)
        np.add.at(sums, (at, arrays.group[stays]), simulator.z[kind])
        np.add.at(columns, (at, arrays.lookup[stays]), simulator.columns[kind])
        np.add.at(ids, (at, arrays.lookup[stays]), simulator.ids[kind])
        np.add.at(free, at, -simulator.memory[kind])
        return cls(ranks, sums, simulator.group_ms(sums), columns, ids, free)


def _fitting(simulator: PlanSimulator, base: _Base, kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """Ways that fit in memory."""
    held = (kinds >= 0)[..., None]
    needed = np.where(held, simulator.memory[kinds], 0.0).sum(axis=1)  # [ways, ranks, 2]
    fits: NDArray[np.int64] = np.flatnonzero((needed <= base.free).all(axis=(1, 2)))
    return fits


def _promising(simulator: PlanSimulator, base: _Base, kinds: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ways whose fullest rank is least full, were shards to cost what they cost alone."""
    if len(kinds) <= _EXACT:
        return np.arange(len(kinds))
    alone = np.where(kinds >= 0, simulator.alone_ms.sum(axis=1)[kinds], 0.0).sum(axis=1)  # [ways, ranks]
    load = alone + base.group_ms.sum(axis=(1, 2))
    order = np.lexsort((load.sum(axis=1), load.max(axis=1)))[:_EXACT]
    return np.sort(order)


def _effects(state: PlacementState, base: _Base, tables: NDArray[np.int64], kinds: NDArray[np.int64]) -> Effects:
    """What each way does to the ranks, as if no table changed its sharding type."""
    simulator, arrays = state.simulator, state.arrays
    ways, _, ranks = kinds.shape
    sums = np.repeat(base.sums[None], ways, axis=0)  # [ways, ranks, groups, z_dim]
    columns, ids = np.repeat(base.columns[None], ways, axis=0), np.repeat(base.ids[None], ways, axis=0)
    for place, table in enumerate(tables.tolist()):
        kind = kinds[:, place]
        held = kind >= 0
        lookup = arrays.lookup_of_table[table]
        sums[:, :, arrays.group_of_table[table]] += np.where(held[..., None], simulator.z[kind], 0.0)
        columns[:, :, lookup] += np.where(held, simulator.columns[kind], 0.0)
        ids[:, :, lookup] += np.where(held, simulator.ids[kind], 0.0)
    rank_ms = simulator.group_ms(sums).sum(axis=2).reshape(ways * ranks, 2)
    lookups = columns.shape[2]
    return Effects(
        np.repeat(np.arange(ways), ranks),
        np.tile(base.ranks, ways),
        rank_ms,
        columns.reshape(-1, lookups),
        ids.reshape(-1, lookups),
        np.ones(ways, dtype=bool),
    )


def _rebuilt(
    simulator: PlanSimulator,
    arrays: ShardArrays,
    off: NDArray[np.bool_],
    tables: NDArray[np.int64],
    ranks: NDArray[np.int64],
    kinds: NDArray[np.int64],
) -> ShardArrays:
    """The shards with the tables put back as ``kinds``, [tables, ranks], says."""
    place, at = np.nonzero(kinds >= 0)
    kind = kinds[place, at]
    width = simulator.widths[kind]
    end = np.cumsum(width)
    first = np.searchsorted(place, place)  # where each table's shards begin
    offset = end - width - (end - width)[first]
    columns = np.stack([tables[place], offset, width, ranks[at]], axis=1)
    return ShardArrays(
        simulator,
        np.concatenate([arrays.columns[~off], columns]),
        np.concatenate([arrays.kind[~off], kind]),
        arrays,
    )
