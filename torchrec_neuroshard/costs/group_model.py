"""Cost of one fused group: ``additive(z) * exp(residual(z))`` with ``z`` a sum over the group's shards.

The additive part is the launch plus each shard's prior cost times a learned correction of its own. A TBE serves
its tables one after another, so most of what a net can know is about single shards; the residual holds what comes
of their company (caches that one flushes for another, overheads that they share).

``z`` holds the total work, the corrected costs, and sums of a learned embedding of each shard: once plain, once
weighted by the shard's own prior cost. The head sees averages and shares of these, so its inputs stay in the range
seen in training when a group holds more or heavier shards than any measured one.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_neuroshard.costs.features import FEATURES, WORK_TERMS, ShardFeatures
from torchrec_neuroshard.costs.prior import GroupPrior

WEIGHTED_DIM = 32  # embedding averaged with the shards' prior costs as weights
PLAIN_DIM = 16  # embedding averaged with equal weights
PASSES = 2  # forward and backward
EMBEDDING_DIM = WEIGHTED_DIM + PLAIN_DIM
NET_DIM = PASSES + EMBEDDING_DIM  # of z, for each net: corrected ms, weighted embedding, plain embedding

# Layout of z: ms of each work term, forward and backward | launch ms, forward and backward | total work | shards
# | for each net: corrected ms of forward and backward, weighted embedding, plain embedding
_WORK = len(WORK_TERMS)
_TERM_MS = slice(0, 2 * _WORK)
_LAUNCH = slice(2 * _WORK, 2 * _WORK + 2)
_TOTAL_WORK = slice(2 * _WORK + 2, 3 * _WORK + 2)
_COUNT = slice(3 * _WORK + 2, 3 * _WORK + 3)
COMMON_DIM = 3 * _WORK + 3

_HEAD_INPUT = PASSES + 3 + 2 * _WORK + _WORK + EMBEDDING_DIM
_LARGEST_CORRECTION = 2.0  # of a shard's prior cost, in log space


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero, so that an untrained residual leaves the prior as it is."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class GroupNet(nn.Module):
    """Shard embedding and head of the residual, one output for forward and one for backward.

    Inputs are standardised with constants kept in the module's buffers, so that weights are self-contained.
    """

    feature_mean: torch.Tensor
    feature_scale: torch.Tensor
    head_mean: torch.Tensor
    head_scale: torch.Tensor
    residual_low: torch.Tensor
    residual_high: torch.Tensor

    def __init__(self, hidden: int = 64, head_hidden: int = 64) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            nn.Linear(len(FEATURES), hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
        )
        self.embedding = nn.Linear(hidden, EMBEDDING_DIM)
        self.correction = zero_linear(hidden, PASSES)
        self.head = nn.Sequential(
            nn.Linear(_HEAD_INPUT, head_hidden),
            nn.SiLU(),
            nn.Linear(head_hidden, head_hidden),
            nn.SiLU(),
            zero_linear(head_hidden, 2),
        )
        self.register_buffer("feature_mean", torch.zeros(len(FEATURES)))
        self.register_buffer("feature_scale", torch.ones(len(FEATURES)))
        self.register_buffer("head_mean", torch.zeros(_HEAD_INPUT))
        self.register_buffer("head_scale", torch.ones(_HEAD_INPUT))
        self.register_buffer("residual_low", torch.full((2,), -1.0))
        self.register_buffer("residual_high", torch.full((2,), 1.0))

    def contributions(self, features: torch.Tensor, common: torch.Tensor) -> torch.Tensor:
        """What shards add to the net's part of z, [shards, NET_DIM] float64.

        Args:
            features: [shards, len(FEATURES)] float32.
            common: [shards, COMMON_DIM] float64, from :func:`common_contributions`.
        """
        hidden = self.embed((features - self.feature_mean) / self.feature_scale)
        correction = _LARGEST_CORRECTION * torch.tanh(self.correction(hidden) / _LARGEST_CORRECTION)
        corrected = shard_ms(common) * correction.double().exp()
        embedded = self.embedding(hidden).double()
        weighted = shard_weights(common) * embedded[:, :WEIGHTED_DIM]
        return torch.cat([corrected, weighted, embedded[:, WEIGHTED_DIM:]], dim=1)

    def residual(self, head_input: torch.Tensor) -> torch.Tensor:
        """Unclamped log ratio of measured to additive cost, [groups, 2], from [groups, head inputs]."""
        ratio: torch.Tensor = self.head((head_input - self.head_mean) / self.head_scale)
        return ratio


def common_contributions(prior: GroupPrior, shards: ShardFeatures) -> NDArray[np.float64]:
    """The part of each shard's contribution that needs no network, [shards, COMMON_DIM]."""
    term_ms = prior.term_ms(shards.work, shards.regime).transpose(0, 2, 1).reshape(len(shards.work), 2 * _WORK)
    count = np.ones((len(shards.work), 1))
    return np.concatenate([term_ms, prior.launch_ms(shards.regime), shards.work, count], axis=1)


