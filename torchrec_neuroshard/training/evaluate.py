"""Accuracy of a cost model on measured records."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.additive import GroupCosts
from torchrec_neuroshard.costs.collective_model import CollectiveModel, CollectiveTimes
from torchrec_neuroshard.costs.features import segment_sums
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.training.collective_data import CollectiveData, layout_name
from torchrec_neuroshard.training.dataset import GroupData

_STRATUM_LOOKUPS = 1.25  # groups of one stratum have equal batches and lookups within this factor


def predict_groups(model: GroupCosts, data: GroupData) -> NDArray[np.float64]:
    """[groups, 2] predicted forward and backward ms."""
    return model.predict(segment_sums(model.contributions(data.shards), data.group, len(data)))


def group_spread(model: GroupCostModel, data: GroupData) -> NDArray[np.float64]:
    """[groups] disagreement of an ensemble's nets, see :meth:`GroupCostModel.spread`."""
    return model.spread(segment_sums(model.contributions(data.shards), data.group, len(data)))


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


def predict_collectives(model: CollectiveModel, data: CollectiveData) -> CollectiveTimes:
    """Predicted ms of each rank, from its own start to its end, and of the slowest."""
    return model.predict(data.calls)


def collective_accuracy(model: CollectiveModel, data: Sequence[CollectiveData]) -> dict[str, Any]:
    """Absolute percentage errors of each rank's time and of the slowest rank's, overall and by what was called.

    Empty without data. ``by_layout`` is by hosts x ranks per host; an all-to-all's directions are kinds of their own.
    """
    if not data:
        return {}
    return collective_accuracy_of([predict_collectives(model, part) for part in data], data)


def collective_accuracy_of(predicted: Sequence[CollectiveTimes], data: Sequence[CollectiveData]) -> dict[str, Any]:
    """:func:`collective_accuracy` of predictions already made, one for each of the data."""
    names = [name for part in data for name in part.kind_names]
    ranks = [f"{part.ranks}_ranks" for part in data for _ in range(len(part))]
    hosts = [f"{part.hosts}_host{'s' if part.hosts > 1 else ''}" for part in data for _ in range(len(part))]
    layouts = [layout_name(part.hosts, part.local_world_size) for part in data for _ in range(len(part))]
    slowest = np.concatenate([times.slowest for times in predicted])
    slowest_measured = np.concatenate([part.measured_ms.max(axis=1) for part in data])
    per_rank = np.concatenate([times.per_rank.ravel() for times in predicted])
    per_rank_measured = np.concatenate([part.measured_ms.ravel() for part in data])
    call = np.repeat(np.arange(len(names)), [part.ranks for part in data for _ in range(len(part))])

    def errors(members: NDArray[np.bool_]) -> dict[str, Any]:
        of_ranks = members[call]
        return {
            "records": int(members.sum()),
            "per_rank": percentage_errors(per_rank[of_ranks], per_rank_measured[of_ranks]),
            "slowest": percentage_errors(slowest[members], slowest_measured[members]),
        }

    def by(labels: Sequence[str]) -> dict[str, Any]:
        array = np.asarray(labels)
        return {label: errors(array == label) for label in dict.fromkeys(labels)}

    result: dict[str, Any] = errors(np.ones(len(names), dtype=bool))
    properties = {"kind": names, "ranks": ranks, "hosts": hosts, "layout": layouts}
    for name, labels in properties.items():
        result[f"by_{name}"] = by(labels)
    result["by_kind_and_ranks"] = by([f"{kind}, {count}" for kind, count in zip(names, ranks)])
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
    from scipy.stats import kendalltau  # machines that only measure do without

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
