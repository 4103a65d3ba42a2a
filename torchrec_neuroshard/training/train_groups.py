"""Pre-trains the cost model of fused groups on measured records, of one machine or of several."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_neuroshard.costs.features import ShardFeatures
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import COMMON_DIM, NET_DIM, GroupNet, common_contributions, head_input
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit

_CONSTANT = 1e-3  # standard deviation below which an input tells nothing
_NOISE = 0.1  # of nearly all records, in log space: smaller errors count by their square


@dataclass(frozen=True)
class TrainingConfig:
    """Hyper-parameters of :func:`train_group_model`.

    Attributes:
        nets: networks trained from different seeds.
        epochs: passes over the training groups.
        batch_groups: groups per optimizer step.
        learning_rate: peak of a one-cycle schedule.
        weight_decay: AdamW's.
        residual_penalty: weight of the squared residual in the loss: what single shards explain, the residual must
            not, because a search exploits company that is only imagined.
        seed: seeds initial weights and the order of batches.
    """

    nets: int = 6
    epochs: int = 100
    batch_groups: int = 128
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    residual_penalty: float = 0.3
    seed: int = 0


def train_group_model(
    split: GroupSplit,
    config: TrainingConfig | None = None,
    log: Callable[[str], None] = print,
    others: Sequence[GroupData] = (),
    start: GroupCostModel | None = None,
) -> GroupCostModel:
    """Fits the prior, then the residual networks; keeps each network's best epoch on validation groups.

    Args:
        split: groups of the machine that the model is for.
        config: hyper-parameters.
        log: called with a line for each network.
        others: training groups of other machines, each with a prior of its own: what nets correct is much the same
            everywhere, and what is not goes into a few weights per machine.
        start: model that training starts from, instead of random weights: its networks, and the proportions of its
            prior where the groups do not say otherwise.
    """
    config = config or TrainingConfig()
    priors = [fit_prior(split.train, start), *(fit_prior(part) for part in others)]
    train = TrainingTensors.concatenate(
        [TrainingTensors.of(part, prior) for part, prior in zip((split.train, *others), priors)]
    )
    validation = TrainingTensors.of(split.validation, priors[0])
    nets = []
    for index in range(config.nets):
        seed = config.seed + index
        initial = start.nets[index % len(start.nets)] if start is not None else None
        nets.append(_train_net(train, validation, replace(config, seed=seed), log, initial))
    return GroupCostModel(priors[0], tuple(nets))


def fit_prior(data: GroupData, start: GroupCostModel | None = None) -> GroupPrior:
    """The analytic part, fitted to groups of one machine; near that of another model when there is one."""
    return GroupPrior.fit(data.work, data.regime, data.measured_ms, None if start is None else start.prior)


@dataclass(frozen=True)
class TrainingTensors:
    """Groups as networks read them.

    Attributes:
        features: [shards, features] float32.
        common: [shards, COMMON_DIM] float64.
        log_target: [groups, 3] logarithm of ms: forward, backward, total.
        first: [groups + 1] first shard of each group.
        machine: [groups] 0 for the machine that the model is for, then the others.
    """

    features: torch.Tensor
    common: torch.Tensor
    log_target: torch.Tensor
    first: NDArray[np.int64]
    machine: torch.Tensor

    def __len__(self) -> int:
        return len(self.log_target)

    @classmethod
    def of(cls, data: GroupData, prior: GroupPrior) -> TrainingTensors:
        """The groups of one machine."""
        targets = np.column_stack([data.measured_ms, data.measured_ms.sum(axis=1)])
        return cls.with_targets(data.shards, data.group, np.log(targets), prior)

    @classmethod
    def with_targets(
        cls, shards: ShardFeatures, group: NDArray[np.int64], log_target: NDArray[np.float64], prior: GroupPrior
    ) -> TrainingTensors:
        """Groups of one machine with any targets, [groups, 3]."""
        return cls(
            torch.as_tensor(shards.features, dtype=torch.float32),
            torch.as_tensor(common_contributions(prior, shards)),
            torch.as_tensor(log_target, dtype=torch.float32),
            np.searchsorted(group, np.arange(len(log_target) + 1)).astype(np.int64),
            torch.zeros(len(log_target), dtype=torch.int64),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[TrainingTensors]) -> TrainingTensors:
        """Groups of several machines, numbered in the order given."""
        starts = np.cumsum([0, *(part.first[-1] for part in parts)])
        first = [part.first[:-1] + start for part, start in zip(parts, starts)]
        return cls(
            torch.cat([part.features for part in parts]),
            torch.cat([part.common for part in parts]),
            torch.cat([part.log_target for part in parts]),
            np.concatenate([*first, starts[-1:]]),
            torch.cat([torch.full((len(part),), index) for index, part in enumerate(parts)]),
        )


class MachineOffsets(nn.Module):
    """What a net adds for each machine to the hidden layers of its shard embedding and head; machine 0 adds nothing."""

    def __init__(self, net: GroupNet, machines: int) -> None:
        super().__init__()
        self.shard = nn.Parameter(torch.zeros(machines - 1, net.hidden))
        self.head = nn.Parameter(torch.zeros(machines - 1, net.head_hidden))

    def of(self, weights: torch.Tensor, machine: torch.Tensor) -> torch.Tensor:
        """[groups, hidden] rows of a parameter by machine ([groups])."""
        return torch.cat([torch.zeros(1, weights.shape[1]), weights])[machine]


def log_predictions(
    net: GroupNet,
    tensors: TrainingTensors,
    groups: NDArray[np.int64],
    offsets: MachineOffsets | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the additive part and the inputs of the head, differentiable in the network's weights.

    Returns:
        [groups, 2] log ms and [groups, inputs].
    """
    rows = np.concatenate([np.arange(tensors.first[g], tensors.first[g + 1]) for g in groups])
    owner = torch.as_tensor(np.repeat(np.arange(len(groups)), np.diff(tensors.first)[groups]))
    shard = torch.as_tensor(rows)
    shared = tensors.common[shard]
    offset = None
    if offsets is not None:
        offset = offsets.of(offsets.shard, tensors.machine[torch.as_tensor(groups)])[owner]
    terms = torch.cat([shared, net.contributions(tensors.features[shard], shared, offset)], dim=1)
    z = torch.zeros(len(groups), COMMON_DIM + NET_DIM, dtype=torch.float64).index_add(0, owner, terms)
    additive, inputs = head_input(torch, z[:, :COMMON_DIM], z[:, COMMON_DIM:])
    return additive.float(), inputs.float()


