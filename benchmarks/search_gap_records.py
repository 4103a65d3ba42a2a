"""What :mod:`benchmarks.search_gap` solves, and how it is kept.

A record is the optimum of one problem over the reference's splits, that over finer ones, or what the search found.
Optima are known by the problem and its prices; the search's result by its code too, so that after a change of the
search only the search runs again.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np

import torchrec_neuroshard
from benchmarks.known_optima.gaps import (
    family_objective,
    finest_optimum,
    gap,
    problem_digest,
    reference_optimum,
    searched,
)
from benchmarks.known_optima.problems import Family
from benchmarks.known_optima.reference import Optimum
from benchmarks.plan_records import placement_json
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.problem import Placement, Shard, ShardingProblem

REFERENCE, FINEST, SEARCH = "known_optimum", "known_optimum_finer_splits", "search_result"
_CODE = ("problem.py", "access.py", "costs", "search")  # what a search's result depends on, weights apart
_KEY = ("kind", "family", "seed", "digest", "code")  # of a record: digest of the problem, fingerprint of the search
Key = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Solved:
    """One problem with its optimum and what the search found.

    Attributes:
        family: of problems.
        seed: of the problem.
        problem: the problem.
        reference: the optimum over the reference's splits.
        reference_seconds: that finding it took.
        finest: the optimum over all column splits, or the finest that can be enumerated.
        found_ms: cost of the search's placement; infinite where it found none.
        seconds: that the search took.
    """

    family: Family
    seed: int
    problem: ShardingProblem
    reference: Optimum
    reference_seconds: float
    finest: Optimum
    found_ms: float
    seconds: float

    @property
    def feasible(self) -> bool:
        """Whether there is a placement that fits."""
        return self.reference.placement is not None or self.finest.placement is not None or self.found

    @property
    def found(self) -> bool:
        """Whether the search found a placement."""
        return bool(np.isfinite(self.found_ms))

    @property
    def gap(self) -> float:
        """To the reference."""
        return gap(self.found_ms, self.reference.total_ms)

    @property
    def finest_gap(self) -> float:
        """To the optimum over finer splits."""
        return gap(self.found_ms, self.finest.total_ms)


class Solver:
    """Solves problems, or reads from the store what was solved before.

    Args:
        store: of all that was solved.
        model: the cost model.
    """

    def __init__(self, store: MeasurementStore, model: CostModel) -> None:
        self._store, self._model, self._code = store, model, code_fingerprint()
        self._known: dict[Key, dict[str, Any]] = {_key(record): record for record in store if "digest" in record}

    def solve(self, family: Family, seed: int, may_compute: Callable[[], bool]) -> Solved | None:
        """One problem; None where something is missing and may not be computed."""
        problem = family.problem(seed)
        objective = family_objective(family, problem, self._model)
        digest = problem_digest(problem, objective)

        def known(kind: str, code: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
            key = (kind, family.name, seed, digest, code)
            if key not in self._known:
                if not may_compute():
                    return None
                begun = time.perf_counter()
                result = compute()
                record = {**dict(zip(_KEY, key)), "cost_model": self._model.name, **result}
                self._known[key] = {**record, "seconds": round(time.perf_counter() - begun, 3)}
                self._store.append(self._known[key])
            return self._known[key]

        def search() -> dict[str, Any]:
            result = searched(problem, objective)
            return _solution(result.cost.total_ms, result.placement) if result is not None else {}

        reference = known(REFERENCE, "", lambda: _optimum_json(reference_optimum(problem, objective)))
        finest = known(FINEST, "", lambda: _optimum_json(finest_optimum(problem, objective)))
        ours = known(SEARCH, self._code, search)
        if reference is None or finest is None or ours is None:
            return None
        return Solved(
            family,
            seed,
            problem,
            _optimum(reference),
            reference["seconds"],
            _optimum(finest),
            ours.get("total_ms", float("inf")),
            ours["seconds"],
        )


def _key(record: dict[str, Any]) -> Key:
    return (record["kind"], record["family"], record["seed"], record["digest"], record["code"])


def _solution(total_ms: float, placement: Placement) -> dict[str, Any]:
    return {"total_ms": total_ms, "placement": placement_json(placement)}


def _optimum_json(optimum: Optimum) -> dict[str, Any]:
    """Finite numbers only, which JSON has: no ``total_ms`` where no placement is known, no bound where none fits."""
    solution = {} if optimum.placement is None else _solution(optimum.total_ms, optimum.placement)
    return {"bound_ms": optimum.bound_ms if np.isfinite(optimum.bound_ms) else None, **solution}


def _optimum(record: dict[str, Any]) -> Optimum:
    bound = record["bound_ms"] if record["bound_ms"] is not None else float("inf")
    if "placement" not in record:
        return Optimum(float("inf"), bound, None)
    shards = tuple(Shard(*shard) for shard in record["placement"]["shards"])
    return Optimum(record["total_ms"], bound, Placement(shards, tuple(record["placement"]["sharding_types"])))


def code_fingerprint() -> str:
    """A hash of the code that a search's result depends on."""
    root = Path(torchrec_neuroshard.__file__).parent
    digest = hashlib.sha256()
    for name in _CODE:
        path = root / name
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
