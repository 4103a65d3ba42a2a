"""How fast the machine ran while each record was taken, and its records as if it had run evenly.

A shared machine's speed drifts (seen on virtual machines: 5 % within half an hour, 25 to 37 % within six hours, 30 %
within minutes while the core next to the measured one works), which is no property of any group, but spoils what a
model learns and what an error on later records says. Two things tell it: the reference times that a record carries
(:mod:`torchrec_neuroshard.measure.reference`), and what the errors of neighbouring records have in common. Only
groups drawn by chance, of tables that are not held out, have a say in the latter: what a model gets wrong about
held-out tables, or about the groups of plans, stays an error.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import median_filter
from scipy.optimize import nnls

from torchrec_neuroshard.measure.reference import REFERENCE_TIMES
from torchrec_neuroshard.training.dataset import GroupData

_RIDGE = 10.0  # pull of each reference time's weight to its even share, in records whose reference is off by 10 %
_FEWEST_FOR_REFERENCE = 200  # records, below which weights of reference times would be fitted to noise
_LARGEST_SLOWNESS = 0.7  # in log space; what exceeds it is a damaged figure, not a slow machine
_NEIGHBOURS = 101  # records whose median error is the drift of the one in the middle
_PAUSE_SECONDS = 600.0
_MINIMUM = 15  # records below which nothing is said about a machine's speed


@dataclass(frozen=True)
class ReferenceSpeed:
    """What a machine's reference times say about its speed.

    Attributes:
        usual_ms: [reference times] ms at the speed that a model describes.
        weights: [reference times, 2] change of the logarithm of forward and backward with that of each reference time.
    """

    usual_ms: NDArray[np.float64]
    weights: NDArray[np.float64]

    def log_slowness(self, reference_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """[groups, 2] logarithm of how much slower than usual each pass ran; 0 where a record has no reference.

        Args:
            reference_ms: [groups, reference times] ms, NaN where unknown.
        """
        slowness = np.log(reference_ms / self.usual_ms).clip(-_LARGEST_SLOWNESS, _LARGEST_SLOWNESS)
        return np.nan_to_num(slowness @ self.weights, nan=0.0)

    @classmethod
    def fit(cls, log_error: NDArray[np.float64], data: GroupData) -> ReferenceSpeed | None:
        """Least squares over one machine's groups that are not held out, with weights of at least zero.

        None when too few have reference times.

        Args:
            log_error: [groups, 2] logarithm of measured over predicted forward and backward.
            data: the groups.
        """
        telling = ~np.isnan(data.reference_ms).any(axis=1) & ~data.held_out
        if telling.sum() < _FEWEST_FOR_REFERENCE:
            return None
        usual = np.median(data.reference_ms[telling], axis=0)
        slowness = np.log(data.reference_ms[telling] / usual).clip(-_LARGEST_SLOWNESS, _LARGEST_SLOWNESS)
        target = log_error[telling] - np.median(log_error[telling], axis=0)
        target = target.clip(-_LARGEST_SLOWNESS, _LARGEST_SLOWNESS)
        times = slowness.shape[1]
        ridge = np.sqrt(_RIDGE) * 0.1
        design = np.vstack([slowness, ridge * np.eye(times)])
        even_share = np.full(times, ridge / times)
        weights = [nnls(design, np.concatenate([target[:, half], even_share]))[0] for half in range(2)]
        return cls(usual, np.column_stack(weights).astype(np.float64))

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {
            name: {"usual_ms": float(ms), "forward": float(row[0]), "backward": float(row[1])}
            for name, ms, row in zip(REFERENCE_TIMES, self.usual_ms, self.weights)
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> ReferenceSpeed:
        """Reads what :meth:`to_json` wrote."""
        rows = [record[name] for name in REFERENCE_TIMES]
        weights = np.asarray([[row["forward"], row["backward"]] for row in rows], dtype=np.float64)
        return cls(np.asarray([row["usual_ms"] for row in rows], dtype=np.float64), weights)


def drift(log_error: NDArray[np.float64], data: GroupData, speed: ReferenceSpeed | None) -> NDArray[np.float64]:
    """[groups, 2] logarithm of how much slower each pass ran than the model that made the errors expects.

    Args:
        log_error: [groups, 2] logarithm of measured over predicted forward and backward.
        data: the groups, of one machine.
        speed: what the machine's reference times say; None when nothing is known.
    """
    told = np.zeros_like(log_error) if speed is None else speed.log_slowness(data.reference_ms)
    return told + _common_to_neighbours(log_error - told, data)


def _common_to_neighbours(log_error: NDArray[np.float64], data: GroupData) -> NDArray[np.float64]:
    """[groups, 2] running median of the errors of records taken about the same time by the same process."""
    result = np.zeros_like(log_error)
    for members in _stretches(data):
        telling = members[~data.held_out[members] & data.by_chance[members]]
        if len(telling) < _MINIMUM:
            continue
        size = min(_NEIGHBOURS, len(telling) // 2 * 2 + 1)
        for half in range(log_error.shape[1]):
            smooth = median_filter(log_error[telling, half], size=size, mode="nearest")
            result[members, half] = np.interp(data.unix_time[members], data.unix_time[telling], smooth)
    return result


def _stretches(data: GroupData) -> list[NDArray[np.int64]]:
    """Records of one process, in the order of time, cut where it paused: who knows what happened meanwhile."""
    result: list[NDArray[np.int64]] = []
    for session in np.unique(data.session):
        members = np.flatnonzero(data.session == session)
        members = members[np.argsort(data.unix_time[members], kind="stable")]
        result += np.split(members, np.flatnonzero(np.diff(data.unix_time[members]) > _PAUSE_SECONDS) + 1)
    return result


def evened(data: GroupData, log_drift: NDArray[np.float64]) -> GroupData:
    """One machine's groups as if it had run at the median of its speeds all the time.

    Args:
        data: the groups as measured.
        log_drift: [groups, 2] from :func:`drift`.
    """
    return at_speed_of_model(data, log_drift - np.median(log_drift, axis=0))


def at_speed_of_model(data: GroupData, log_drift: NDArray[np.float64]) -> GroupData:
    """The groups as if the machine had run as fast as the model expects that told the drift.

    Args:
        data: the groups as measured.
        log_drift: [groups, 2] from :func:`drift`.
    """
    measured = data.measured_ms / np.exp(log_drift)
    total = data.total_ms * measured.sum(axis=1) / data.measured_ms.sum(axis=1)
    return replace(data, measured_ms=measured, total_ms=total)
