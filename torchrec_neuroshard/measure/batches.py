"""Synthetic jagged index batches with a given pooling factor and access distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.access import scatter_ranks
from torchrec_neuroshard.measure.specs import GroupSpec


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


def synthesize_batch(spec: GroupSpec, rng: np.random.Generator) -> TbeBatch:
    """Draws one batch for a group: popular rows lie scattered over each table."""
    indices: list[NDArray[np.int64]] = []
    lengths: list[NDArray[np.int64]] = []
    for shard in spec.shards:
        distribution = shard.distribution()
        for _ in range(shard.num_features):
            feature = bag_lengths(shard.pooling_factor / shard.num_features, spec.batch_size, spec.fixed_length, rng)
            lengths.append(feature)
            indices.append(scatter_ranks(distribution.sample(int(feature.sum()), rng), shard.rows))
    all_indices = np.concatenate(indices)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    weights = torch.from_numpy(rng.random(all_indices.size, dtype=np.float32)) if spec.weighted else None
    return TbeBatch(torch.from_numpy(all_indices), torch.from_numpy(offsets), weights)
