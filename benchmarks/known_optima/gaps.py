"""How far the search ends from what is known to be possible."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.known_optima.cp_sat import cp_sat_optimum
from benchmarks.known_optima.exhaustive import affordable_ways, exhaustive_optimum
from benchmarks.known_optima.problems import Family
from benchmarks.known_optima.reference import PROVED, Optimum, placement_from, reference_ways
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective, Objective, simulate, single_shard_costs
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, InfeasibleError, ShardingProblem
from torchrec_neuroshard.search import SearchConfig, SearchResult, find_placement

_FINEST_LIMIT = 20.0  # seconds of CP-SAT, which few problems need
_PROBES = 16
_DIGITS = 5  # of a probe's price: what does not differ between machines


def family_objective(family: Family, problem: ShardingProblem, model: CostModel) -> Objective:
    """What a family's placements are priced by.

    The nets of the ensemble are left out: with them the search returns what they like best among placements that the
    mean head finds nearly equal, which is no minimum of either.
    """
    if family.additive:
        return single_shard_costs(problem, model)
    return replace(model, ensemble=None, uncertainty=None)


def reference_optimum(problem: ShardingProblem, objective: Objective) -> Optimum:
    """The optimum over the reference's splits."""
    if isinstance(objective, AdditiveObjective):
        return cp_sat_optimum(problem, objective)
    return exhaustive_optimum(problem, objective)


def finest_optimum(problem: ShardingProblem, objective: Objective) -> Optimum:
    """The optimum over all column splits where costs add up, else over the finest that can be enumerated."""
    if isinstance(objective, AdditiveObjective):
        return cp_sat_optimum(problem, objective, unit=WIDTH_MULTIPLE, limit=_FINEST_LIMIT)
    return exhaustive_optimum(problem, objective, affordable_ways(problem))


def searched(problem: ShardingProblem, objective: Objective, config: SearchConfig | None = None) -> SearchResult | None:
    """What the search finds; None where it finds nothing that fits.

    Raises:
        AssertionError: its placement is not valid.
    """
    try:
        result = find_placement(problem, objective, config)
    except InfeasibleError:
        return None
    faults = check_placement(problem, result.placement)
    if faults:
        raise AssertionError(f"the search returned a placement that is not valid: {'; '.join(faults)}")
    return result


def gap(found_ms: float, optimum_ms: float) -> float:
    """How much more a placement costs than the optimum, as a share of it; 0 where it costs less or the same."""
    return max(0.0, found_ms / optimum_ms - 1.0) if found_ms > optimum_ms * (1 + PROVED) else 0.0


def below(found_ms: float, optimum_ms: float) -> bool:
    """Whether a placement costs less than a reference, which finer splits can."""
    return found_ms < optimum_ms * (1 - PROVED)


@dataclass(frozen=True)
class Goal:
    """What the gaps of many problems should stay within, besides that every feasible problem is solved."""

    median: float = 0.0
    mean: float = 0.005
    worst: float = 0.03

    def met_by(self, gaps: list[float]) -> bool:
        """Whether median, mean and largest of the gaps are small enough."""
        return float(np.median(gaps)) <= self.median and float(np.mean(gaps)) <= self.mean and max(gaps) <= self.worst


def problem_digest(problem: ShardingProblem, objective: Objective) -> str:
    """Tells problems apart that have other optima: by their memory, allowed widths, and prices of some placements.

    Known optima stay valid when code changes and prices do not.
    """
    simulator = simulate(problem, objective)
    rng = np.random.default_rng(0)
    parts = [str(problem.cluster.capacity.tolist()), str([options.min_width for options in problem.options])]
    for _ in range(_PROBES):
        pieces = []
        for table, splits in enumerate(reference_ways(problem)):
            widths = splits[int(rng.integers(len(splits)))]
            ranks = rng.permutation(problem.cluster.world_size)
            pieces += [(table, width, int(rank)) for width, rank in zip(widths, ranks)]
        parts.append(f"{simulator.cost(placement_from(problem, pieces)).total_ms:.{_DIGITS}g}")
        parts.append(str([problem.shard_memory(table, width) for table, width, _ in pieces]))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
