"""Calibration: from another machine's cost model and some minutes of records to a model of this machine."""

from __future__ import annotations

import copy
from typing import Any, Mapping, Sequence

import numpy as np
import torch

from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models
from torchrec_neuroshard.costs.prior import GroupPrior
from torchrec_neuroshard.training.dataset import GroupData, group_data
from torchrec_neuroshard.training.evaluate import predict_groups
from torchrec_neuroshard.training.train_groups import TrainingConfig

_STEPS = 600  # of the optimizer, whatever the number of records
_BATCH = 64
_EPOCHS = (20, 150)
_LEAST_SCALE = 1.001e-3  # of an input that varies; earlier versions gave 1e-3 to those that do not
_FOLDS = 5  # of the groups by which a base is chosen


def calibration_config(records: int, nets: int, seed: int = 0) -> TrainingConfig:
    """Hyper-parameters for fine-tuning on few records: small steps, few of them.

    Args:
        records: number of group records.
        nets: networks of the model that training starts from.
        seed: seeds the order of batches.
    """
    epochs = int(np.clip(_STEPS * _BATCH / max(records, 1), *_EPOCHS))
    return TrainingConfig(nets, epochs, _BATCH, learning_rate=1e-3, weight_decay=0.0, seed=seed)


def nearest_model(records: Sequence[dict[str, Any]], device: str) -> CostModel:
    """The shipped model of the records' machine, else that of the device which fits them best, its prior refitted.

    Args:
        records: group records of the machine to calibrate for.
        device: "cpu" or "cuda".

    Raises:
        CostModelError: no model of such a device is shipped.
    """
    data = group_data(records)
    models = [CostModel.load(name) for name in shipped_models()]
    fitting = {
        model.name: model
        for model in models
        if model.card["hardware"]["device"] == device and model.ensemble is not None
    }
    if not fitting:
        raise CostModelError(f"no cost model of a {device} device is shipped; `pretrain` one, or give --base")
    machine = str(records[0]["hardware"]["name"]) if records else ""
    own = next((model for model in fitting.values() if model.hardware == machine), None)
    if own is not None:  # few records may be fitted better by chance
        return own
    ensembles = {name: model.ensemble for name, model in fitting.items() if model.ensemble is not None}
    return fitting[nearest_groups(ensembles, data)]


def nearest_groups(models: Mapping[str, GroupCostModel], data: GroupData) -> str:
    """Name of the model that fits some groups best once its prior is refitted to them.

    Args:
        models: at least one, by name.
        data: measured groups of the machine to calibrate for.
    """
    return min(models, key=lambda name: misfit(models[name], data))


def misfit(model: GroupCostModel, data: GroupData) -> float:
    """Median absolute log error of forward and backward once the prior is refitted, the nets as they are.

    Each group is predicted with the prior refitted to the others; a prior fits any few groups that it has seen.
    """
    fold = np.arange(len(data)) % min(_FOLDS, len(data))
    errors = []
    for index in np.unique(fold):
        left = data.subset(fold == index)
        others = data.subset(fold != index) if len(data) > 1 else data
        errors.append(np.abs(np.log(predict_groups(refitted(model, others), left) / left.measured_ms)))
    return float(np.median(np.concatenate(errors)))


def refitted(model: GroupCostModel, data: GroupData) -> GroupCostModel:
    """The model with its prior refitted to some groups, the nets as they are.

    The prior is fitted to what it would have to say for the nets, which correct it, to be right. Nets that are
    trained further undo what they corrected in vain: there, a prior fitted by itself was seen to be as good.
    """
    correction = predict_groups(model, data) / predict_groups(GroupCostModel(model.prior), data)
    prior = GroupPrior.fit(data.work, data.regime, data.measured_ms / correction, model.prior)
    return GroupCostModel(prior, model.nets)


def as_start(model: GroupCostModel) -> GroupCostModel:
    """The same model, ready to learn of inputs that were constant in its training (say, no group had fp16 weights).

    In models of earlier versions such an input is standardised by next to nothing, so that any other value drowns all
    else, through weights that were never trained. Here it gets a scale of one, and weights of zero. Predictions for
    groups like those of the training stay the same.
    """
    nets = []
    for net in model.nets:
        ready = copy.deepcopy(net)
        for layers, scale in ((ready.embed, ready.feature_scale), (ready.head, ready.head_scale)):
            first, constant = layers[0], scale <= _LEAST_SCALE
            if scale is ready.feature_scale:
                constant = constant | (ready.feature_high == ready.feature_low)
            assert isinstance(first, torch.nn.Linear)
            with torch.no_grad():
                first.weight[:, constant] = 0.0
            scale[constant] = 1.0
        nets.append(ready)
    return GroupCostModel(model.prior, tuple(nets))
