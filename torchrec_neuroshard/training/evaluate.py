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
    return accuracy_of(predict_groups(model, data), data)


def accuracy_of(predicted: NDArray[np.float64], data: GroupData) -> dict[str, Any]:
    """:func:`group_accuracy` of predictions already made, [groups, 2] forward and backward ms.

    Correlations are None where there is no pair to compare.
    """
    parts = {
        "forward": (predicted[:, 0], data.measured_ms[:, 0]),
        "backward": (predicted[:, 1], data.measured_ms[:, 1]),
        "total": (predicted.sum(axis=1), data.measured_ms.sum(axis=1)),
    }
    result: dict[str, Any] = {"records": len(data)}
    for name, (guess, truth) in parts.items():
        result[name] = percentage_errors(guess, truth)
    guess, truth = parts["total"]
    result["kendall_tau"] = kendall_tau(guess, truth)
    result["kendall_tau_strata"] = _stratified_tau(guess, truth, data)
    result["noise_within_record_median"] = round(float(np.median(data.noise)), 4)
    return result


def predict_collectives(model: CollectiveModel, data: CollectiveData) -> NDArray[np.float64]:
    """[calls, ranks] predicted ms from each rank's own start to its end; all ranks share one host."""
    return model.per_rank(data.batch_size, data.dims, data.backward, data.dims.shape[1], data.delays_ms)


def collective_accuracy(model: CollectiveModel, data: Sequence[CollectiveData]) -> dict[str, Any]:
    """Absolute percentage errors of each rank's time and of the slowest rank's, by number of ranks."""
    result: dict[str, Any] = {}
    for part in data:
        predicted = predict_collectives(model, part)
        result[f"{part.dims.shape[1]}_ranks"] = {
            "records": len(part),
            "per_rank": percentage_errors(predicted.ravel(), part.measured_ms.ravel()),
            "slowest": percentage_errors(predicted.max(axis=1), part.measured_ms.max(axis=1)),
        }
    return result


def percentage_errors(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> dict[str, float]:
    """Median and p95 of the absolute error as a share of the measured ms, and the geometric mean error (bias)."""
    error = np.abs(predicted / measured - 1.0)
    return {
        "median_ape": round(float(np.median(error)), 4),
        "p95_ape": round(float(np.percentile(error, 95)), 4),
        "bias": round(float(np.exp(np.mean(np.log(predicted / measured))) - 1.0), 4),
    }


def kendall_tau(predicted: NDArray[np.float64], measured: NDArray[np.float64]) -> float | None:
    """Rank correlation; None where it is undefined (one record, or all alike)."""
    if len(measured) < 2:
        return None
    tau = float(kendalltau(predicted, measured).statistic)
    return round(tau, 4) if np.isfinite(tau) else None


def _stratified_tau(guess: NDArray[np.float64], truth: NDArray[np.float64], data: GroupData) -> float | None:
    """Concordant minus discordant pairs over all pairs of a stratum; None without pairs."""
    log_lookups = np.log(np.maximum(data.lookups, 1.0))
    order = np.lexsort((log_lookups, data.batch_size))
    agreement, pairs = 0.0, 0
    for batch in np.split(order, np.flatnonzero(np.diff(data.batch_size[order])) + 1):
        ends = np.searchsorted(log_lookups[batch], log_lookups[batch] + np.log(_STRATUM_LOOKUPS), side="right")
        for index, end in enumerate(ends):  # an array of all pairs of a large file would not fit in memory
            one, others = batch[index], batch[index + 1 : end]
            agreement += float((np.sign(guess[others] - guess[one]) * np.sign(truth[others] - truth[one])).sum())
            pairs += len(others)
    return round(agreement / pairs, 4) if pairs else None
