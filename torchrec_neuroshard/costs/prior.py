"""Analytic prior of a fused group: a non-negative combination of its work terms plus a launch cost.

The same form serves measured machines (coefficients fitted by non-negative least squares on relative error, for
each code path of the TBE) and machines known only by their data sheet (coefficients from bandwidths,
:mod:`.hardware`, the same for all code paths).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import REGIMES, WORK_TERMS

_MINIMUM_RECORDS = 60  # of one code path, below which the fit to all records serves it
_MINIMUM_CALIBRATED = 3  # likewise where another machine's prior says what to expect
# Weights of another machine's coefficients, of which the one is taken that predicts records best that are left out:
# machines of one kind need a strong pull, others a weak one.
_PULLS = (20.0, 5.0, 1.0, 0.2)
_FOLDS = 5
_LARGEST_CHANGE = 10.0  # of a coefficient against its counterpart on another machine, both at one speed
_ANY = "any"  # code paths that have no coefficients of their own


@dataclass(frozen=True)
class Coefficients:
    """What work costs on one code path.

    Attributes:
        launch_ms: [2] fixed cost of a group's forward and backward, in ms.
        terms: [len(WORK_TERMS), 2] ms per unit of each work term.
    """

    launch_ms: NDArray[np.float64]
    terms: NDArray[np.float64]

    def __post_init__(self) -> None:
        if self.launch_ms.shape != (2,) or self.terms.shape != (len(WORK_TERMS), 2):
            raise ValueError(f"wrong shapes: {self.launch_ms.shape}, {self.terms.shape}")
        if not (np.isfinite(self.launch_ms).all() and np.isfinite(self.terms).all()):
            raise ValueError("launch costs and coefficients must be finite")
        if (self.launch_ms <= 0).any() or (self.terms < 0).any():
            raise ValueError("launch costs must be positive and coefficients must not be negative")

    @classmethod
    def fit(
        cls,
        work: NDArray[np.float64],
        measured_ms: NDArray[np.float64],
        base: Coefficients | None = None,
        pull: float = 1.0,
    ) -> Coefficients:
        """Minimises squared relative error.

        Args:
            work: [groups, len(WORK_TERMS)] total work of each group.
            measured_ms: [groups, 2] measured forward and backward.
            base: another machine's coefficients. With them every coefficient is pulled towards its counterpart, all
                scaled to this machine's speed.
            pull: how hard: as by so many records in which nothing else costs anything. A record of many terms says
                less about each of them, so 1 is much to a few records.
        """
        from scipy.optimize import nnls

        launch, terms = np.zeros(2), np.zeros((len(WORK_TERMS), 2))
        design = np.column_stack([np.ones(len(work)), work])
        for index in range(2):
            measured = measured_ms[:, index]
            scale = design.mean(axis=0)
            rows, target = design / measured[:, None], np.ones(len(work))
            least_launch = 0.5 * float(measured.min())
            if base is not None:
                expected = np.concatenate([base.launch_ms[index : index + 1], base.terms[:, index]])
                expected = expected * np.median(measured / (design @ expected))
                least_launch = min(least_launch, 0.5 * float(expected[0]))  # few records may all be of heavy groups
                # What cost nothing there costs nothing here: few records hold traces of rare work, at any price.
                rows = np.where(expected > 0, rows, 0.0)
                typical = np.where(expected > 0, 1.0 / np.maximum(expected, 1e-300), 1.0)
                rows = np.vstack([rows, np.sqrt(pull) * np.diag(typical)])
                target = np.concatenate([target, np.sqrt(pull) * (expected > 0)])
            scale[scale == 0] = 1.0
            solution, _ = nnls(rows / scale, target)
            solution = solution / scale
            if base is not None:
                solution = np.minimum(solution, _LARGEST_CHANGE * expected)
            launch[index] = max(float(solution[0]), least_launch)
            terms[:, index] = solution[1:]
        return cls(launch, terms)

    def scaled(self, factor: NDArray[np.float64]) -> Coefficients:
        """Everything ``factor`` ([2], forward and backward) times as expensive."""
        return Coefficients(self.launch_ms * factor, self.terms * factor)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {
            "launch_ms": self.launch_ms.tolist(),
            "terms": {name: row.tolist() for name, row in zip(WORK_TERMS, self.terms)},
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Coefficients:
        """Reads what :meth:`to_json` wrote."""
        terms = {name: (float(row[0]), float(row[1])) for name, row in record["terms"].items()}
        return cls.named((float(record["launch_ms"][0]), float(record["launch_ms"][1])), terms)

    @classmethod
    def named(cls, launch_ms: tuple[float, float], terms: Mapping[str, tuple[float, float]]) -> Coefficients:
        """From named (forward, backward) coefficients; terms not named cost nothing."""
        unknown = set(terms) - set(WORK_TERMS)
        if unknown:
            raise ValueError(f"unknown work terms: {sorted(unknown)}")
        rows = np.asarray([terms.get(name, (0.0, 0.0)) for name in WORK_TERMS], dtype=np.float64)
        return cls(np.asarray(launch_ms, dtype=np.float64), rows)


class GroupPrior:
    """The prior of all code paths.

    Args:
        paths: coefficients by name of the code path (:data:`~torchrec_neuroshard.costs.features.REGIMES`); "any"
            serves those that are not named.
    """

    def __init__(self, paths: Mapping[str, Coefficients]) -> None:
        unknown = set(paths) - {_ANY, *REGIMES}
        if unknown or _ANY not in paths:
            raise ValueError(f"code paths must be of {REGIMES} and hold {_ANY!r}, got {sorted(paths)}")
        self.paths = dict(paths)
        of_regime = [paths.get(regime, paths[_ANY]) for regime in REGIMES]
        self._launch_ms = np.stack([path.launch_ms for path in of_regime])  # [regimes, 2]
        self._terms = np.stack([path.terms for path in of_regime])  # [regimes, terms, 2]

    def with_scaled_work(self, factor: float) -> GroupPrior:
        """The same with all work ``factor`` times as expensive, and launches as they are."""
        return GroupPrior(
            {name: Coefficients(path.launch_ms, path.terms * factor) for name, path in self.paths.items()}
        )

    def launch_ms(self, regime: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n, 2] launch cost of groups of code paths ``regime`` [n]."""
        return self._launch_ms[regime]

    def term_ms(self, work: NDArray[np.float64], regime: NDArray[np.int64]) -> NDArray[np.float64]:
        """[n, terms, 2] ms that each term of ``work`` [n, terms] costs on code paths ``regime`` [n]."""
        return work[:, :, None] * self._terms[regime]

    def predict(self, work: NDArray[np.float64], regime: NDArray[np.int64]) -> NDArray[np.float64]:
        """Forward and backward ms, [groups, 2], of groups with total work [groups, terms] and regime [groups]."""
        return self.launch_ms(regime) + self.term_ms(work, regime).sum(axis=1)

    @classmethod
    def from_terms(cls, launch_ms: tuple[float, float], terms: Mapping[str, tuple[float, float]]) -> GroupPrior:
        """The same named coefficients for all code paths."""
        return cls({_ANY: Coefficients.named(launch_ms, terms)})

    @classmethod
    def fit(
        cls,
        work: NDArray[np.float64],
        regime: NDArray[np.int64],
        measured_ms: NDArray[np.float64],
        base: GroupPrior | None = None,
    ) -> GroupPrior:
        """Fits each code path that has enough records, and one set of coefficients to all records.

        Args:
            work: [groups, len(WORK_TERMS)] total work of each group.
            regime: [groups] code path of each group.
            measured_ms: [groups, 2] measured forward and backward.
            base: another machine's prior, for a machine with few records: code paths keep its proportions where
                records do not say otherwise, and paths without records its speed relative to the others.
        """
        if base is not None:
            return cls._calibrated(work, regime, measured_ms, base)
        paths = {_ANY: Coefficients.fit(work, measured_ms)}
        for index in np.unique(regime).tolist():
            members = regime == index
            if members.sum() >= _MINIMUM_RECORDS:
                paths[REGIMES[index]] = Coefficients.fit(work[members], measured_ms[members])
        return cls(paths)

    @classmethod
    def _calibrated(
        cls, work: NDArray[np.float64], regime: NDArray[np.int64], measured_ms: NDArray[np.float64], base: GroupPrior
    ) -> GroupPrior:
        """Fitted near a base, as near as predicts records best that are left out."""
        fold = np.arange(len(regime)) % _FOLDS

        def error(pull: float) -> float:
            """Mean absolute log error of left-out records."""
            result = 0.0
            for index in range(_FOLDS):
                kept, left = fold != index, fold == index
                prior = cls._pulled(work[kept], regime[kept], measured_ms[kept], base, pull)
                result += float(np.abs(np.log(prior.predict(work[left], regime[left]) / measured_ms[left])).sum())
            return result

        pull = min(_PULLS, key=error) if len(regime) >= _FOLDS else _PULLS[0]
        return cls._pulled(work, regime, measured_ms, base, pull)

    @classmethod
    def _pulled(
        cls,
        work: NDArray[np.float64],
        regime: NDArray[np.int64],
        measured_ms: NDArray[np.float64],
        base: GroupPrior,
        pull: float,
    ) -> GroupPrior:
        """Fitted near a base; code paths of hardly any records have its proportions."""
        if not len(measured_ms):
            return base
        overall = np.median(measured_ms / base.predict(work, regime), axis=0)
        paths = {name: path.scaled(overall) for name, path in base.paths.items()}
        for index in np.unique(regime).tolist():
            members = regime == index
            start = base.paths.get(REGIMES[index], base.paths[_ANY])
            if members.sum() >= _MINIMUM_CALIBRATED:
                paths[REGIMES[index]] = Coefficients.fit(work[members], measured_ms[members], start, pull)
        return cls(paths)

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {name: path.to_json() for name, path in self.paths.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> GroupPrior:
        """Reads what :meth:`to_json` wrote."""
        return cls({name: Coefficients.from_json(path) for name, path in record.items()})
