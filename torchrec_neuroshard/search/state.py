"""A placement with its sums by rank, which a change updates on the ranks that it touches.

Sums of touched ranks are rebuilt over their shards in canonical order, so that they do not depend on the path and no
rounding error piles up.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Placement, Shard, ShardingProblem

# A shard adds to a group between about half and twice what it costs alone; a change that could not help even if it
# added this little is not priced.
_LEAST_SHARE = 0.15
_NEARLY = 0.02  # relative distance at which compute and the input collective that it hides both count
_LOWERED = 0.9  # share of the fullest rank's load down to which the slope of a collective is taken


class ShardArrays:
    """The shards of a placement as arrays, in canonical order: by (table, offset).

    Attributes:
        columns: [shards, 4] table, offset, width and rank.
        table, offset, width, rank: [shards] the same.
        kind: [shards] index into the simulator's arrays.
        group, lookup: [shards] the TBE and the lookup that serve each.
        alone_ms: [shards] predicted forward plus backward of each shard alone.
        held: [tables, ranks] how many shards of a table a rank holds.
        pieces: [tables] number of shards.
        group_of_table, lookup_of_table: [tables] the same for all shards of a table.
    """

    def __init__(
        self, simulator: PlanSimulator, columns: NDArray[np.int64], kind: NDArray[np.int64], like: ShardArrays | None
    ) -> None:
        """Arranges shards; ``like`` are those of a placement of the same problem, whose tables' groups may be kept."""
        problem = simulator.problem
        order = np.lexsort((columns[:, 1], columns[:, 0]))
        self.columns, self.kind = columns[order], kind[order]
        self.table, self.offset, self.width, self.rank = self.columns.T
        self.alone_ms = simulator.alone_ms[self.kind].sum(axis=1)
        self.pieces = np.bincount(self.table, minlength=len(problem.tables))
        self.held = np.zeros((len(problem.tables), problem.cluster.world_size), dtype=np.int64)
        self.held[self.table, self.rank] += 1  # the search never puts two shards of a table on one rank
        of_tables = (
            (like.group_of_table, like.lookup_of_table)
            if like is not None and np.array_equal(self.pieces > 1, like.pieces > 1)
            else problem.groups_and_lookups(self.pieces > 1)
        )
        self.group_of_table: NDArray[np.int64] = of_tables[0]
        self.lookup_of_table: NDArray[np.int64] = of_tables[1]
        self.group, self.lookup = self.group_of_table[self.table], self.lookup_of_table[self.table]

    @classmethod
    def of(cls, simulator: PlanSimulator, shards: tuple[Shard, ...]) -> ShardArrays:
        """Arranges the shards of a placement."""
        columns = np.asarray([(s.table, s.offset, s.width, s.rank) for s in shards], dtype=np.int64).reshape(-1, 4)
        return cls(simulator, columns, simulator.kinds((s.table, s.width) for s in shards), None)

    def __len__(self) -> int:
        return len(self.table)

    def placement(self, problem: ShardingProblem) -> Placement:
        """The shards as a placement."""
        return problem.placement(tuple(Shard(*row) for row in self.columns.tolist()), (self.pieces > 1).tolist())


@dataclass(frozen=True)
class Pressure:
    """Something that the ranks with the most of it decide: compute, or the columns or ids that a lookup moves.

    Attributes:
        weight: ms of an iteration per unit of the fullest ranks' load.
        load: [ranks] how much each has of it.
        size: [shards] what each shard adds, were it alone.
        least_share: share of ``size`` that a rank is rid of at least when a shard leaves it.
    """

    weight: float
    load: NDArray[np.float64]
    size: NDArray[np.float64]
    least_share: float = 1.0

    @property
    def share_ms(self) -> float:
        """What the fullest ranks cost an iteration."""
        return self.weight * float(self.load.max())


