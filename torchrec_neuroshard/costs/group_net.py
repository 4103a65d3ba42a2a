"""Network of a fused group's cost, and the layout of the sums that describe a group.

The cost is ``additive(z) * exp(residual(z))`` with ``z`` a sum over the group's shards. The additive part is the
launch plus each shard's prior cost times a learned correction of its own. A TBE serves its tables one after
another, so most of what a net can know is about single shards; the residual holds what comes of their company
(caches that one flushes for another, overheads that they share).

``z`` holds the total work, the corrected costs, and sums of a learned embedding of each shard: once plain, once
weighted by the shard's own prior cost. The head sees averages and shares of these, so its inputs stay in the range
seen in training when a group holds more or heavier shards than any measured one.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

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
# | ms of all work terms, forward and backward | for each net: corrected ms of forward and backward, weighted
# embedding, plain embedding
_WORK = len(WORK_TERMS)
_TERM_MS = slice(0, 2 * _WORK)
_LAUNCH = slice(2 * _WORK, 2 * _WORK + 2)
_TOTAL_WORK = slice(2 * _WORK + 2, 3 * _WORK + 2)
_COUNT = slice(3 * _WORK + 2, 3 * _WORK + 3)
_SHARD_MS = slice(3 * _WORK + 3, 3 * _WORK + 3 + PASSES)
COMMON_DIM = 3 * _WORK + 3 + PASSES

_HEAD_INPUT = PASSES + 3 + 2 * _WORK + _WORK + EMBEDDING_DIM
_LEAST_MS = 1e-9  # so that logarithms and shares of groups without work are finite
_UNBOUNDED = 1e6  # range of the features of a net that was not trained
_LARGEST_CORRECTION = 2.0  # of a shard's prior cost, in log space


def zero_linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer that starts at zero, so that an untrained residual leaves the prior as it is."""
    layer = nn.Linear(inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class GroupNet(nn.Module):
    """Shard embedding and head of the residual, one output for forward and one for backward.

    Inputs are standardised with constants kept in the module's buffers, so that weights are self-contained. Features
    beyond the range seen in training count as its end: there the prior alone says how cost goes on.
    """

    feature_mean: torch.Tensor
    feature_scale: torch.Tensor
    feature_low: torch.Tensor
    feature_high: torch.Tensor
    head_mean: torch.Tensor
    head_scale: torch.Tensor
    residual_low: torch.Tensor
    residual_high: torch.Tensor

    def __init__(self, hidden: int = 64, head_hidden: int = 64) -> None:
        super().__init__()
        self.hidden, self.head_hidden = hidden, head_hidden
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
        self.register_buffer("feature_low", torch.full((len(FEATURES),), -_UNBOUNDED))
        self.register_buffer("feature_high", torch.full((len(FEATURES),), _UNBOUNDED))
        self.register_buffer("head_mean", torch.zeros(_HEAD_INPUT))
        self.register_buffer("head_scale", torch.ones(_HEAD_INPUT))
        self.register_buffer("residual_low", torch.full((2,), -1.0))
        self.register_buffer("residual_high", torch.full((2,), 1.0))

    def contributions(
        self, features: torch.Tensor, common: torch.Tensor, offset: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What shards add to the net's part of z, [shards, NET_DIM] float64.

        Args:
            features: [shards, len(FEATURES)] float32.
            common: [shards, COMMON_DIM] float64, from :func:`common_contributions`.
            offset: [shards, hidden] added to the first layer, by which training tells machines apart.
        """
        features = features.clamp(self.feature_low, self.feature_high)
        hidden = self.embed[0]((features - self.feature_mean) / self.feature_scale)
        hidden = self.embed[1:](hidden if offset is None else hidden + offset)
        correction = _LARGEST_CORRECTION * torch.tanh(self.correction(hidden) / _LARGEST_CORRECTION)
        corrected = shard_ms(common) * correction.double().exp()
        embedded = self.embedding(hidden).double()
        weighted = shard_weights(common) * embedded[:, :WEIGHTED_DIM]
        return torch.cat([corrected, weighted, embedded[:, WEIGHTED_DIM:]], dim=1)

    def residual(self, head_input: torch.Tensor, offset: torch.Tensor | None = None) -> torch.Tensor:
        """Unclamped log ratio of measured to additive cost, [groups, 2].

        Args:
            head_input: [groups, head inputs].
            offset: [groups, head hidden] added to the first layer, as in :meth:`contributions`.
        """
        hidden = self.head[0]((head_input - self.head_mean) / self.head_scale)
        ratio: torch.Tensor = self.head[1:](hidden if offset is None else hidden + offset)
        return ratio


def common_contributions(prior: GroupPrior, shards: ShardFeatures) -> NDArray[np.float64]:
    """The part of each shard's contribution that needs no network, [shards, COMMON_DIM]."""
    terms = prior.term_ms(shards.work, shards.regime).transpose(0, 2, 1)
    parts = [
        terms.reshape(len(shards.work), 2 * _WORK),
        prior.launch_ms(shards.regime),
        shards.work,
        np.ones((len(shards.work), 1)),
        terms.sum(axis=2),
    ]
    return np.concatenate(parts, axis=1)


def prior_ms(common: NDArray[np.float64]) -> NDArray[np.float64]:
    """Prior forward and backward ms, [groups, 2], from sums of :func:`common_contributions`."""
    return common[:, _SHARD_MS] + common[:, _LAUNCH] / np.maximum(common[:, _COUNT], 1.0)


def has_shards(common: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[groups, 1] whether a group has any shard, from sums of :func:`common_contributions`."""
    return common[:, _COUNT] > 0.5


def shard_ms(common: torch.Tensor) -> torch.Tensor:
    """Prior forward and backward ms without the launch, [..., 2]."""
    return common[..., _SHARD_MS]


def shard_weights(common: torch.Tensor) -> torch.Tensor:
    """Weight of each shard in its group's weighted embedding: its prior cost without the launch, [..., 1]."""
    return common[..., _SHARD_MS].sum(dim=-1, keepdim=True)


def head_input(xp: ModuleType, common: Any, own: Any) -> tuple[Any, Any]:
    """What a head sees of groups: magnitudes, the share of each work term in the prior, averaged embeddings.

    Args:
        xp: numpy or torch, whose arrays the arguments are. Training differentiates through this; the search asks for
            few groups at a time, where numpy's calls cost less.
        common: [groups, COMMON_DIM] sums of :func:`common_contributions`.
        own: [groups, NET_DIM] sums of :meth:`GroupNet.contributions`.

    Returns:
        [groups, 2] logarithm of the additive cost in ms, and [groups, head inputs].
    """
    count = common[:, _COUNT].clip(1.0)
    launch = common[:, _LAUNCH] / count
    shards = common[:, _SHARD_MS]
    prior = (launch + shards).clip(_LEAST_MS)
    terms = common[:, _TERM_MS].reshape(len(common), PASSES, _WORK)
    additive = xp.log((launch + own[:, :PASSES]).clip(_LEAST_MS))
    inputs = [
        xp.log(prior),
        xp.log(count),
        (terms / prior[:, :, None]).reshape(len(common), 2 * _WORK),
        xp.log(common[:, _TOTAL_WORK] + 1.0),
        additive,
        own[:, PASSES : PASSES + WEIGHTED_DIM] / shards.sum(1)[:, None].clip(_LEAST_MS),
        own[:, PASSES + WEIGHTED_DIM :] / count,
    ]
    return additive, xp.concatenate(inputs, 1)
