"""Cost of fused groups: shard contributions once, then one evaluation of a small head per group and net.

The head runs in numpy: a search asks for few groups at a time, very often.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardFeatures
from torchrec_neuroshard.costs.group_net import (
    COMMON_DIM,
    NET_DIM,
    GroupNet,
    common_contributions,
    has_shards,
    head_input,
    prior_ms,
)
from torchrec_neuroshard.costs.prior import GroupPrior

_CHUNK = 512  # groups priced at a time: what a chunk needs stays in the core's own cache


class GroupCostModel:
    """Predicts forward and backward of fused groups.

    Args:
        prior: the analytic part.
        nets: residual networks whose predictions are averaged (geometric mean); empty for the prior alone.
    """

    def __init__(self, prior: GroupPrior, nets: tuple[GroupNet, ...] = ()) -> None:
        self.prior = prior
        self.nets = nets
        for net in nets:
            net.eval()
        self._heads = [_Head(net) for net in nets]

    @property
    def z_dim(self) -> int:
        """Length of a shard's contribution."""
        return COMMON_DIM + NET_DIM * len(self.nets)

    def contributions(self, shards: ShardFeatures) -> NDArray[np.float64]:
        """What each shard adds to its group's sum, [shards, z_dim]."""
        common = common_contributions(self.prior, shards)
        blocks = [common]
        features = torch.as_tensor(shards.features, dtype=torch.float32)
        with torch.inference_mode():
            for net in self.nets:
                blocks.append(net.contributions(features, torch.as_tensor(common)).numpy())
        return np.concatenate(blocks, axis=1)

    def predict(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Forward and backward ms, [groups, 2], of groups with sums ``z`` [groups, z_dim].

        A group without shards costs nothing.
        """
        if len(z) > _CHUNK:
            return np.concatenate([self.predict(z[first : first + _CHUNK]) for first in range(0, len(z), _CHUNK)])
        common = z[:, :COMMON_DIM]
        if not self._heads:
            return np.where(has_shards(common), prior_ms(common), 0.0)
        log_ms = self._log_ms(z)
        mean = log_ms[0] if len(log_ms) == 1 else np.mean(log_ms, axis=0)
        return np.where(has_shards(common), np.exp(mean), 0.0)

    def spread(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """[groups] how far the nets disagree: standard deviation over them of the logarithm of forward + backward ms.

        Zero with fewer than two nets, and for groups without shards.
        """
        if len(self.nets) < 2:
            return np.zeros(len(z))
        totals = np.logaddexp.reduce(np.stack(self._log_ms(z)), axis=2)
        return np.where(has_shards(z[:, :COMMON_DIM])[:, 0], totals.std(axis=0), 0.0)

    def _log_ms(self, z: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        """For each net, [groups, 2] logarithms of what it predicts."""
        common = z[:, :COMMON_DIM]
        result = []
        for index, head in enumerate(self._heads):
            first = COMMON_DIM + NET_DIM * index
            additive, inputs = head_input(np, common, z[:, first : first + NET_DIM])
            result.append(additive + head.residual(inputs))
        return result


class _Head:
    """A net's head as numpy arrays, its standardisation folded into the first layer."""

    def __init__(self, net: GroupNet) -> None:
        first, second, last = (layer for layer in net.head if isinstance(layer, torch.nn.Linear))
        with torch.no_grad():
            weight = first.weight.double() / net.head_scale.double()
            bias = first.bias.double() - weight @ net.head_mean.double()
            self._first = np.ascontiguousarray(weight.T.float().numpy())
            self._first_bias = bias.float().numpy()
            self._layers = [
                (np.ascontiguousarray(layer.weight.T.numpy()), layer.bias.numpy().copy()) for layer in (second, last)
            ]
            self._low, self._high = net.residual_low.numpy().copy(), net.residual_high.numpy().copy()

    def residual(self, inputs: NDArray[np.float64]) -> NDArray[np.float64]:
        """[groups, 2] clamped log ratio of measured to additive cost, from [groups, head inputs]."""
        hidden = _silu(inputs.astype(np.float32) @ self._first + self._first_bias)
        (second, second_bias), (last, last_bias) = self._layers
        ratio = _silu(hidden @ second + second_bias) @ last + last_bias
        return np.minimum(np.maximum(ratio, self._low), self._high).astype(np.float64)


def _silu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):  # exp of a large number gives 0 in the end
        gate: NDArray[np.float32] = np.exp(-x)
    gate += np.float32(1.0)
    return np.divide(x, gate, out=gate)
