"""Synthetic batches drawn on the device itself: a GPU's batches hold millions of ids, which a host draws too slowly.

The same distributions as :mod:`torchrec_neuroshard.measure.batches`, from torch's generator of the device in place of
numpy's, all shards of a group at once.
"""

from __future__ import annotations

import numpy as np
import torch

from torchrec_neuroshard.access import scattering
from torchrec_neuroshard.measure.batches import TbeBatch
from torchrec_neuroshard.measure.specs import GroupSpec


class DeviceBatches:
    """Draws batches of one group.

    Args:
        spec: the group.
        device: where batches are drawn and stay.
    """

    def __init__(self, spec: GroupSpec, device: torch.device) -> None:
        self._spec = spec
        self._device = device
        self._generator = torch.Generator(device=device).manual_seed(spec.seed)
        shards = [shard for shard in spec.shards for _ in range(shard.num_features)]  # [features]
        self._means = self._tensor([shard.pooling_factor / shard.num_features for shard in shards])
        self._rows = self._tensor([shard.rows for shard in shards], torch.int64)
        scatter = [scattering(shard.rows) for shard in shards]
        self._multiplier = self._tensor([multiplier for multiplier, _ in scatter], torch.int64)
        self._shift = self._tensor([shift for _, shift in scatter], torch.int64)
        distributions = [shard.distribution() for shard in shards]
        # Bins of all features in a row. Feature f draws from [f, f + 1), so one search serves them all.
        self._ends = self._tensor(np.concatenate([f + np.cumsum(d.masses) for f, d in enumerate(distributions)]))
        self._masses = self._tensor(np.concatenate([d.masses for d in distributions]))
        self._counts = self._tensor(np.concatenate([d.counts for d in distributions]))
        self._first_rank = self._tensor(np.concatenate([np.cumsum(d.counts) - d.counts for d in distributions]))
        sizes = np.asarray([d.masses.size for d in distributions])
        self._last_bin = self._tensor(np.cumsum(sizes) - 1, torch.int64)  # [features]

    def draw(self) -> TbeBatch:
        """The next batch."""
        lengths = self._bag_lengths()  # [features, batch]
        per_feature = lengths.sum(dim=1)
        feature = torch.repeat_interleave(torch.arange(len(per_feature), device=self._device), per_feature)
        ranks = self._popularity_ranks(feature)
        rows = self._rows[feature]
        indices = (torch.minimum(ranks, rows - 1) * self._multiplier[feature] + self._shift[feature]) % rows
        offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=self._device)
        torch.cumsum(lengths.ravel(), dim=0, out=offsets[1:])
        weights = self._uniform(indices.numel(), torch.float32) if self._spec.weighted else None
        return TbeBatch(indices, offsets, weights)

    def _bag_lengths(self) -> torch.Tensor:
        """[features, batch] ids of each bag: nearly constant, or Poisson."""
        shape = (len(self._means), self._spec.batch_size)
        means = self._means[:, None].expand(shape)
        if not self._spec.fixed_length:
            return torch.poisson(means.contiguous(), generator=self._generator).to(torch.int64)
        whole = means.floor()
        chance = self._uniform(shape[0] * shape[1], torch.float64).view(shape)
        return (whole + (chance < means - whole)).to(torch.int64)

    def _popularity_ranks(self, feature: torch.Tensor) -> torch.Tensor:
        """[ids] popularity ranks of the rows that ids of the given features look up."""
        draws = feature + self._uniform(feature.numel(), torch.float64)
        bins = torch.minimum(torch.searchsorted(self._ends, draws, right=True), self._last_bin[feature])
        within = (draws - (self._ends - self._masses)[bins]) / self._masses[bins].clamp_min(1e-300)
        ranks = self._first_rank[bins] + (within.clamp(0.0, 1.0 - 1e-12) * self._counts[bins]).floor()
        return ranks.to(torch.int64)

    def _uniform(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.rand(size, dtype=dtype, device=self._device, generator=self._generator)

    def _tensor(self, values: object, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        return torch.as_tensor(np.asarray(values), dtype=dtype).to(self._device)
