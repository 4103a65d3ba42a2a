"""NeuroShard's cost model of fused groups [Zha2023neuroshard], as its authors published it.

What is taken from where, in github.com/daochenzha/neuroshard at commit 06aaa2b:

- ``tools/gen_dlrm_data.py`` and ``collect_compute_cost_data.py``, the features: for each table its dim, pooling
  factor and rows as plain numbers, and for the batch's *distinct* rows the share hit once, twice, 3 to 4, 5 to 8, ...,
  16385 to 32768 times, and more often (17 bins): 20 numbers.
- ``neuroshard/compute_cost_model.py``, net and training: features standardised (divided by the standard deviation plus
  1e-6); a table MLP of 128 and 32 units, with a ReLU after both; their sum over the tables; a linear layer from these
  32 to 64, a ReLU, one output. The mean squared error of the cost in ms, Adam with learning rate 1e-3, 512 groups a
  step, the weights with the lowest error on validation groups, which are evaluated after each epoch.
- ``train_compute_cost_model.py``: 1000 epochs. ``compute_bench.py``: one cost for forward and backward together.

What differs here: features are standardised by the shards of training groups, where the paper has its pool of tables,
test tables among them; the histogram is the expected one of a table's access distribution, where the paper counts one
batch; groups are split as :func:`~torchrec_neuroshard.training.dataset.split_groups` does, by base table, where the
paper draws test groups from the tables of training; and some thousand groups are there to train on, not 100,000.
Training stops after 250 epochs without a lower error on validation groups. A cost below the lowest one of training (a
net trained in ms may predict negative ones) is raised to that.

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from torchrec_neuroshard.access import REUSE_EDGES
from torchrec_neuroshard.measure.specs import GroupSpec

PAPER_FEATURES: tuple[str, ...] = (
    *(f"bin_{index}" for index in range(len(REUSE_EDGES))),
    "dim",
    "pooling_factor",
    "row",
)

_TABLE_UNITS = (128, 32)
_HEAD_UNITS = 64


def paper_features(spec: GroupSpec) -> NDArray[np.float64]:
    """[shards, len(PAPER_FEATURES)] of a measured group; the histograms depend on its batch."""
    return np.asarray(
        [
            [
                *shard.distribution().reuse_histogram(spec.batch_size * shard.pooling_factor, share_of="rows"),
                shard.dim,
                shard.pooling_factor,
                shard.rows,
            ]
            for shard in spec.shards
        ]
    )


@dataclass(frozen=True)
class PaperGroups:
    """Groups as the paper's net sees them.

    Attributes:
        features: [shards, features], group after group.
        first: [groups + 1] index of the first shard of each group, and the number of shards.
        target_ms: [groups] measured cost.
    """

    features: NDArray[np.float64]
    first: NDArray[np.int64]
    target_ms: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.target_ms)

    def select(self, groups: NDArray[np.bool_]) -> PaperGroups:
        """The groups for which ``groups`` [groups] is true."""
        lengths = np.diff(self.first)
        first = np.concatenate([[0], np.cumsum(lengths[groups])])
        return PaperGroups(self.features[np.repeat(groups, lengths)], first, self.target_ms[groups])


class PaperNet(nn.Module):
    """The paper's net: a table MLP, a sum over tables, an output MLP.

    Args:
        features: inputs of each table, standardised.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        hidden, embedding = _TABLE_UNITS
        self.table = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, embedding), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(embedding, _HEAD_UNITS), nn.ReLU(), nn.Linear(_HEAD_UNITS, 1))

    def forward(self, features: torch.Tensor, owner: torch.Tensor, groups: int) -> torch.Tensor:
        """[groups] costs, from [tables, features] and [tables] the group of each table."""
        tables = self.table(features)
        cost: torch.Tensor = self.head(tables.new_zeros(groups, tables.shape[1]).index_add(0, owner, tables))
        return cost.squeeze(1)


