"""Row-wise tables as a plan runs them: what each rank's block of rows sees, and what sorting the ids by block costs.

Batches are drawn for whole tables, and every rank keeps the ids of its block, as TorchRec's bucketizing sends them: so
a rank whose block has a very hot row has the lookups of it, and the ranks' blocks see one and the same global batch.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial

import fbgemm_gpu  # noqa: F401  (registers the operators)
import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.access import scatter_ranks
from torchrec_neuroshard.layout import row_blocks
from torchrec_neuroshard.measure.batches import TbeBatch, synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec, spec_id
from torchrec_neuroshard.measure.tbe import measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing, repeat, stopwatch

_BATCHES = 8  # of one rank, rotated: sorting a batch again would find it in the caches


@dataclass(frozen=True)
class RowWiseTables:
    """The tables of one row-wise fused group.

    Attributes:
        whole: the tables uncut, on the batch of all ranks.
        turns: [tables] how far a table's scattered rows are turned, so that tables have their most popular rows in
            different places; None where ids count up from the most popular row.
        ranks: ranks that share the rows.
    """

    whole: GroupSpec
    turns: tuple[int | None, ...]
    ranks: int

    @property
    def id(self) -> str:
        """A stable id of what is measured."""
        text = json.dumps([spec_id(self.whole), self.turns, self.ranks])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def block(self, rank: int) -> GroupSpec:
        """The group of a rank's blocks; one without rows stands as a row that nobody looks up."""
        shards = []
        for shard in self.whole.shards:
            first, last = row_blocks(shard.rows, self.ranks)[rank]
            lookups = shard.pooling_factor * (last - first) / shard.rows  # how many are drawn is up to the ids
            shards.append(replace(shard, rows=max(1, last - first), pooling_factor=lookups, access=None, zipf=None))
        return replace(self.whole, shards=tuple(shards))

    def global_batch(self, rng: np.random.Generator) -> TbeBatch:
        """Draws the ids of the whole tables, of all ranks' samples."""
        return synthesize_batch(self.whole, rng, self._rows)

    def local_batch(self, rng: np.random.Generator) -> TbeBatch:
        """Draws the ids of the whole tables, of one rank's samples."""
        local = replace(self.whole, batch_size=self.whole.batch_size // self.ranks)
        return synthesize_batch(local, rng, self._rows)

    def block_batch(self, rng: np.random.Generator, rank: int) -> TbeBatch:
        """Draws a global batch and keeps the ids of a rank's blocks, counted from the block's first row."""
        batch = self.global_batch(rng)
        lengths = batch.offsets.diff().numpy()
        ids = batch.indices.numpy()
        sizes = np.repeat(np.repeat(self.block_sizes, self.whole.batch_size), lengths)
        kept = ids // sizes == rank
        bags = np.repeat(np.arange(lengths.size), lengths)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(bags[kept], minlength=lengths.size))]).astype(np.int64)
        weights = batch.per_sample_weights
        return TbeBatch(
            torch.from_numpy((ids - rank * sizes)[kept]),
            torch.from_numpy(offsets),
            None if weights is None else weights[torch.from_numpy(kept)],
        )

    @property
    def block_sizes(self) -> NDArray[np.int64]:
        """[features] rows of a block of the feature's table (the last one that has any may have fewer)."""
        sizes = [-(-shard.rows // self.ranks) for shard in self.whole.shards for _ in range(shard.num_features)]
        return np.asarray(sizes, dtype=np.int64)

    def _rows(self, table: int, popularity: NDArray[np.int64]) -> NDArray[np.int64]:
        turn, rows = self.turns[table], self.whole.shards[table].rows
        return popularity if turn is None else (scatter_ranks(popularity, rows) + turn) % rows


@dataclass(frozen=True)
class RowBlock:
    """One rank's share of row-wise tables: the rows of all of them that lie there, which one TBE serves."""

    tables: RowWiseTables
    rank: int

    @property
    def id(self) -> str:
        """A stable id of what is measured."""
        return f"{self.tables.id}-{self.rank}"

    def measure_ms(self, device: torch.device, policy: RepetitionPolicy) -> float:
        """Median forward plus median backward of its TBE; every rank's TBE makes all bags of the global batch."""
        draw = partial(self.tables.block_batch, rank=self.rank)
        timing = measure_group(self.tables.block(self.rank), device, policy, draw)
        return timing.forward.median + timing.backward.median


def bucketize(batch: TbeBatch, tables: RowWiseTables) -> tuple[torch.Tensor, torch.Tensor]:
    """Sorts a batch's ids by the rank whose block has the row, with the call that TorchRec makes for pooled lookups.

    Returns:
        [ranks x bags] lengths, and [lookups] ids counted from their block's first row.
    """
    lengths, ids, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        batch.offsets.diff(),
        batch.indices,
        bucketize_pos=False,
        sequence=False,
        block_sizes=torch.from_numpy(tables.block_sizes),
        my_size=tables.ranks,
        weights=batch.per_sample_weights,
    )
    return lengths, ids


def bucketize_ms(tables: RowWiseTables, device: torch.device, policy: RepetitionPolicy) -> float:
    """Median time in which a rank bucketizes the ids of its own samples before it sends them."""
    rng = np.random.default_rng(tables.whole.seed)
    batches = [tables.local_batch(rng).to(device) for _ in range(_BATCHES)]
    watch = stopwatch(device)

    def step(index: int) -> list[float]:
        batch = batches[index % _BATCHES]
        watch.start()
        bucketize(batch, tables)
        watch.lap()
        return watch.laps_ms()

    return Timing.of([laps[0] for laps in repeat(step, policy)]).median
