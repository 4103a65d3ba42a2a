"""The search from start to end: feasibility, splits for a target, beam over splits, refinement, repacking."""

from __future__ import annotations

import time
from typing import Any, Callable

import numpy as np

from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Placement, ShardingProblem
from torchrec_neuroshard.search.beam import Scored, beam_search, score
from torchrec_neuroshard.search.config import SearchConfig, SearchResult
from torchrec_neuroshard.search.feasibility import feasible_placement, placement_of
from torchrec_neuroshard.search.lower_bound import lower_bound_ms
from torchrec_neuroshard.search.refine import refine
from torchrec_neuroshard.search.repack import repack
from torchrec_neuroshard.search.splits import Splits
from torchrec_neuroshard.search.targets import fitting_splits, target_splits

_NEARLY_AS_GOOD = 1.02  # times the least predicted cost: finalists
_FINALISTS = 16
# Shares of a time limit after which splits for a target, and the beam, have had their turn.
_SHARE_OF_TARGETS, _SHARE_BEFORE_LAST = 0.4, 0.8
_PATIENCE_OF_FEW = 800  # tries of repacking, shared out among the tables


def find_placement(problem: ShardingProblem, objective: Objective, config: SearchConfig | None = None) -> SearchResult:
    """Searches for the placement with the least predicted iteration time that fits in memory.

    Deterministic: the same problem, objective and configuration give the same placement, unless a timeout cuts
    the search short.

    Raises:
        InfeasibleError: no placement fits within the allowed splits.
    """
    config = config or SearchConfig()
    begun = time.perf_counter()
    log: list[dict[str, Any]] = []

    def elapsed() -> float:
        return time.perf_counter() - begun

    def until(share: float) -> Callable[[], bool]:
        return lambda: config.timeout_seconds is not None and elapsed() > share * config.timeout_seconds

    out_of_time = until(1.0)

    simulator = simulate(problem, objective)

    def note(step: str, total_ms: float, shards: int) -> None:
        log.append({"step": step, "seconds": round(elapsed(), 4), "predicted_ms": round(total_ms, 4), "shards": shards})

    best = feasible_placement(problem)
    cost = simulator.cost(best)
    note("feasible", cost.total_ms, len(best.shards))
    if not best.shards:
        return SearchResult(best, cost, elapsed(), tuple(log))

    def on_level(level: int, scored: Scored) -> None:
        if np.isfinite(scored.total_ms):  # else no candidate of the level fits in memory
            note(f"beam level {level}", scored.total_ms, sum(map(len, scored.splits)))

    finalists: list[Placement] = []

    def consider(step: str, placement: Placement) -> None:
        """Refines a placement; it becomes the best when it is."""
        nonlocal best, cost
        if config.refine and not out_of_time():
            placement = refine(simulator, placement, out_of_time)
        finalists.append(placement)
        candidate = simulator.cost(placement)
        if candidate.total_ms < cost.total_ms:
            best, cost = placement, candidate
        note(step, candidate.total_ms, len(placement.shards))

    base = fitting_splits(problem)
    starts = list(dict.fromkeys([base, _splits_of(problem, best)]))
    scored = score(simulator, starts, config)
    if not out_of_time():
        targets = [splits for splits in target_splits(simulator, base) if splits not in starts]
        scored += score(simulator, targets, config, until(_SHARE_OF_TARGETS))
    scored.sort(key=lambda s: s.rating)
    consider("refined start", _placed(problem, scored[0]) or best)
    for index, found in enumerate(beam_search(simulator, scored, config, until(_SHARE_BEFORE_LAST), on_level)):
        placement = _placed(problem, found)
        if placement is not None and found is not scored[0] and not out_of_time():
            consider(f"refined {index + 1}", placement)
    if config.refine and not out_of_time():
        patience = config.repack_patience + _PATIENCE_OF_FEW // len(problem.tables)
        packed = repack(simulator, best, config.repack_rounds, patience, config.seed, out_of_time)
        consider("repacked", packed[0])
        finalists += packed[1:]
    best = _choose(simulator, finalists)
    cost = simulator.cost(best)
    note("final", cost.total_ms, len(best.shards))
    bound = lower_bound_ms(simulator) if config.prove_bound and simulator.additive else None
    return SearchResult(best, cost, elapsed(), tuple(log), bound)


def _choose(simulator: PlanSimulator, finalists: list[Placement]) -> Placement:
    """The best of the placements that the mean head predicts to be nearly as good as any, by the ensemble.

    A search finds placements whose cost one net underestimates; several nets seldom err alike.
    """
    finalists = list(dict.fromkeys(finalists))
    costs = np.asarray([simulator.cost(placement).total_ms for placement in finalists])
    close = np.flatnonzero(costs <= costs.min() * _NEARLY_AS_GOOD)
    close = close[np.argsort(costs[close], kind="stable")][:_FINALISTS]
    judge = simulator.judge() if len(close) > 1 else None
    if judge is not None:
        close = close[np.argsort([judge.cost(finalists[index]).total_ms for index in close], kind="stable")]
    return finalists[close[0]]


def _placed(problem: ShardingProblem, scored: Scored) -> Placement | None:
    """The greedy placement; None where it does not fit in memory."""
    return placement_of(problem, scored.splits, scored.placement.ranks) if np.isfinite(scored.total_ms) else None


def _splits_of(problem: ShardingProblem, placement: Placement) -> Splits:
    widths: list[list[int]] = [[] for _ in problem.tables]
    for shard in sorted(placement.shards, key=lambda s: (s.table, s.offset)):
        widths[shard.table].append(shard.width)
    return tuple(tuple(w) for w in widths)
