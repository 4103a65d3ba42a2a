"""Accuracy of a cost model on measured records."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from torchrec_neuroshard.costs.additive import GroupCosts
from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.features import segment_sums
from torchrec_neuroshard.training.dataset import GroupData
from torchrec_neuroshard.training.train_collectives import CollectiveData

_STRATUM_LOOKUPS = 1.25  # groups of one stratum have equal batches and lookups within this factor


def predict_groups(model: GroupCosts, data: GroupData) -> NDArray[np.float64]:
    """[groups, 2] predicted forward and backward ms."""
    return model.predict(segment_sums(model.contributions(data.shards), data.group, len(data)))


def group_accuracy(model: GroupCosts, data: GroupData) -> dict[str, Any]:
    """Absolute percentage errors (median, p95) of forward, backward and their sum, and rank correlation.

    ``kendall_tau`` is over all groups; ``kendall_tau_strata`` over pairs of equal batch size and lookups
    within 25 %, where the number of lookups alone cannot tell which group is slower.
    """
    predicted = predict_groups(model, data)
    parts = {
        "forward": (predicted[:, 0], data.measured_ms[:, 0]),
        "backward": (predicted[:, 1], data.measured_ms[:, 1]),
        "total": (predicted.sum(axis=1), data.measured_ms.sum(axis=1)),
    }
    result: dict[str, Any] = {"records": len(data)}
    for name, (guess, truth) in parts.items():
        result[name] = _errors(guess, truth)
    guess, truth = parts["total"]
    result["kendall_tau"] = round(float(kendalltau(guess, truth).statistic), 4)
    result["kendall_tau_strata"] = _stratified_tau(guess, truth, data)
    result["noise_within_record_median"] = round(float(np.median(data.noise)), 4)
    return result


def collective_accuracy(model: CollectiveModel, data: Sequence[CollectiveData]) -> dict[str, Any]:
    """Absolute percentage errors of each rank's time and of the slowest rank's, by number of ranks."""
    result: dict[str, Any] = {}
    for part in data:
        ranks = part.dims.shape[1]
        predicted = model.per_rank(part.batch_size, part.dims, part.backward, ranks, part.delays_ms)
        result[f"{ranks}_ranks"] = {
            "records": len(part),
            "per_rank": _errors(predicted.ravel(), part.measured_ms.ravel()),
            "slowest": _errors(predicted.max(axis=1), part.measured_ms.max(axis=1)),
        }
    return result


def _errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> dict[str, float]:
    error = np.abs(predicted / measured - 1.0)
    return {
        "median_ape": round(float(np.median(error)), 4),
        "p95_ape": round(float(np.percentile(error, 95)), 4),
        "bias": round(float(np.exp(np.mean(np.log(predicted / measured))) - 1.0), 4),
    }


def _stratified_tau(guess: NDArray[np.float64], truth: NDArray[np.float64], data: GroupData) -> float | None:
    """Concordant minus discordant pairs over all pairs of a stratum; None without pairs."""
    first, second = np.triu_indices(len(guess), k=1)
    ratio = data.lookups[first] / data.lookups[second]
    alike = (data.batch_size[first] == data.batch_size[second]) & (
        np.abs(np.log(ratio)) <= np.log(_STRATUM_LOOKUPS)
    )
    agreement = np.sign(guess[first] - guess[second]) * np.sign(truth[first] - truth[second])
    return round(float(agreement[alike].mean()), 4) if alike.any() else None
