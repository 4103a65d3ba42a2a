"""Cost of collectives: analytic prior times a residual that is permutation-equivariant over ranks.

One model serves every kind of collective and every number of ranks (NeuroShard trains one per GPU count): each rank is
embedded, the embeddings are pooled, and each rank's residual depends on its own embedding and the pool
[Zaheer2017deepsets]. What a rank is told of its host is the same for all ranks of the host, so ranks may be renumbered
within their hosts, and hosts as a whole.

References:
    [Zaheer2017deepsets] M. Zaheer et al. Deep Sets. NeurIPS 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_neuroshard.costs.collective_prior import PARTS, CollectivePriors
from torchrec_neuroshard.costs.collective_traffic import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    Calls,
    Traffic,
    waits,
)

COLLECTIVE_FEATURE_SET = "collectives-2"  # of rank_features and CollectiveNet; models of another set cannot be read
CALL_FEATURES = len(COLLECTIVES) + 7 + len(PARTS)
RANK_FEATURES = CALL_FEATURES + 10
LAYOUT_FEATURES = tuple(range(len(COLLECTIVES) + 3, len(COLLECTIVES) + 6))  # ranks, hosts, ranks per host
_MARGIN = 0.1  # of the range of an input seen in training; beyond it inputs are clamped
_LEAST_BYTES = 1024.0
_IGNORED = 1e30  # scale of an input that never changes

_CHUNK = 1 << 15  # ranks of calls priced at a time, which bounds memory


class CollectiveNet(nn.Module):
    """Networks whose residuals are averaged, evaluated together.

    Args:
        nets: number of networks.
        hidden: width of the layers.
    """

    mean: torch.Tensor
    scale: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    residual_low: torch.Tensor
    residual_high: torch.Tensor

    def __init__(self, nets: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.embed_first = _Linears(nets, RANK_FEATURES, hidden)
        self.embed_second = _Linears(nets, hidden, hidden)
        self.head_first = _Linears(nets, 3 * hidden, hidden)
        self.head_last = _Linears(nets, hidden, 1, zero=True)
        self.slowest_first = _Linears(nets, 2 * hidden, hidden)
        self.slowest_last = _Linears(nets, hidden, 1, zero=True)
        for name, start in (("mean", 0.0), ("scale", 1.0), ("low", -_IGNORED), ("high", _IGNORED)):
            self.register_buffer(name, torch.full((RANK_FEATURES,), start))
        self.register_buffer("residual_low", torch.tensor(-1.0))
        self.register_buffer("residual_high", torch.tensor(1.0))

    @property
    def nets(self) -> int:
        """Number of networks."""
        return self.embed_first.weight.shape[0]

    @property
    def spread(self) -> torch.Tensor:
        """[RANK_FEATURES] standard deviation of the inputs in training; 0 for those that never changed."""
        return torch.where(self.scale < _IGNORED, self.scale, 0.0)

    def fit_inputs(self, features: torch.Tensor) -> None:
        """Takes the range and the spread of the inputs from training data, [rows, RANK_FEATURES].

        An input that never changes says nothing, and is ignored.
        """
        spread = features.std(dim=0)
        low, high = features.amin(dim=0), features.amax(dim=0)
        self.mean.copy_(features.mean(dim=0))
        self.scale.copy_(torch.where(spread > 1e-6, spread, _IGNORED))
        self.low.copy_(low - _MARGIN * (high - low))
        self.high.copy_(high + _MARGIN * (high - low))

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Unclamped log ratios of measured times to the prior's.

        Args:
            features: [calls, ranks, RANK_FEATURES].

        Returns:
            [nets, calls, ranks] of each rank's time to the prior's, and [nets, calls] of the slowest rank's time to
            the longest that the ranks' own predictions tell (which of several ranks is late differs from call to
            call, so the slowest is slower than each rank is on its own).
        """
        calls, ranks, _ = features.shape
        inputs = (torch.minimum(torch.maximum(features, self.low), self.high) - self.mean) / self.scale
        flat = inputs.flatten(0, 1)[None].expand(self.nets, -1, -1)
        embedded = nn.functional.silu(self.embed_second(nn.functional.silu(self.embed_first(flat))))
        embedded = embedded.reshape(self.nets, calls, ranks, -1)
        pooled = torch.cat([embedded.mean(dim=2), embedded.amax(dim=2)], dim=-1)
        both = torch.cat([embedded, pooled[:, :, None, :].expand(-1, -1, ranks, -1)], dim=-1).flatten(1, 2)
        residual = self.head_last(nn.functional.silu(self.head_first(both))).squeeze(-1).unflatten(1, (calls, ranks))
        slowest = self.slowest_last(nn.functional.silu(self.slowest_first(pooled))).squeeze(-1)
        return residual, slowest


