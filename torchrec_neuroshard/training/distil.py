"""Distils an ensemble into one network, the mean head that the search asks.

An ensemble's mean is more accurate than any of its nets, and its spread tells how sure it is, but a search evaluates
hundreds of thousands of groups. Nothing is measured here: groups are free, so the student sees many more of them
than the ensemble did [Hinton2015distilling].

References:
    [Hinton2015distilling] G. Hinton, O. Vinyals, J. Dean. Distilling the Knowledge in a Neural Network. 2015,
        arXiv 1503.02531.
"""

from __future__ import annotations

from itertools import count, islice
from typing import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardFeatures, segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.measure.pool import is_held_out, sample_group
from torchrec_neuroshard.training.dataset import GroupData, spec_features
from torchrec_neuroshard.training.train_groups import TrainingConfig, TrainingTensors, bound_residual, fit, widen_range

_SEED = 77_000_000  # of the sampled groups; no collection uses it
_VALIDATION = 0.1
_EPOCHS, _LEARNING_RATE = 40, 2e-3


def distilled(
    ensemble: GroupCostModel,
    measured: GroupData,
    sampled: int = 4000,
    epochs: int = _EPOCHS,
    log: Callable[[str], None] = print,
) -> GroupCostModel:
    """A model of one network that predicts what the ensemble predicts on average.

    Args:
        ensemble: the teacher; returned as it is when it has at most one network.
        measured: groups that the ensemble was trained on; their measured times are not used.
        sampled: further groups, drawn from the pool of training tables.
        epochs: passes over all groups.
        log: called with a line about the result.
    """
    if len(ensemble.nets) <= 1:
        return ensemble
    parts = [measured.shards, *islice(_sampled_shards(), sampled)]
    sizes = [len(part.work) for part in parts[1:]]
    group = np.concatenate([measured.group, len(measured) + np.repeat(np.arange(sampled), sizes)]).astype(np.int64)
    shards = ShardFeatures.concatenate(parts)
    groups = len(measured) + sampled
    predicted = np.log(_predicted(ensemble, shards, group, groups))
    targets = np.column_stack([predicted, np.logaddexp(predicted[:, 0], predicted[:, 1])])
    chosen = np.random.default_rng(0).random(groups) < _VALIDATION
    train, validation = (_tensors(ensemble, shards, group, targets, np.flatnonzero(part)) for part in (~chosen, chosen))
    net = GroupNet()
    net.load_state_dict(ensemble.nets[0].state_dict())
    widen_range(net, train)
    config = TrainingConfig(epochs=epochs, learning_rate=_LEARNING_RATE, weight_decay=0.0, residual_penalty=0.0)
    fit(net, train, validation, config)
    bound_residual(net, train)
    model = GroupCostModel(ensemble.prior, (net.eval(),))
    error = np.abs(np.log(_predicted(model, shards, group, groups).sum(axis=1)) - targets[:, 2])[chosen]
    median, p95 = 100 * np.percentile(error, [50, 95])
    log(f"mean head: {median:.1f} % median, {p95:.1f} % p95 off the ensemble")
    return model


def _sampled_shards() -> Iterator[ShardFeatures]:
    for index in count():
        spec = sample_group(_SEED, index)
        if not is_held_out(spec):
            yield spec_features(spec)


def _predicted(
    model: GroupCostModel, shards: ShardFeatures, group: NDArray[np.int64], groups: int
) -> NDArray[np.float64]:
    return model.predict(segment_sums(model.contributions(shards), group, groups))


def _tensors(
    model: GroupCostModel,
    shards: ShardFeatures,
    group: NDArray[np.int64],
    targets: NDArray[np.float64],
    chosen: NDArray[np.int64],
) -> TrainingTensors:
    first = np.searchsorted(group, np.arange(len(targets) + 1))
    rows = np.concatenate([np.arange(first[index], first[index + 1]) for index in chosen])
    part = ShardFeatures(shards.work[rows], shards.features[rows], shards.regime[rows])
    owner = np.repeat(np.arange(len(chosen)), np.diff(first)[chosen])
    return TrainingTensors.with_targets(part, owner, targets[chosen], model.prior)
