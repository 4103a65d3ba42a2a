"""Synthetic jagged index batches with a given pooling factor and access distribution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.access import scatter_ranks
from torchrec_neuroshard.measure.specs import GroupSpec

# Where a shard's popular rows lie: (number of the shard, popularity ranks) -> row ids.
Places = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]


@dataclass
class TbeBatch:
    """Inputs of one TBE call.

    Attributes:
        indices: [lookups] int64 row ids, feature-major.
        offsets: [features x batch + 1] int64 bag boundaries.
        per_sample_weights: [lookups] float32, or None.
    """

    indices: torch.Tensor
    offsets: torch.Tensor
    per_sample_weights: torch.Tensor | None

    def to(self, device: torch.device) -> TbeBatch:
        """The batch on another device."""
        weights = self.per_sample_weights
        return TbeBatch(
            self.indices.to(device), self.offsets.to(device), None if weights is None else weights.to(device)
        )


def bag_lengths(
    pooling_factor: float, batch_size: int, fixed_length: bool, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Draws [batch_size] bag lengths with the given mean: nearly constant, or Poisson."""
    if fixed_length:
        whole = int(pooling_factor)
        return whole + (rng.random(batch_size) < pooling_factor - whole).astype(np.int64)
    return rng.poisson(pooling_factor, batch_size).astype(np.int64)


def synthesize_batch(spec: GroupSpec, rng: np.random.Generator, places: Places | None = None) -> TbeBatch:
    """Draws one batch for a group.

    Args:
        spec: the group.
        rng: source of chance.
        places: where popular rows lie; None scatters them over each table.
    """
    indices: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for number, shard in enumerate(spec.shards):
        distribution = shard.distribution()
        for _ in range(shard.num_features):
            feature = bag_lengths(shard.pooling_factor / shard.num_features, spec.batch_size, spec.fixed_length, rng)
            lengths.append(feature)
            ranks = distribution.sample(int(feature.sum()), rng)
            indices.append(scatter_ranks(ranks, shard.rows) if places is None else places(number, ranks))
    all_indices = np.concatenate(indices)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    weights = torch.from_numpy(rng.random(all_indices.size, dtype=np.float32)) if spec.weighted else None
    return TbeBatch(torch.from_numpy(all_indices), torch.from_numpy(offsets), weights)
