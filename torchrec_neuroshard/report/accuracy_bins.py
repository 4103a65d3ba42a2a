"""Errors of a cost model broken down by a property of what was measured, such as batch size or optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.training.evaluate import percentage_errors

RATIO_PERCENTILES = (5, 25, 50, 75, 95)


@dataclass(frozen=True)
class Bin:
    """The records that share a range or a value of one property.

    Attributes:
        label: the range or the value, for people.
        low: smallest value of the range, itself included; None for values that are not numbers, and for no bound.
        high: end of the range, itself excluded; None likewise.
        records: how many records are in it.
        errors: median and p95 of the absolute percentage error, and bias, as shares (0.1 is 10 %).
        ratio_percentiles: predicted over measured ms at the percentiles :data:`RATIO_PERCENTILES`.
    """

    label: str
    low: float | None
    high: float | None
    records: int
    errors: dict[str, float]
    ratio_percentiles: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return {
            "bin": self.label,
            "low": self.low,
            "high": self.high,
            "records": self.records,
            **self.errors,
            "ratio_percentiles": {f"p{p}": value for p, value in zip(RATIO_PERCENTILES, self.ratio_percentiles)},
        }


@dataclass(frozen=True)
class Breakdown:
    """Errors by one property; its bins hold every record exactly once.

    Attributes:
        name: the property's key in the JSON object.
        title: the property for people, with its unit.
        bins: those that hold records, in rising order.
    """

    name: str
    title: str
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Times:
    """What is compared, in ms.

    Attributes:
        predicted: [records].
        measured: [records].
    """

    predicted: NDArray[np.float64]
    measured: NDArray[np.float64]

    def by_range(
        self,
        name: str,
        title: str,
        values: NDArray[np.float64] | NDArray[np.int64],
        edges: Sequence[float],
        whole: bool = False,
    ) -> Breakdown:
        """Errors by ranges of a number.

        The edges are fixed, not fitted to the records, so that reports on different files can be compared.

        Args:
            name: key of the breakdown.
            title: the property for people.
            values: [records] the number.
            edges: rising; each starts a range, and what lies below the first is a range of its own.
            whole: the number is whole, so a range is written with its last member ("4 to 7").
        """
        bounds = (None, *edges, None)
        index = np.searchsorted(np.asarray(edges), values, side="right")
        bins = [
            self._bin(_range_label(bounds[i], bounds[i + 1], whole), bounds[i], bounds[i + 1], index == i)
            for i in np.unique(index).tolist()
        ]
        return Breakdown(name, title, tuple(bins))

    def by_value(self, name: str, title: str, labels: Sequence[str], order: Sequence[str] = ()) -> Breakdown:
        """Errors by value of a property that is not a number.

        Args:
            name: key of the breakdown.
            title: the property for people.
            labels: [records] the value.
            order: all values in the order to show them; the alphabet's when empty.
        """
        array = np.asarray(labels)
        bins = [self._bin(label, None, None, array == label) for label in order or sorted(set(labels))]
        return Breakdown(name, title, tuple(bins))

    def by_count(self, name: str, title: str, values: NDArray[np.int64]) -> Breakdown:
        """Errors by each whole number that occurs, [records]."""
        bins = [
            self._bin(str(value), float(value), float(value + 1), values == value)
            for value in np.unique(values).tolist()
        ]
        return Breakdown(name, title, tuple(bins))

    def _bin(self, label: str, low: float | None, high: float | None, members: NDArray[np.bool_]) -> Bin:
        predicted, measured = self.predicted[members], self.measured[members]
        percentiles = np.percentile(predicted / measured, RATIO_PERCENTILES)
        return Bin(
            label,
            low,
            high,
            int(members.sum()),
            percentage_errors(predicted, measured),
            tuple(round(value, 4) for value in percentiles.tolist()),
        )


def _range_label(low: float | None, high: float | None, whole: bool) -> str:
    if high is None:
        return f"{_short(low)} and more"
    if low is None:
        return f"below {_short(high)}"
    if not whole:
        return f"{_short(low)} to {_short(high)}"
    return _short(low) if high == low + 1 else f"{_short(low)} to {_short(high - 1)}"


def _short(value: float | None) -> str:
    assert value is not None  # at most one side of a range is open
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= unit and value % unit == 0:
            return f"{value / unit:g}{suffix}"
    return f"{value:.10g}"
