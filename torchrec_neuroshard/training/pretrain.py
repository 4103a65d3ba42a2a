"""From records of fused groups to what a cost model ships: ensemble, mean head, uncertainty, held-out error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.uncertainty import Uncertainty
from torchrec_neuroshard.training.dataset import GroupData, GroupSplit, group_data, split_groups
from torchrec_neuroshard.training.distil import distilled
from torchrec_neuroshard.training.drift import ReferenceSpeed, drift, evened
from torchrec_neuroshard.training.evaluate import group_accuracy, group_spread, predict_groups
from torchrec_neuroshard.training.train_groups import TrainingConfig, fit_prior, train_group_model

_FIRST_LOOK = TrainingConfig(nets=1, epochs=30)  # the model whose errors tell the machine's drift

Log = Callable[[str], None]


@dataclass(frozen=True)
class TrainedGroups:
    """A cost model of fused groups with everything its card says.

    Attributes:
        mean: the mean head, one network.
        ensemble: the networks whose mean it was taught.
        uncertainty: what the ensemble's disagreement means.
        split: the groups, as if the machine had run evenly.
        log_drift: [groups of the machine, 2] drift taken out, see :mod:`.drift`.
        speed: what the machine's reference times say of its speed, by the final ensemble; None without any.
        as_measured: held-out groups with the drift left in.
        start: what training started from, with its prior refitted to this machine; None for random weights.
    """

    mean: GroupCostModel
    ensemble: GroupCostModel
    uncertainty: Uncertainty
    split: GroupSplit
    log_drift: NDArray[np.float64]
    speed: ReferenceSpeed | None
    as_measured: GroupData
    start: GroupCostModel | None = None

    def accuracy(self) -> dict[str, Any]:
        """Held-out errors for the card."""
        test = self.split.test
        begun = {} if self.start is None else {"groups_held_out_tables_before_tuning": group_accuracy(self.start, test)}
        return {
            **begun,
            "groups_held_out_tables": group_accuracy(self.mean, test),
            "groups_held_out_tables_drift_left_in": group_accuracy(self.mean, self.as_measured),
            "groups_held_out_tables_ensemble": group_accuracy(self.ensemble, test),
            "groups_held_out_tables_prior_alone": group_accuracy(GroupCostModel(self.mean.prior), test),
            "groups_validation": group_accuracy(self.mean, self.split.validation),
        }

    def drift_json(self) -> dict[str, Any]:
        """How far the machine's speed ranged over the records, as slowness over its median."""
        slowness = np.exp(self.log_drift - np.median(self.log_drift, axis=0))
        halves = zip(("forward", "backward"), np.percentile(slowness, [2, 98], axis=0).T.round(3).tolist())
        return {name: {"p2": low, "p98": high} for name, (low, high) in halves}


def train_groups_of(
    records: Iterable[dict[str, Any]],
    config: TrainingConfig | None = None,
    others: Iterable[dict[str, Any]] = (),
    start: GroupCostModel | None = None,
    log: Log = print,
) -> TrainedGroups:
    """Trains on undisturbed records of one machine, with those of other machines beside them.

    Args:
        records: group records of the machine that the model is for.
        config: hyper-parameters of the ensemble.
        others: group records of other machines.
        start: model to start from instead of random weights.
        log: called with a line for each step.

    Raises:
        ValueError: a part of the split would hold no record.
    """
    data = group_data(records)
    split_groups(data)  # too few records are told before any training
    even, log_drift = without_drift(data, log, start)
    split = split_groups(even)
    beside = [split_groups(without_drift(part, log)[0]).train for part in _by_machine(others)]
    ensemble = train_group_model(split, config, log, beside, start)
    mean = distilled(ensemble, split.train, log=log)
    spread = group_spread(ensemble, split.validation)
    usual_spread = np.concatenate([spread, group_spread(ensemble, split.train)])
    predicted = predict_groups(mean, split.validation).sum(axis=1)
    error = np.abs(predicted / split.validation.measured_ms.sum(axis=1) - 1.0)
    uncertainty = Uncertainty.fit(spread, error, split.train.shards, usual_spread)
    begun = None if start is None else GroupCostModel(ensemble.prior, start.nets)
    speed = ReferenceSpeed.fit(np.log(data.measured_ms / predict_groups(ensemble, data)), data)
    return TrainedGroups(mean, ensemble, uncertainty, split, log_drift, speed, split_groups(data).test, begun)


def without_drift(
    data: GroupData, log: Log = print, start: GroupCostModel | None = None
) -> tuple[GroupData, NDArray[np.float64]]:
    """One machine's groups as if it had run evenly, and the [groups, 2] log drift that was taken out."""
    split = split_groups(data)
    if start is not None:
        model = GroupCostModel(fit_prior(split.train, start), start.nets[:1])
    else:
        log(f"a first look at {len(data)} groups of {data.machine[0]}, for the machine's drift")
        model = train_group_model(split, _FIRST_LOOK, log)
    log_error = np.log(data.measured_ms / predict_groups(model, data))
    log_drift = drift(log_error, data, ReferenceSpeed.fit(log_error, data))
    return evened(data, log_drift), log_drift


def _by_machine(records: Iterable[dict[str, Any]]) -> Sequence[GroupData]:
    machines: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        machines.setdefault(record["hardware"]["name"], []).append(record)
    return [group_data(part) for _, part in sorted(machines.items())]