class _Linears(nn.Module):
    """One linear layer of each of several networks: [nets, rows, inputs] to [nets, rows, outputs]."""

    def __init__(self, nets: int, inputs: int, outputs: int, zero: bool = False) -> None:
        super().__init__()
        bound = 0.0 if zero else inputs**-0.5
        self.weight = nn.Parameter(torch.empty(nets, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(nets, 1, outputs).uniform_(-bound, bound))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.baddbmm(self.bias, inputs, self.weight)


def rank_features(calls: Calls, parts: NDArray[np.float64], prior: NDArray[np.float64]) -> NDArray[np.float64]:
    """[calls, ranks, RANK_FEATURES] inputs of :class:`CollectiveNet`.

    Args:
        calls: the calls; those between hosts name their link.
        parts: [calls, PARTS] ms of their prior.
        prior: [calls] ms of the prior.
    """
    traffic, wait = calls.traffic, calls.wait_ms
    ranks, per_host = traffic.ranks, min(traffic.ranks, traffic.ranks_per_host)
    link = np.nan_to_num(calls.link_ms_per_byte) * 1e6
    of_call = [
        *(calls.kind == index for index in range(len(COLLECTIVES))),
        calls.backward,
        np.log2(traffic.total + _LEAST_BYTES),
        np.log2(prior),
        np.full(len(calls), math.log2(ranks)),
        np.full(len(calls), math.log2(traffic.hosts)),
        np.full(len(calls), math.log2(per_host)),
        np.log2(link + 1.0),
        *(parts / parts.sum(axis=1, keepdims=True)).T,
    ]
    sent, received = traffic.sent, traffic.received
    most = np.maximum(sent, received)
    busiest = np.maximum(most.max(axis=1, keepdims=True), 1.0)
    remote = np.maximum(traffic.sent_remote, traffic.received_remote)
    host_remote = traffic.host_remote
    of_rank = [
        np.log2(sent + _LEAST_BYTES),
        np.log2(received + _LEAST_BYTES),
        sent / busiest,
        received / busiest,
        remote / busiest,
        host_remote / np.maximum(host_remote.max(axis=1, keepdims=True), 1.0),
        np.log1p(wait),
        wait / (wait + prior[:, None]),
        np.log1p(wait.max(axis=1, keepdims=True) - wait),
        np.log2(most / ranks + _LEAST_BYTES),  # a message
    ]
    result = np.empty((*sent.shape, RANK_FEATURES))
    result[..., :CALL_FEATURES] = np.stack(of_call, axis=-1, dtype=np.float64)[:, None, :]
    for index, values in enumerate(of_rank, start=CALL_FEATURES):
        result[..., index] = values
    return result


@dataclass(frozen=True)
class CollectiveTimes:
    """Predicted ms of collectives.

    Attributes:
        per_rank: [calls, ranks] from each rank's own start to its end, waiting for late ranks included.
        slowest: [calls] the longest of them.
    """

    per_rank: NDArray[np.float64]
    slowest: NDArray[np.float64]


class CollectiveModel:
    """Predicts all-to-alls, reduce-scatters, all-gathers and all-reduces.

    Args:
        prior: the analytic part.
        net: the residual; None for the prior alone.
    """

    def __init__(self, prior: CollectivePriors, net: CollectiveNet | None = None) -> None:
        self.prior = prior
        self.net = net.eval() if net is not None else None

    def on_links(self, intra_host_gbps: float, inter_host_gbps: float) -> CollectiveModel:
        """The model for a cluster's links, in GB/s of a rank while all ranks of its host send.

        An analytic model takes the given bandwidths. A measured one keeps what it saw within a host; between hosts
        the bytes that cross take as long as the given link needs for them, beside what the ranks' cores do.
        """
        intra, inter = 1e3 / (intra_host_gbps * 1e9), 1e3 / (inter_host_gbps * 1e9)
        if self.net is not None:
            return CollectiveModel(self.prior.on_link(inter), self.net)
        analytic = self.prior.map(None, intra_host_ms_per_byte=intra, inter_host_ms_per_byte=inter)
        return CollectiveModel(analytic)

    def predict(self, calls: Calls) -> CollectiveTimes:
        """Times of any calls."""
        if calls.traffic.ranks == 1:
            return CollectiveTimes(np.zeros_like(calls.wait_ms), np.zeros(len(calls)))
        calls = calls.on_link(self.prior.link_ms_per_byte)
        parts = self.prior.parts(calls)
        prior = self.prior.joined(calls, parts)
        per_rank = calls.wait_ms + prior[:, None]
        if self.net is None or not len(calls):
            return CollectiveTimes(per_rank, per_rank.max(axis=1, initial=0.0))
        features = torch.as_tensor(rank_features(calls, parts, prior), dtype=torch.float32)
        with torch.inference_mode():
            ranks, slowest = self.net(features)
            residual = ranks.mean(dim=0).clamp(self.net.residual_low, self.net.residual_high).double().numpy()
            later = slowest.mean(dim=0).clamp(0.0, self.net.residual_high).double().numpy()
        per_rank = per_rank * np.exp(residual)
        return CollectiveTimes(per_rank, per_rank.max(axis=1) * np.exp(later))

    def per_rank(
        self,
        batch_size_per_rank: NDArray[np.float64],
        dims: NDArray[np.float64],
        backward: NDArray[np.bool_],
        local_world_size: int,
        start_delays_ms: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """[calls, ranks] ms of all-to-alls from each rank's own start to its end, waiting for late ranks included.

        Args:
            batch_size_per_rank: [calls] samples per rank.
            dims: [calls, ranks] columns each rank owns.
            backward: [calls] direction.
            local_world_size: ranks per host.
            start_delays_ms: [calls, ranks] how late each rank starts; None when all start together.
        """
        traffic = Traffic.pooled(batch_size_per_rank, dims, local_world_size).where(backward)
        wait = waits(start_delays_ms if start_delays_ms is not None else np.zeros_like(dims, dtype=np.float64))
        kind = np.full(len(dims), ALL_TO_ALL)
        return self.predict(Calls(kind, backward, traffic, wait, np.full(len(dims), np.nan))).per_rank

    def all_to_all(
        self, batch_size_per_rank: int, dims: NDArray[np.float64], backward: bool, local_world_size: int
    ) -> NDArray[np.float64]:
        """[calls] ms until the last rank is done, all ranks starting together; 0 where nobody owns columns.

        Args:
            batch_size_per_rank: samples per rank.
            dims: [calls, ranks] columns each rank owns.
            backward: direction.
            local_world_size: ranks per host.
        """
        return self.all_to_alls(batch_size_per_rank, dims, np.full(len(dims), backward), local_world_size)

    def all_to_alls(
        self,
        batch_size_per_rank: int,
        dims: NDArray[np.float64],
        backward: NDArray[np.bool_],
        local_world_size: int,
    ) -> NDArray[np.float64]:
        """:meth:`all_to_all` of calls in both directions, ``backward`` being [calls]."""
        result = np.zeros(len(dims))
        owned = np.flatnonzero(dims.any(axis=1))
        chunk = max(1, _CHUNK // dims.shape[1])
        for calls in (owned[first : first + chunk] for first in range(0, owned.size, chunk)):
            batch = np.full(calls.size, float(batch_size_per_rank))
            traffic = Traffic.pooled(batch, dims[calls], local_world_size).where(backward[calls])
            result[calls] = self.predict(Calls.together(ALL_TO_ALL, backward[calls], traffic)).slowest
        return result

    def reduce_scatter(
        self, batch_size_per_rank: int, columns: NDArray[np.float64], world_size: int, local_world_size: int
    ) -> NDArray[np.float64]:
        """[calls] ms of the forward collective of row-wise tables, all ranks starting together; 0 without columns.

        Args:
            batch_size_per_rank: samples per rank.
            columns: [calls] columns of all row-wise tables of a lookup together.
            world_size: number of ranks.
            local_world_size: ranks per host.
        """
        return self._ring(REDUCE_SCATTER, batch_size_per_rank, columns, world_size, local_world_size)

    def all_gather(
        self, batch_size_per_rank: int, columns: NDArray[np.float64], world_size: int, local_world_size: int
    ) -> NDArray[np.float64]:
        """[calls] ms of the backward collective of row-wise tables; arguments as :meth:`reduce_scatter` has them."""
        return self._ring(ALL_GATHER, batch_size_per_rank, columns, world_size, local_world_size)

    def all_reduce(self, floats: NDArray[np.float64], world_size: int, local_world_size: int) -> NDArray[np.float64]:
        """[calls] ms to sum gradients of data_parallel tables, all ranks starting together; 0 without floats.

        Args:
            floats: [calls] numbers of 4 bytes in the buffer that every rank holds.
            world_size: number of ranks.
            local_world_size: ranks per host.
        """
        return self._ring(ALL_REDUCE, 1, floats, world_size, local_world_size)

    def _ring(
        self, kind: int, batch_size: int, columns: NDArray[np.float64], world_size: int, local_world_size: int
    ) -> NDArray[np.float64]:
        dims = np.repeat(np.asarray(columns, dtype=np.float64)[:, None], world_size, axis=1)
        kinds, batch = np.full(len(dims), kind), np.full(len(dims), float(batch_size))
        direction = np.full(len(dims), False)
        traffic = Traffic.of(kinds, batch, dims, direction, local_world_size, self.prior.backend)
        times = self.predict(Calls.together(kind, direction, traffic)).slowest
        return np.where(dims.sum(axis=1) > 0, times, 0.0)