@dataclass(frozen=True)
class PaperConfig:
    """Hyper-parameters, by default the published ones but for patience.

    Attributes:
        epochs: passes over the training groups.
        patience: epochs without a lower error on validation groups after which training stops; the paper goes on.
        batch_groups: groups per optimizer step.
        learning_rate: Adam's.
        log_cost: learn the logarithm of the cost, so that relative errors count (not the paper's).
        seed: seeds initial weights and the order of batches.
    """

    epochs: int = 1000
    patience: int = 250
    batch_groups: int = 512
    learning_rate: float = 1e-3
    log_cost: bool = False
    seed: int = 0


class PaperModel:
    """A trained net with its standardisation; see :func:`train_paper_model`.

    Attributes:
        net: the net.
        best_epoch: the one after which its weights were kept, from 1.
    """

    best_epoch = 0

    def __init__(self, net: PaperNet, train: PaperGroups, config: PaperConfig) -> None:
        self.net = net
        self._mean = train.features.mean(axis=0)
        self._scale = train.features.std(axis=0) + 1e-6
        self._lowest_ms = float(train.target_ms.min())
        self._log_cost = config.log_cost

    def inputs(self, groups: PaperGroups) -> torch.Tensor:
        """[shards, features] standardised, float32."""
        return torch.as_tensor((groups.features - self._mean) / self._scale, dtype=torch.float32)

    def targets(self, groups: PaperGroups) -> torch.Tensor:
        """[groups] what the net is to predict, float32."""
        cost = np.log(groups.target_ms) if self._log_cost else groups.target_ms
        return torch.as_tensor(cost, dtype=torch.float32)

    @torch.inference_mode()
    def raw(self, inputs: torch.Tensor, first: NDArray[np.int64]) -> torch.Tensor:
        """[groups] outputs of the net for all groups of ``first`` [groups + 1]."""
        owner = torch.as_tensor(np.repeat(np.arange(len(first) - 1), np.diff(first)))
        return self.net(inputs, owner, len(first) - 1)

    def predict(self, groups: PaperGroups) -> NDArray[np.float64]:
        """[groups] ms, at least the lowest cost of the training groups."""
        raw = self.raw(self.inputs(groups), groups.first).numpy().astype(np.float64)
        return np.maximum(np.exp(raw) if self._log_cost else raw, self._lowest_ms)


def train_paper_model(train: PaperGroups, validation: PaperGroups, config: PaperConfig) -> PaperModel:
    """Trains the net as the paper does, and keeps its best epoch on the validation groups."""
    generator = np.random.default_rng(config.seed)
    torch.manual_seed(config.seed)
    net = PaperNet(train.features.shape[1])
    model = PaperModel(net, train, config)
    inputs, targets = model.inputs(train), model.targets(train)
    validation_inputs, validation_targets = model.inputs(validation), model.targets(validation)
    optimizer = torch.optim.Adam(net.parameters(), lr=config.learning_rate)
    best, best_error = copy.deepcopy(net.state_dict()), float("inf")
    for epoch in range(1, config.epochs + 1):
        order = generator.permutation(len(train))
        for start in range(0, len(train), config.batch_groups):
            groups = order[start : start + config.batch_groups]
            shards, owner = _shards_of(train.first, groups)
            loss = ((net(inputs[shards], owner, len(groups)) - targets[groups]) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        error = float(((model.raw(validation_inputs, validation.first) - validation_targets) ** 2).mean())
        if error < best_error:
            best, best_error, model.best_epoch = copy.deepcopy(net.state_dict()), error, epoch
        elif epoch - model.best_epoch >= config.patience:
            break
    net.load_state_dict(best)
    return model


def _shards_of(first: NDArray[np.int64], groups: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
    """[n] indices of the shards of some groups, and for each the position of its group in ``groups``."""
    lengths = np.diff(first)[groups]
    owner = np.repeat(np.arange(len(groups)), lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return torch.as_tensor(first[groups][owner] + within), torch.as_tensor(owner)