def _train_net(
    train: TrainingTensors,
    validation: TrainingTensors,
    config: TrainingConfig,
    log: Callable[[str], None],
    start: GroupNet | None,
) -> GroupNet:
    torch.manual_seed(config.seed)
    net = GroupNet()
    machines = int(train.machine.max()) + 1
    offsets = MachineOffsets(net, machines) if machines > 1 else None
    if start is None:
        standardise(net, train)
    else:
        net.load_state_dict(start.state_dict())
        widen_range(net, train)
    error = fit(net, train, validation, config, offsets)
    bound_residual(net, train)
    log(f"net {config.seed}: validation loss {error:.4f} (mean absolute log error)")
    return net.eval()


def fit(
    net: GroupNet,
    train: TrainingTensors,
    validation: TrainingTensors,
    config: TrainingConfig,
    offsets: MachineOffsets | None = None,
) -> float:
    """Trains a network and returns its loss on validation groups, at the epoch (or start) where it is least."""
    generator = np.random.default_rng(config.seed)
    parameters = [*net.parameters(), *(offsets.parameters() if offsets is not None else ())]
    optimizer = torch.optim.AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
    steps = max(1, len(train) // config.batch_groups)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=config.epochs * steps, pct_start=0.15
    )
    best, best_error = copy.deepcopy(net.state_dict()), _validation_error(net, validation)
    for epoch in range(config.epochs):
        net.train()
        for groups in np.array_split(generator.permutation(len(train)), steps):
            loss = _loss(net, train, groups, config.residual_penalty, offsets)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 5 == 4 or epoch == config.epochs - 1:
            error = _validation_error(net, validation)
            if error < best_error:
                best, best_error = copy.deepcopy(net.state_dict()), error
    net.load_state_dict(best)
    return best_error


def _validation_error(net: GroupNet, validation: TrainingTensors) -> float:
    net.eval()
    with torch.inference_mode():
        return float(_loss(net, validation, np.arange(len(validation))))


def _loss(
    net: GroupNet,
    tensors: TrainingTensors,
    groups: NDArray[np.int64],
    penalty: float = 0.0,
    offsets: MachineOffsets | None = None,
) -> torch.Tensor:
    """Mean absolute log error of the total (half the weight) and of both passes, and the penalised residual."""
    additive, inputs = log_predictions(net, tensors, groups, offsets)
    index = torch.as_tensor(groups)
    residual = net.residual(inputs, offsets.of(offsets.head, tensors.machine[index]) if offsets is not None else None)
    passes = additive + residual
    predicted = torch.cat([passes, torch.logsumexp(passes, dim=1, keepdim=True)], dim=1)
    errors = smooth_l1(predicted - tensors.log_target[index], _NOISE)
    return (errors * torch.tensor([0.25, 0.25, 0.5])).sum(dim=1).mean() + penalty * (residual**2).mean()


def smooth_l1(error: torch.Tensor, beta: float = 0.03) -> torch.Tensor:
    """Absolute error, quadratic below ``beta``."""
    return torch.where(error.abs() < beta, 0.5 * error**2 / beta, error.abs() - 0.5 * beta)


def standardise(net: GroupNet, train: TrainingTensors) -> None:
    """Centres and scales a net's inputs by what it is trained on."""
    features = train.features
    net.feature_mean.copy_(features.mean(dim=0))
    net.feature_scale.copy_(_spread(features))
    net.feature_low.copy_(features.amin(dim=0))
    net.feature_high.copy_(features.amax(dim=0))
    with torch.inference_mode():
        _, inputs = log_predictions(net, train, np.arange(len(train)))
        net.head_mean.copy_(inputs.mean(dim=0))
        net.head_scale.copy_(_spread(inputs))


def _spread(inputs: torch.Tensor) -> torch.Tensor:
    """Standard deviation of each column; 1 for one that never changed, lest its first change be a huge one."""
    deviation = inputs.std(dim=0)
    return torch.where(deviation > _CONSTANT, deviation, 1.0)


def widen_range(net: GroupNet, train: TrainingTensors) -> None:
    """Lets a trained net see the features of further groups as they are."""
    net.feature_low.copy_(torch.minimum(net.feature_low, train.features.amin(dim=0)))
    net.feature_high.copy_(torch.maximum(net.feature_high, train.features.amax(dim=0)))


def bound_residual(net: GroupNet, train: TrainingTensors) -> None:
    """Bounds the residual to its range on the machine's own training groups, beyond which nothing backs it."""
    own = np.flatnonzero((train.machine == 0).numpy())
    with torch.inference_mode():
        _, inputs = log_predictions(net, train, own)
        residual = net.residual(inputs)
        net.residual_low.copy_(torch.quantile(residual, 0.002, dim=0))
        net.residual_high.copy_(torch.quantile(residual, 0.998, dim=0))
