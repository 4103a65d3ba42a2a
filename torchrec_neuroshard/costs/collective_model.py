"""Cost of an all-to-all: analytic prior times a residual that is permutation-equivariant over ranks.

One model serves every number of ranks (NeuroShard trains one per GPU count): each rank is embedded, the
embeddings are pooled, and each rank's residual depends on its own embedding and the pool [Zaheer2017deepsets].

References:
    [Zaheer2017deepsets] M. Zaheer et al. Deep Sets. NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_neuroshard.costs.collective_prior import AllToAllTraffic, CollectivePrior
from torchrec_neuroshard.costs.group_model import zero_linear

RANK_FEATURES = 9


class CollectiveNet(nn.Module):
    """Residual of each rank, [calls, ranks], from [calls, ranks, RANK_FEATURES]."""

    mean: torch.Tensor
    scale: torch.Tensor
    residual_low: torch.Tensor
    residual_high: torch.Tensor

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(RANK_FEATURES, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.head = nn.Sequential(nn.Linear(3 * hidden, hidden), nn.SiLU(), zero_linear(hidden, 1))
        self.register_buffer("mean", torch.zeros(RANK_FEATURES))
        self.register_buffer("scale", torch.ones(RANK_FEATURES))
        self.register_buffer("residual_low", torch.tensor(-1.0))
        self.register_buffer("residual_high", torch.tensor(1.0))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Unclamped log ratio of measured to prior time."""
        ranks = self.embed((features - self.mean) / self.scale)
        pooled = torch.cat([ranks.mean(dim=1), ranks.amax(dim=1)], dim=-1)
        pooled = pooled[:, None, :].expand(-1, ranks.shape[1], -1)
        residual: torch.Tensor = self.head(torch.cat([ranks, pooled], dim=-1)).squeeze(-1)
        return residual


def rank_features(
    traffic: AllToAllTraffic, backward: NDArray[np.bool_], wait_ms: NDArray[np.float64], prior_ms: NDArray[np.float64]
) -> NDArray[np.float64]:
    """[calls, ranks, RANK_FEATURES] inputs of :class:`CollectiveNet`.

    Args:
        traffic: bytes moved.
        backward: [calls] direction.
        wait_ms: [calls, ranks] how long each rank waits for the last one to start.
        prior_ms: [calls] prior time of the transfer.
    """
    sent = traffic.sent_local + traffic.sent_remote
    received = traffic.received_local + traffic.received_remote
    busiest = np.maximum(np.maximum(sent, received).max(axis=1, keepdims=True), 1.0)
    ranks = sent.shape[1]
    wide = np.ones_like(sent)
    return np.stack(
        [
            np.log2(sent + 1024.0),
            np.log2(received + 1024.0),
            sent / busiest,
            received / busiest,
            np.log2(sent.sum(axis=1, keepdims=True) + 1024.0) * wide,
            wide * np.log2(ranks),
            wide * backward[:, None],
            np.log1p(wait_ms),
            wide * np.log2(prior_ms[:, None]),
        ],
        axis=-1,
    )


class CollectiveModel:
    """Predicts all-to-alls of pooled embeddings.

    Args:
        prior: the analytic part.
        net: the residual; None for the prior alone.
    """

    def __init__(self, prior: CollectivePrior, net: CollectiveNet | None = None) -> None:
        self.prior = prior
        self.net = net.eval() if net is not None else None

    def on_links(self, intra_host_gbps: float, inter_host_gbps: float) -> CollectiveModel:
        """The model for a cluster's links.

        An analytic model takes the given bandwidths. A measured one saw a single host: it keeps what it saw
        there, and between hosts is no faster than the link.
        """
        intra, inter = 1e3 / (intra_host_gbps * 1e9), 1e3 / (inter_host_gbps * 1e9)
        if self.net is not None:
            intra, inter = self.prior.intra_host_ms_per_byte, max(self.prior.inter_host_ms_per_byte, inter)
        links = replace(self.prior, intra_host_ms_per_byte=intra, inter_host_ms_per_byte=inter)
        return CollectiveModel(links, self.net)

    def per_rank(
        self,
        batch_size_per_rank: NDArray[np.float64],
        dims: NDArray[np.float64],
        backward: NDArray[np.bool_],
        local_world_size: int,
        start_delays_ms: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """[calls, ranks] ms from each rank's own start to its end, waiting for late ranks included.

        Args:
            batch_size_per_rank: [calls] samples per rank.
            dims: [calls, ranks] columns each rank owns.
            backward: [calls] direction.
            local_world_size: ranks per host.
            start_delays_ms: [calls, ranks] how late each rank starts; None when all start together.
        """
        traffic = AllToAllTraffic.pooled(batch_size_per_rank, dims, local_world_size).where(backward)
        transfer = self.prior.predict(traffic)
        wait = np.zeros_like(dims, dtype=np.float64)
        if start_delays_ms is not None:
            wait = start_delays_ms.max(axis=1, keepdims=True) - start_delays_ms
        if dims.shape[1] == 1:
            return np.zeros_like(dims, dtype=np.float64)
        ratio = np.zeros_like(wait)
        if self.net is not None:
            features = torch.as_tensor(rank_features(traffic, backward, wait, transfer), dtype=torch.float32)
            with torch.inference_mode():
                residual = self.net(features)
                ratio = residual.clamp(self.net.residual_low, self.net.residual_high).double().numpy()
        return wait + transfer[:, None] * np.exp(ratio)

    def all_to_all(
        self, batch_size_per_rank: int, dims: NDArray[np.float64], backward: bool, local_world_size: int
    ) -> NDArray[np.float64]:
        """[calls] ms until the last rank is done, all ranks starting together; 0 where nobody owns columns."""
        calls = len(dims)
        batch = np.full(calls, float(batch_size_per_rank))
        times = self.per_rank(batch, dims, np.full(calls, backward), local_world_size)
        return np.where(dims.sum(axis=1) > 0, times.max(axis=1), 0.0)
