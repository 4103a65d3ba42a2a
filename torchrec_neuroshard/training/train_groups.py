"""Pre-trains the cost model of fused groups on measured records."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.costs.group_model import (
    COMMON_DIM,
    NET_DIM,
    PASSES,
    GroupCostModel,
    GroupNet,
    common_contributions,
    common_input,
    net_input,
)
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit


@dataclass(frozen=True)
class TrainingConfig:
    """Hyper-parameters of :func:`train_group_model`.

    Attributes:
        nets: networks trained from different seeds and averaged.
        epochs: passes over the training groups.
        batch_groups: groups per optimizer step.
        learning_rate: peak of a one-cycle schedule.
        weight_decay: AdamW's.
        residual_penalty: weight of the squared residual in the loss: what single shards explain, the residual must
            not, because a search exploits company that is only imagined.
        seed: seeds initial weights and the order of batches.
    """

    nets: int = 4
    epochs: int = 100
    batch_groups: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    residual_penalty: float = 0.3
    seed: int = 0


def train_group_model(
    split: GroupSplit, config: TrainingConfig | None = None, log: Callable[[str], None] = print
) -> GroupCostModel:
    """Fits the prior, then the residual networks; keeps each network's best epoch on validation groups."""
    config = config or TrainingConfig()
    prior = GroupPrior.fit(split.train.work, split.train.regime, split.train.measured_ms)
    nets = tuple(_train_net(split, prior, config, config.seed + index, log) for index in range(config.nets))
    return GroupCostModel(prior, nets)


@dataclass(frozen=True)
class _Tensors:
    features: torch.Tensor
    common: torch.Tensor
    log_target: torch.Tensor  # [groups, 3]: forward, backward, total
    first: NDArray[np.int64]  # [groups + 1] first shard of each group

    @classmethod
    def of(cls, data: GroupData, prior: GroupPrior) -> _Tensors:
        targets = np.column_stack([data.measured_ms, data.measured_ms.sum(axis=1)])
        first = np.searchsorted(data.group, np.arange(len(data) + 1))
        common = torch.as_tensor(common_contributions(prior, data.shards))
        return cls(
            torch.as_tensor(data.shards.features, dtype=torch.float32),
            common,
            torch.as_tensor(np.log(targets), dtype=torch.float32),
            first.astype(np.int64),
        )


def log_predictions(net: GroupNet, tensors: _Tensors, groups: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the additive part and the inputs of the head, differentiable in the network's weights.

    Returns:
        [groups, 2] log ms and [groups, inputs].
    """
    rows = np.concatenate([np.arange(tensors.first[g], tensors.first[g + 1]) for g in groups])
    owner = torch.as_tensor(np.repeat(np.arange(len(groups)), np.diff(tensors.first)[groups]))
    shard = torch.as_tensor(rows)
    shared = tensors.common[shard]
    terms = torch.cat([shared, net.contributions(tensors.features[shard], shared)], dim=1)
    z = torch.zeros(len(groups), COMMON_DIM + NET_DIM, dtype=torch.float64).index_add(0, owner, terms)
    common = z[:, :COMMON_DIM]
    own = net_input(common, z[:, COMMON_DIM:])
    return own[:, :PASSES].float(), torch.cat([common_input(common), own], dim=1).float()


def _train_net(
    split: GroupSplit, prior: GroupPrior, config: TrainingConfig, seed: int, log: Callable[[str], None]
) -> GroupNet:
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    train, validation = _Tensors.of(split.train, prior), _Tensors.of(split.validation, prior)
    net = GroupNet()
    _standardise(net, train)
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay)
    steps = max(1, len(split.train) // config.batch_groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * steps, pct_start=0.15
    )
    best, best_error = copy.deepcopy(net.state_dict()), float("inf")
    for epoch in range(config.epochs):
        net.train()
        for groups in np.array_split(generator.permutation(len(split.train)), steps):
            loss = _loss(net, train, groups, config.residual_penalty)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4 or epoch == config.epochs - 1:
            net.eval()
            with torch.inference_mode():
                error = float(_loss(net, validation, np.arange(len(split.validation))))
            if error < best_error:
                best, best_error = copy.deepcopy(net.state_dict()), error
    net.load_state_dict(best)
    _clamp(net, train)
    log(f"net {seed}: validation loss {best_error:.4f} (mean absolute log error)")
    return net.eval()


def _loss(net: GroupNet, tensors: _Tensors, groups: NDArray[np.int64], penalty: float = 0.0) -> torch.Tensor:
    """Mean absolute log error of the total (half the weight) and of both passes, and the penalised residual."""
    additive, inputs = log_predictions(net, tensors, groups)
    index = torch.as_tensor(groups)
    residual = net.residual(inputs)
    passes = additive + residual
    predicted = torch.cat([passes, torch.logsumexp(passes, dim=1, keepdim=True)], dim=1)
    errors = smooth_l1(predicted - tensors.log_target[index])
    return (errors * torch.tensor([0.25, 0.25, 0.5])).sum(dim=1).mean() + penalty * (residual**2).mean()


def smooth_l1(error: torch.Tensor, beta: float = 0.03) -> torch.Tensor:
    """Absolute error, quadratic below ``beta`` (about the noise of one record)."""
    return torch.where(error.abs() < beta, 0.5 * error**2 / beta, error.abs() - 0.5 * beta)


def _standardise(net: GroupNet, train: _Tensors) -> None:
    features = train.features
    net.feature_mean.copy_(features.mean(dim=0))
    net.feature_scale.copy_(features.std(dim=0).clamp_min(1e-3))
    with torch.inference_mode():
        _, inputs = log_predictions(net, train, np.arange(len(train.log_target)))
        net.head_mean.copy_(inputs.mean(dim=0))
        net.head_scale.copy_(inputs.std(dim=0).clamp_min(1e-3))


def _clamp(net: GroupNet, train: _Tensors) -> None:
    """Bounds the residual to its range in training, beyond which nothing backs it."""
    with torch.inference_mode():
        _, inputs = log_predictions(net, train, np.arange(len(train.log_target)))
        residual = net.residual(inputs)
        net.residual_low.copy_(torch.quantile(residual, 0.002, dim=0))
        net.residual_high.copy_(torch.quantile(residual, 0.998, dim=0))
