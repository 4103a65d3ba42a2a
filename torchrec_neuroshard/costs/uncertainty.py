"""How sure a cost model is: what its ensemble's disagreement means, and where its data end.

Nets trained from different seeds agree where records are dense and drift apart where there are none
[Lakshminarayanan2017ensembles]; how large an error goes with a disagreement is fitted on groups that no net was
trained on.

References:
    [Lakshminarayanan2017ensembles] B. Lakshminarayanan, A. Pritzel, C. Blundell. Simple and Scalable Predictive
        Uncertainty Estimation using Deep Ensembles. NeurIPS 2017.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import FEATURES, ShardFeatures

# Features with a range of their own; the others follow from them or are shares and flags.
RANGED: tuple[str, ...] = ("log_rows", "log_dim", "log_batch", "log_bag_length", "log_lookups", "log_table_bytes")
_MARGIN = 0.5  # of an octave (features are binary logarithms), by which a shard may lie outside


@dataclass(frozen=True)
class Uncertainty:
    """What is known about a model's errors.

    Attributes:
        error_floor: typical relative error where the nets agree.
        error_per_spread: typical relative error for each unit of disagreement beyond that.
        largest_spread: disagreement that 99 % of the measured groups stay below; beyond it a group is unlike them.
        low: by feature of :data:`RANGED`, the least value measured.
        high: likewise the largest.
    """

    error_floor: float
    error_per_spread: float
    largest_spread: float
    low: Mapping[str, float]
    high: Mapping[str, float]

    def expected_error(self, spread: NDArray[np.float64]) -> NDArray[np.float64]:
        """Typical (median) relative error of groups with a disagreement, of any shape."""
        return self.error_floor + self.error_per_spread * spread

    def outside(self, shards: ShardFeatures) -> dict[str, NDArray[np.bool_]]:
        """By feature, whether each shard ([shards]) lies outside what was measured; only features where any does."""
        result = {}
        for name in RANGED:
            values = shards.features[:, FEATURES.index(name)]
            beyond = (values < self.low[name] - _MARGIN) | (values > self.high[name] + _MARGIN)
            if beyond.any():
                result[name] = beyond
        return result

    @classmethod
    def fit(
        cls,
        spread: NDArray[np.float64],
        relative_error: NDArray[np.float64],
        measured: ShardFeatures,
        all_spread: NDArray[np.float64] | None = None,
    ) -> Uncertainty:
        """Fits the typical error by disagreement (least absolute deviations).

        Args:
            spread: [groups] disagreement on groups that no net was trained on.
            relative_error: [groups] their absolute relative error.
            measured: all shards that the nets were trained on.
            all_spread: disagreement on all measured groups; None for ``spread``.
        """
        floor, slope = _median_line(spread, relative_error)
        columns = {name: measured.features[:, FEATURES.index(name)] for name in RANGED}
        return cls(
            floor,
            slope,
            float(np.percentile(spread if all_spread is None else all_spread, 99)),
            {name: float(column.min()) for name, column in columns.items()},
            {name: float(column.max()) for name, column in columns.items()},
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Uncertainty:
        """Reads what :meth:`to_json` wrote."""
        low, high = ({name: float(record[end][name]) for name in RANGED} for end in ("low", "high"))
        return cls(
            float(record["error_floor"]), float(record["error_per_spread"]), float(record["largest_spread"]), low, high
        )


def _median_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Intercept and slope, both at least 0, of the line that minimises absolute deviations (a linear program)."""
    from scipy import sparse
    from scipy.optimize import linprog

    n = len(x)
    # Variables: intercept, slope, and for each point how far it lies above and below the line.
    design = sparse.hstack([np.ones((n, 1)), x[:, None], sparse.eye(n), -sparse.eye(n)])
    solution = linprog(np.concatenate([[0.0, 0.0], np.ones(2 * n)]), A_eq=design, b_eq=y)
    return float(solution.x[0]), float(solution.x[1])