class PlacementState:
    """A placement with its sums by rank and its predicted cost.

    Attributes:
        simulator: prices plans.
        arrays: the shards.
        sums: [ranks, groups, z_dim] of the shards' contributions.
        columns, ids: [lookups, ranks] output columns and ids per sample.
        free: [ranks, 2] bytes left.
        group_ms: [ranks, groups, 2] forward and backward.
        rank_ms: [ranks, 2] the same, over all groups.
        load: [ranks] compute.
        compute_ms, comms_ms, input_dist_ms: the slowest ranks' compute, and the collectives.
        column_slopes, id_slopes: [lookups] ms of the collectives per column and id of the fullest ranks.
        total_ms: predicted time of an iteration.
    """

    def __init__(
        self,
        simulator: PlanSimulator,
        arrays: ShardArrays,
        before: PlacementState | None = None,
        touched: NDArray[np.int64] | None = None,
    ) -> None:
        """Sums up shards; with ``before``, only those of the ranks ``touched`` by a change to that placement."""
        problem, ranks = simulator.problem, simulator.problem.cluster.world_size
        self.simulator, self.arrays = simulator, arrays
        background = simulator.background
        if before is None or touched is None or not _same_groups(arrays, before.arrays):
            touched = np.arange(ranks)
            self.sums = background.sums.copy()
            self.columns = background.columns.copy()
            self.ids = background.ids.copy()
            self.free = problem.cluster.capacity.astype(np.float64).copy()
            self.group_ms = np.zeros((ranks, len(problem.group_keys), 2))
            inside = np.ones(len(arrays), dtype=bool)
        else:
            self.sums, self.columns, self.ids = before.sums.copy(), before.columns.copy(), before.ids.copy()
            self.free, self.group_ms = before.free.copy(), before.group_ms.copy()
            self.sums[touched], self.ids[:, touched] = background.sums[touched], background.ids[:, touched]
            self.columns[:, touched] = background.columns[:, touched]
            self.free[touched] = problem.cluster.capacity[touched]
            inside = np.isin(arrays.rank, touched)
        rank, kind = arrays.rank[inside], arrays.kind[inside]
        np.add.at(self.sums, (rank, arrays.group[inside]), simulator.z[kind])
        np.add.at(self.columns, (arrays.lookup[inside], rank), simulator.columns[kind])
        np.add.at(self.ids, (arrays.lookup[inside], rank), simulator.ids[kind])
        np.add.at(self.free, rank, -simulator.memory[kind])
        self.group_ms[touched] = simulator.group_ms(self.sums[touched])
        self.rank_ms = self.group_ms.sum(axis=1)
        self.load = self.rank_ms.sum(axis=1)
        self.compute_ms = float(simulator.compute_objective(self.rank_ms))
        comms = simulator.comms_ms(_and_lowered(self.columns)).sum(axis=1)
        input_dist = simulator.input_dist_ms(_and_lowered(self.ids))
        self.comms_ms, self.input_dist_ms = float(comms[0]), float(input_dist[0])
        self.column_slopes = _slopes(comms, self.columns)
        self.id_slopes = _slopes(input_dist, self.ids)
        rank_ms = self.rank_ms[None]
        self.total_ms = float(simulator.total_ms(rank_ms, comms[:1, None], input_dist[:1])[0])

    @classmethod
    def of(cls, simulator: PlanSimulator, shards: tuple[Shard, ...]) -> PlacementState:
        """The state of a placement."""
        return cls(simulator, ShardArrays.of(simulator, shards))

    def pressures(self) -> list[Pressure]:
        """What to relieve: compute (both passes together, or each), columns and ids of each lookup."""
        arrays, simulator = self.arrays, self.simulator
        if simulator.passes_apart:
            alone = simulator.alone_ms[arrays.kind]
            result = [Pressure(1.0, self.rank_ms[:, i], alone[:, i], _LEAST_SHARE) for i in (0, 1)]
            input_counts = True
        else:
            input_counts = self.input_dist_ms > self.compute_ms * (1 - _NEARLY)
            compute_counts = self.input_dist_ms < self.compute_ms * (1 + _NEARLY)
            result = [Pressure(float(compute_counts), self.load, arrays.alone_ms, _LEAST_SHARE)]
        for lookup, of_lookup in ((index, arrays.lookup == index) for index in range(len(self.columns))):
            columns = np.where(of_lookup, simulator.columns[arrays.kind], 0.0)
            result.append(Pressure(float(self.column_slopes[lookup]), self.columns[lookup], columns))
            if input_counts:
                ids = np.where(of_lookup, simulator.ids[arrays.kind], 0.0)
                result.append(Pressure(float(self.id_slopes[lookup]), self.ids[lookup], ids))
        return result


def _same_groups(arrays: ShardArrays, before: ShardArrays) -> bool:
    return np.array_equal(arrays.group_of_table, before.group_of_table) and np.array_equal(
        arrays.lookup_of_table, before.lookup_of_table
    )


def _and_lowered(loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """[1 + lookups, lookups, ranks]: the loads, then once for each lookup with its fullest ranks lowered a little."""
    result = np.repeat(loads[None], 1 + len(loads), axis=0)
    for lookup, load in enumerate(loads):
        result[1 + lookup, lookup] = np.minimum(load, _LOWERED * load.max())
    return result


def _slopes(ms: NDArray[np.float64], loads: NDArray[np.float64]) -> NDArray[np.float64]:
    """[lookups] ms per unit of the fullest ranks' load, from the times of :func:`_and_lowered`; never negative."""
    step = (1 - _LOWERED) * loads.max(axis=1)
    return np.maximum(ms[0] - ms[1:], 0.0) / np.where(step > 0, step, np.inf)
