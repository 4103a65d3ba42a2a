"""Changes to a placement, enumerated as arrays: moves, swaps, splits and merges around one rank.

A change removes one or two shards and adds one or two. TorchRec slices the shards of a table that share a
rank as if all were as wide as the first, so no change puts two shards of a table on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Shard, ShardingProblem
from torchrec_neuroshard.search.splits import divide

_SPLIT_SHARES = (0.25, 0.5, 0.75)
# A shard adds to a group between about half and twice what it costs alone. Changes that could not help
# even so are not priced.
_LEAST_SHARE = 0.15
_UNEQUAL = 0.4
_SWAP_LIMIT = 1500
_NONE = -1


class ShardArrays:
    """The shards of a placement as arrays, in canonical order.

    Attributes:
        shards: sorted by (table, offset).
        table, offset, width, rank, kind, group, lookup: [shards] columns.
        alone_ms: [shards] predicted forward plus backward of each shard alone.
        held: [tables, ranks] how many shards of a table a rank holds.
    """

    def __init__(self, simulator: PlanSimulator, shards: tuple[Shard, ...], types: tuple[str, ...]) -> None:
        problem = simulator.problem
        self.shards = tuple(sorted(shards, key=lambda s: (s.table, s.offset)))
        columns = np.asarray([(s.table, s.offset, s.width, s.rank) for s in self.shards], dtype=np.int64)
        self.table, self.offset, self.width, self.rank = columns.reshape(-1, 4).T
        self.kind = simulator.kinds((s.table, s.width) for s in self.shards)
        self.alone_ms = simulator.alone_ms[self.kind].sum(axis=1)
        groups = np.asarray([problem.group_of(t, types[t]) for t in range(len(types))], dtype=np.int64)
        lookups = np.asarray([problem.lookup_of(t, types[t]) for t in range(len(types))], dtype=np.int64)
        self.group_of_table, self.lookup_of_table = groups, lookups
        self.group, self.lookup = groups[self.table], lookups[self.table]
        self.held = np.zeros((len(types), problem.cluster.world_size), dtype=np.int64)
        np.add.at(self.held, (self.table, self.rank), 1)

    def __len__(self) -> int:
        return len(self.shards)


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

    def apply(self, index: int, shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        """The shards after one of the changes."""
        gone = set(self.removed[index].tolist())
        kept = [shard for position, shard in enumerate(shards) if position not in gone]
        return (*kept, *(Shard(*map(int, row)) for row in self.added[index] if row[2] > 0))


def moves(arrays: ShardArrays, load: NDArray[np.float64], slow: int, ranks: NDArray[np.int64]) -> Changes:
    """Each shard of the slow rank to each of ``ranks``; ``load`` is [ranks] compute in ms."""
    here = np.flatnonzero(arrays.rank == slow)
    shard, rank = (grid.ravel() for grid in np.meshgrid(here, ranks, indexing="ij"))
    gap = load[slow] - load[rank]
    allowed = (arrays.held[arrays.table[shard], rank] == 0) & (_LEAST_SHARE * arrays.alone_ms[shard] < gap)
    shard, rank = shard[allowed], rank[allowed]
    none = np.full(len(shard), _NONE)
    return Changes(
        np.column_stack([shard, none]),
        np.stack([_placed(arrays, shard, rank), np.zeros((len(shard), 4), dtype=np.int64)], axis=1),
        np.column_stack([arrays.kind[shard], none]),
    )


def swaps(arrays: ShardArrays, load: NDArray[np.float64], slow: int, ranks: NDArray[np.int64]) -> Changes:
    """Each shard of the slow rank with each shard of ``ranks``; ``load`` is [ranks] compute in ms."""
    here = np.flatnonzero(arrays.rank == slow)
    there = np.flatnonzero(np.isin(arrays.rank, ranks))
    first, second = (grid.ravel() for grid in np.meshgrid(here, there, indexing="ij"))
    same = arrays.table[first] == arrays.table[second]
    free = (arrays.held[arrays.table[first], arrays.rank[second]] == 0) & (
        arrays.held[arrays.table[second], slow] == 0
    )
    gain = arrays.alone_ms[first] - arrays.alone_ms[second]
    sensible = (_LEAST_SHARE * gain < load[slow] - load[arrays.rank[second]]) & (
        gain > -_UNEQUAL * arrays.alone_ms[first]
    )
    allowed = sensible & ((same & (arrays.width[first] != arrays.width[second])) | (~same & free))
    first, second = first[allowed], second[allowed]
    if len(first) > _SWAP_LIMIT:  # the best swaps level the two ranks, were costs to add up
        gap = load[slow] - load[arrays.rank[second]]
        miss = np.abs(arrays.alone_ms[first] - arrays.alone_ms[second] - gap / 2)
        nearest = np.sort(np.argsort(miss, kind="stable")[:_SWAP_LIMIT])
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
        shard = arrays.shards[index]
        if not problem.splittable(shard.table):
            continue
        free = ranks[arrays.held[shard.table, ranks] == 0].tolist()
        pieces = {divide(shard.width, problem.options[shard.table].min_width, share) for share in _SPLIT_SHARES}
        for first, second in sorted(piece for piece in pieces if piece is not None):
            for rank in free:
                removed.append((index, _NONE))
                added.append(
                    ((shard.table, shard.offset, first, slow), (shard.table, shard.offset + first, second, rank))
                )
                pairs += [(shard.table, first), (shard.table, second)]
    return _changes(simulator, removed, added, pairs)


def merges(arrays: ShardArrays, simulator: PlanSimulator, slow: int) -> Changes:
    """Each shard of the slow rank joined with a neighbouring shard of its table, on either's rank."""
    removed, added, pairs = [], [], []
    for index in np.flatnonzero(arrays.rank == slow).tolist():
        shard = arrays.shards[index]
        for other in (index - 1, index + 1):
            if not 0 <= other < len(arrays) or arrays.table[other] != shard.table:
                continue
            neighbour = arrays.shards[other]
            offset, width = min(shard.offset, neighbour.offset), shard.width + neighbour.width
            for rank in sorted({slow, neighbour.rank}):
                removed.append((index, other))
                added.append(((shard.table, offset, width, rank), (0, 0, 0, 0)))
                pairs.append((shard.table, width))
    changes = _changes(simulator, removed, added, [pair for pair in pairs for _ in range(2)])
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