def prior_ms(common: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prior forward and backward ms, [groups, 2], from sums of :func:`common_contributions`."""
    terms = common[:, _TERM_MS].reshape(len(common), PASSES, _WORK).sum(axis=2)
    return terms + common[:, _LAUNCH] / np.maximum(common[:, _COUNT], 1.0)


def shard_ms(common: torch.Tensor) -> torch.Tensor:
    """Prior forward and backward ms without the launch, [..., 2]."""
    return common[..., _TERM_MS].unflatten(-1, (PASSES, _WORK)).sum(dim=-1)


def shard_weights(common: torch.Tensor) -> torch.Tensor:
    """Weight of each shard in its group's weighted embedding: its prior cost without the launch, [..., 1]."""
    return common[..., _TERM_MS].sum(dim=-1, keepdim=True)


def additive_log_ms(common: torch.Tensor, corrected_ms: torch.Tensor) -> torch.Tensor:
    """Logarithm of launch plus corrected shard costs, [..., groups, 2].

    Args:
        common: [groups, COMMON_DIM] sums of :func:`common_contributions`.
        corrected_ms: [..., groups, 2] sums of a net's corrected costs.
    """
    return (common[:, _LAUNCH] / common[:, _COUNT].clamp_min(1.0) + corrected_ms).clamp_min(1e-9).log()


def common_input(common: torch.Tensor) -> torch.Tensor:
    """The head inputs that need no net: magnitudes, and the share of each work term in the prior.

    Args:
        common: [groups, COMMON_DIM] sums of :func:`common_contributions`.
    """
    count = common[:, _COUNT].clamp_min(1.0)
    terms = common[:, _TERM_MS].unflatten(1, (PASSES, _WORK))
    prior = (common[:, _LAUNCH] / count + terms.sum(dim=2)).clamp_min(1e-9)
    shares = terms / prior[:, :, None]
    return torch.cat([prior.log(), count.log(), shares.flatten(1), (common[:, _TOTAL_WORK] + 1.0).log()], dim=1)


def net_input(common: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The head inputs from one net's sums: the additive cost, and embeddings averaged over the group's shards.

    Args:
        common: [groups, COMMON_DIM] as in :func:`common_input`.
        own: [..., groups, NET_DIM] sums of :meth:`GroupNet.contributions`.
    """
    count, weight = common[:, _COUNT].clamp_min(1.0), shard_weights(common).clamp_min(1e-12)
    corrected, embedding = own[..., :PASSES], own[..., PASSES:]
    averages = [embedding[..., :WEIGHTED_DIM] / weight, embedding[..., WEIGHTED_DIM:] / count]
    return torch.cat([additive_log_ms(common, corrected), *averages], dim=-1)


class GroupCostModel:
    """Inference: shard contributions once, then one head evaluation per group and net.

    Args:
        prior: the analytic part.
        nets: residual networks whose outputs are averaged; empty for the prior alone.
    """

    def __init__(self, prior: GroupPrior, nets: tuple[GroupNet, ...] = ()) -> None:
        self.prior = prior
        self.nets = nets
        for net in nets:
            net.eval()
        self._heads = _StackedHeads(nets) if nets else None

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
        cost = prior_ms(z[:, :COMMON_DIM]) if self._heads is None else self._net_cost(self._heads, torch.as_tensor(z))
        return np.where(z[:, _COUNT] > 0.5, cost, 0.0)

    @torch.inference_mode()
    def _net_cost(self, heads: _StackedHeads, z: torch.Tensor) -> NDArray[np.float64]:
        """[groups, 2] ms: geometric mean over the nets."""
        common = z[:, :COMMON_DIM]
        own = z[:, COMMON_DIM:].reshape(len(z), len(self.nets), NET_DIM).transpose(0, 1)
        inputs = net_input(common, own)
        log_ms = inputs[..., :PASSES] + heads.residual(common_input(common), inputs)
        return log_ms.mean(dim=0).exp().numpy()


class _StackedHeads:
    """The heads of all nets, evaluated together: a search asks for few groups at a time, very often.

    Standardisation is folded into the first layer, whose inputs the nets share but for their own embeddings.
    """

    def __init__(self, nets: tuple[GroupNet, ...]) -> None:
        shared = _HEAD_INPUT - NET_DIM
        first, second, last = zip(*(_linear_layers(net) for net in nets))
        with torch.no_grad():
            scaled = [layer.weight.double() / net.head_scale.double() for layer, net in zip(first, nets)]
            bias = [layer.bias.double() - w @ net.head_mean.double() for layer, net, w in zip(first, nets, scaled)]
            self._shared = torch.cat([w[:, :shared].T for w in scaled], dim=1).contiguous()  # [shared, nets x hidden]
            self._own = torch.stack([w[:, shared:].T for w in scaled]).contiguous()  # [nets, own, hidden]
            self._bias = torch.stack(bias)[:, None, :].contiguous()
            self._second = torch.stack([layer.weight.T for layer in second]).contiguous()
            self._second_bias = torch.stack([layer.bias for layer in second])[:, None, :].contiguous()
            self._last = torch.stack([layer.weight.T for layer in last]).contiguous()
            self._last_bias = torch.stack([layer.bias for layer in last])[:, None, :].contiguous()
            self._low = torch.stack([net.residual_low for net in nets])[:, None, :]
            self._high = torch.stack([net.residual_high for net in nets])[:, None, :]

    def residual(self, shared: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """[nets, groups, 2] clamped, from [groups, shared inputs] and [nets, groups, own inputs], all float64."""
        nets, groups = own.shape[0], own.shape[1]
        hidden = (shared @ self._shared).reshape(groups, nets, self._own.shape[2]).transpose(0, 1)
        hidden = torch.nn.functional.silu((torch.baddbmm(self._bias, own, self._own) + hidden).float())
        hidden = torch.nn.functional.silu(torch.baddbmm(self._second_bias, hidden, self._second))
        ratio = torch.baddbmm(self._last_bias, hidden, self._last)
        return torch.maximum(torch.minimum(ratio, self._high), self._low).double()


def _linear_layers(net: GroupNet) -> list[nn.Linear]:
    return [layer for layer in net.head if isinstance(layer, nn.Linear)]
