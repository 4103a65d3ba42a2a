"""Analytic prior of a fused group: a non-negative combination of its work terms plus a launch cost.

The same form serves measured machines (coefficients fitted by non-negative least squares on relative error)
and machines known only by their data sheet (coefficients from bandwidths, :mod:`.hardware`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import WORK_TERMS

PASSES = ("forward", "backward")


@dataclass(frozen=True)
class GroupPrior:
    """Coefficients of the prior.

    Attributes:
        launch_ms: [2] fixed cost of a group's forward and backward, in ms.
        coefficients: [len(WORK_TERMS), 2] ms per unit of each work term.
    """

    launch_ms: NDArray[np.float64]
    coefficients: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.launch_ms.shape != (2,) or self.coefficients.shape != (len(WORK_TERMS), 2):
            raise ValueError(f"wrong shapes: {self.launch_ms.shape}, {self.coefficients.shape}")
        if not (np.isfinite(self.launch_ms).all() and np.isfinite(self.coefficients).all()):
            raise ValueError("launch costs and coefficients must be finite")
        if (self.launch_ms <= 0).any() or (self.coefficients < 0).any():
            raise ValueError("launch costs must be positive and coefficients must not be negative")

    def predict(self, work: NDArray[np.float64]) -> NDArray[np.float64]:
        """Forward and backward ms, [..., 2], of groups with total work [..., len(WORK_TERMS)]."""
        return self.launch_ms + work @ self.coefficients

    @classmethod
    def from_terms(cls, launch_ms: tuple[float, float], terms: Mapping[str, tuple[float, float]]) -> GroupPrior:
        """Builds a prior from named (forward, backward) coefficients; terms not named cost nothing."""
        unknown = set(terms) - set(WORK_TERMS)
        if unknown:
            raise ValueError(f"unknown work terms: {sorted(unknown)}")
        coefficients = np.asarray([terms.get(name, (0.0, 0.0)) for name in WORK_TERMS], dtype=np.float64)
        return cls(np.asarray(launch_ms, dtype=np.float64), coefficients)

    @classmethod
    def fit(cls, work: NDArray[np.float64], measured_ms: NDArray[np.float64]) -> GroupPrior:
        """Fits the coefficients to measured groups, minimising squared *relative* error.

        Args:
            work: [groups, len(WORK_TERMS)] total work of each group.
            measured_ms: [groups, 2] measured forward and backward.
        """
        from scipy.optimize import nnls

        launch, coefficients = np.zeros(2), np.zeros((len(WORK_TERMS), 2))
        design = np.column_stack([np.ones(len(work)), work])
        scale = design.mean(axis=0)
        scale[scale == 0] = 1.0
        for index in range(2):
            solution, _ = nnls(design / scale / measured_ms[:, index : index + 1], np.ones(len(work)))
            solution = solution / scale
            launch[index] = max(float(solution[0]), 0.5 * float(measured_ms[:, index].min()))
            coefficients[:, index] = solution[1:]
        return cls(launch, coefficients)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {
            "launch_ms": self.launch_ms.tolist(),
            "terms": {name: row.tolist() for name, row in zip(WORK_TERMS, self.coefficients)},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> GroupPrior:
        """Reads what :meth:`to_json` wrote."""
        return cls.from_terms(
            (float(record["launch_ms"][0]), float(record["launch_ms"][1])),
            {name: (float(row[0]), float(row[1])) for name, row in record["terms"].items()},
        )
