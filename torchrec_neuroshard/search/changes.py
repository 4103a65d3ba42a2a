"""Changes to a placement, enumerated as arrays: moves, swaps, splits and merges around one rank.

A change removes one or two shards and adds one or two. TorchRec slices the shards of a table that share a
rank as if all were as wide as the first, so no change puts two shards of a table on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import ShardingProblem
from torchrec_neuroshard.search.splits import divide
from torchrec_neuroshard.search.state import Pressure, ShardArrays

_SPLIT_SHARES = (0.25, 0.5, 0.75)
_UNEQUAL = 0.4
_SWAP_LIMIT = 1500
_NONE = -1


@dataclass(frozen=True)
class Changes:
    """A batch of changes.

    Attributes:
        removed: [changes, 2] indices of shards that go; -1 for none.
        added: [changes, 2, 4] (table, offset, width, rank) of shards that come; width 0 for none.
        added_kind: [changes, 2] their kinds; -1 for none.
    """

    removed: NDArray[np.int64]
    added: NDArray[np.int64]
    added_kind: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.removed)

    @classmethod
    def concatenate(cls, parts: list[Changes]) -> Changes:
        """Stacks batches."""
        if not parts:
            empty = np.zeros((0, 2), dtype=np.int64)
            return cls(empty, np.zeros((0, 2, 4), dtype=np.int64), empty)
        return cls(
            np.concatenate([p.removed for p in parts]),
            np.concatenate([p.added for p in parts]),
            np.concatenate([p.added_kind for p in parts]),
        )

    def apply(self, index: int, simulator: PlanSimulator, arrays: ShardArrays) -> tuple[ShardArrays, NDArray[np.int64]]:
        """The shards after one of the changes, and the ranks that it touches."""
        gone = self.removed[index][self.removed[index] >= 0]
        come = self.added_kind[index] >= 0
        columns = np.concatenate([np.delete(arrays.columns, gone, axis=0), self.added[index][come]])
        kind = np.concatenate([np.delete(arrays.kind, gone), self.added_kind[index][come]])
        touched = np.unique(np.concatenate([arrays.rank[gone], self.added[index][come, 3]]))
        return ShardArrays(simulator, columns, kind, arrays), touched


def moves(arrays: ShardArrays, pressure: Pressure, slow: int, ranks: NDArray[np.int64]) -> Changes:
    """Each shard of the slow rank to each of ``ranks``."""
    here = np.flatnonzero((arrays.rank == slow) & (pressure.size > 0))
    shard, rank = (grid.ravel() for grid in np.meshgrid(here, ranks, indexing="ij"))
    gap = pressure.load[slow] - pressure.load[rank]
    allowed = (arrays.held[arrays.table[shard], rank] == 0) & (pressure.least_share * pressure.size[shard] < gap)
    shard, rank = shard[allowed], rank[allowed]
    none = np.full(len(shard), _NONE)
    return Changes(
        np.column_stack([shard, none]),
        np.stack([_placed(arrays, shard, rank), np.zeros((len(shard), 4), dtype=np.int64)], axis=1),
        np.column_stack([arrays.kind[shard], none]),
    )


def swaps(arrays: ShardArrays, pressure: Pressure, slow: int, ranks: NDArray[np.int64]) -> Changes:
    """Each shard of the slow rank with each shard of ``ranks``."""
    chosen = np.zeros(len(pressure.load), dtype=bool)
    chosen[ranks] = True
    here = np.flatnonzero(arrays.rank == slow)
    there = np.flatnonzero(chosen[arrays.rank])
    first, second = (grid.ravel() for grid in np.meshgrid(here, there, indexing="ij"))
    gain = pressure.size[first] - pressure.size[second]
    sensible = (pressure.least_share * gain < pressure.load[slow] - pressure.load[arrays.rank[second]]) & (
        gain > -_UNEQUAL * pressure.size[first]
    )
    first, second, gain = first[sensible], second[sensible], gain[sensible]
    same = arrays.table[first] == arrays.table[second]
    free = (arrays.held[arrays.table[first], arrays.rank[second]] == 0) & (arrays.held[arrays.table[second], slow] == 0)
    allowed = (same & (arrays.width[first] != arrays.width[second])) | (~same & free)
    first, second, gain = first[allowed], second[allowed], gain[allowed]
    if len(first) > _SWAP_LIMIT:  # the best swaps level the two ranks, were costs to add up
        gap = pressure.load[slow] - pressure.load[arrays.rank[second]]
        nearest = np.sort(np.argsort(np.abs(gain - gap / 2), kind="stable")[:_SWAP_LIMIT])
        first, second = first[nearest], second[nearest]
    return Changes(
        np.column_stack([first, second]),
        np.stack(
            [_placed(arrays, first, arrays.rank[second]), _placed(arrays, second, np.full(len(second), slow))], axis=1
        ),
        np.column_stack([arrays.kind[first], arrays.kind[second]]),
    )


def splits(arrays: ShardArrays, problem: ShardingProblem, simulator: PlanSimulator, slow: int,
           ranks: NDArray[np.int64]) -> Changes:  # fmt: skip
    """Each shard of the slow rank cut in two, one piece to each of ``ranks``."""
    removed, added, pairs = [], [], []
    for index in np.flatnonzero(arrays.rank == slow).tolist():
        table, offset, width, _ = arrays.columns[index].tolist()
        if not problem.splittable(table):
            continue
        free = ranks[arrays.held[table, ranks] == 0].tolist()
        pieces = {divide(width, problem.options[table].min_width, share) for share in _SPLIT_SHARES}
        for first, second in sorted(piece for piece in pieces if piece is not None):
            for rank in free:
                removed.append((index, _NONE))
                added.append(((table, offset, first, slow), (table, offset + first, second, rank)))
                pairs += [(table, first), (table, second)]
    return _changes(simulator, removed, added, pairs)


def merges(arrays: ShardArrays, simulator: PlanSimulator, slow: int) -> Changes:
    """Each shard of the slow rank joined with a neighbouring shard of its table, on either's rank."""
    removed, added, pairs = [], [], []
    for index in np.flatnonzero((arrays.rank == slow) & (arrays.pieces[arrays.table] > 1)).tolist():
        table, offset, width, _ = arrays.columns[index].tolist()
        for other in (index - 1, index + 1):
            if not 0 <= other < len(arrays) or arrays.table[other] != table:
                continue
            _, other_offset, other_width, home = arrays.columns[other].tolist()
            for rank in sorted({slow, home}):
                removed.append((index, other))
                added.append(((table, min(offset, other_offset), width + other_width, rank), (0, 0, 0, 0)))
                pairs += [(table, width + other_width)] * 2
    changes = _changes(simulator, removed, added, pairs)
    changes.added_kind[:, 1] = _NONE
    return changes


def _placed(arrays: ShardArrays, shard: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.column_stack([arrays.table[shard], arrays.offset[shard], arrays.width[shard], rank])


def _changes(
    simulator: PlanSimulator,
    removed: list[tuple[int, int]],
    added: list[tuple[tuple[int, int, int, int], tuple[int, int, int, int]]],
    pairs: list[tuple[int, int]],
) -> Changes:
    if not removed:
        return Changes.concatenate([])
    kinds = simulator.kinds(pairs).reshape(-1, 2).copy()
    return Changes(np.asarray(removed, dtype=np.int64), np.asarray(added, dtype=np.int64), kinds)
