"""The search from start to end: feasibility, splits for a target, beam over splits, refinement, repacking."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, Callable

import numpy as np

from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import InfeasibleError, Placement, ShardingProblem
from torchrec_neuroshard.search.beam import Scored, beam_search, score
from torchrec_neuroshard.search.config import SearchConfig, SearchResult
from torchrec_neuroshard.search.feasibility import feasible_placement, placement_of
from torchrec_neuroshard.search.lower_bound import lower_bound_ms
from torchrec_neuroshard.search.offload import choose_offloaded, may_offload, required_kernels
from torchrec_neuroshard.search.refine import refine
from torchrec_neuroshard.search.repack import repack
from torchrec_neuroshard.search.splits import Splits
from torchrec_neuroshard.search.spread import choose_spread, feasible_spread
from torchrec_neuroshard.search.targets import fitting_splits, target_splits

_NEARLY_AS_GOOD = 1.02  # times the least predicted cost: finalists
_FINALISTS = 16
# Shares of a time limit after which splits for a target, and the beam, have had their turn.
_SHARE_OF_TARGETS, _SHARE_BEFORE_LAST = 0.4, 0.8
# Share after which it is settled which tables lie in host memory, where that has to be.
_SHARE_OF_OFFLOADING = 0.3
# Shares after which it is settled which tables may lie on all ranks, and after which the search with them is over.
_SHARE_OF_SPREAD, _SHARE_OF_CHOSEN = 0.25, 0.65
# Relative distances from perfect balance at which, under additive costs, cuts one by one, and the search, are over.
_NEARLY_BALANCED, _BALANCED = 5e-3, 5e-4
_FEW_CAPS = 3  # of the placement where there is time for one
_PATIENCE_OF_FEW = 800  # tries of repacking, shared out among the tables


def find_placement(problem: ShardingProblem, objective: Objective, config: SearchConfig | None = None) -> SearchResult:
    """Searches for the placement with the least predicted iteration time that fits in memory.

    Deterministic: the same problem, objective and configuration give the same placement, unless a timeout cuts
    the search short.

    Raises:
        InfeasibleError: no placement fits within the allowed splits.
    """
    config, begun = config or SearchConfig(), time.perf_counter()
    if not may_offload(problem):
        return _search_kernels(problem, objective, config, begun)
    kernels = required_kernels(problem)
    try:
        result = _search_kernels(problem.with_kernels(kernels), objective, config, begun, exact=False)
    except InfeasibleError:
        limit = config.timeout_seconds
        kernels = choose_offloaded(
            problem, objective, lambda: limit is not None and time.perf_counter() - begun > _SHARE_OF_OFFLOADING * limit
        )
        result = _search_kernels(problem.with_kernels(kernels), objective, config, begun)
    if kernels == problem.kernels:
        return result
    return replace(result, placement=replace(result.placement, kernels=kernels))


def _search_kernels(
    problem: ShardingProblem, objective: Objective, config: SearchConfig, begun: float, exact: bool = True
) -> SearchResult:
    """Searches with the kernels that the problem's tables have; ``exact`` as of :func:`feasible_placement`."""
    simulator = simulate(problem, objective)
    if any(option.spread_types for option in problem.options):
        result = _search_spread(simulator, config, begun, exact)
    else:
        result = _Search(simulator, config, begun, feasible_placement(problem, exact)).run()
    return replace(result, simulator=simulator)


def _search_spread(simulator: PlanSimulator, config: SearchConfig, begun: float, exact: bool) -> SearchResult:
    """The better of two searches: with only those tables spread that must be, and with those that seem to pay.

    That a choice pays was told by greedy placements, which refinement may turn round.
    """
    limit = config.timeout_seconds

    def out_of_time(share: float) -> bool:
        return limit is not None and time.perf_counter() - begun > share * limit

    required, feasible = feasible_spread(simulator.problem, exact)
    chosen = choose_spread(simulator, required, config, lambda: out_of_time(_SHARE_OF_SPREAD))
    results: list[SearchResult] = []
    if chosen != feasible.spreads:
        part = config if limit is None else replace(config, timeout_seconds=_SHARE_OF_CHOSEN * limit)
        try:
            results.append(_Search(simulator.spread_as(chosen), part, begun).run())
        except InfeasibleError:
            pass  # greedy placements of some splits fitted; the required tables alone do fit
    if not results or not out_of_time(_SHARE_OF_CHOSEN):
        results.append(_Search(simulator.spread_as(feasible.spreads), config, begun, feasible).run())
    return min(results, key=lambda result: result.cost.total_ms)


class _Search:
    """One search for the tables that are placed as columns: what it has found so far, its log and its clock."""

    def __init__(
        self, simulator: PlanSimulator, config: SearchConfig, begun: float, start: Placement | None = None
    ) -> None:
        """Starts from a placement that fits, found here unless given."""
        self._simulator, self._problem, self._config = simulator, simulator.problem, config
        self._begun = begun
        self._log: list[dict[str, Any]] = []
        self._finalists: list[Placement] = []
        self._best = start or feasible_placement(self._problem)
        self._best_ms = self._simulator.cost(self._best).total_ms
        self._note("feasible", self._best_ms, len(self._best.shards))

    def run(self) -> SearchResult:
        """Improves the feasible placement, as long as there is time and something to find."""
        bound = None
        if self._best.shards:
            starts = self._starts()
            if not self._balanced(_NEARLY_BALANCED):
                self._beam(starts)
            if not self._balanced(_BALANCED):
                self._repack()
            self._best = _choose(self._simulator, self._finalists)
            if self._config.prove_bound and self._simulator.additive and not self._spreads:
                bound = lower_bound_ms(self._simulator)
        cost = self._simulator.cost(self._best)
        self._note("final", cost.total_ms, len(self._best.shards))
        return SearchResult(self._best, cost, self._elapsed(), tuple(self._log), bound)

    @property
    def _spreads(self) -> bool:
        """Whether tables may lie on all ranks, for which no bound is known."""
        return any(option.spread_types for option in self._problem.options)

    def _starts(self) -> list[Scored]:
        """Splits to start from, best first, after the best of them was refined."""
        base = fitting_splits(self._problem)
        splits = list(dict.fromkeys([base, _splits_of(self._problem, self._best)]))
        if self._until(_SHARE_OF_TARGETS)():  # one placement has to do, but it has to be
            return self._hurried(base)
        scored: list[Scored] = []
        additive = self._simulator.additive
        if additive or self._config.timeout_seconds is not None:  # else all are placed in one go, which is faster
            scored, splits = score(self._simulator, splits, self._config), []
        if additive:  # often there is nothing to gain by cuts, and that can be known
            self._consider("refined first", self._placed(scored[0]) or self._best)
            if self._balanced(_BALANCED):
                return scored
        if not self._out_of_time():
            known = {one.splits for one in scored}
            targets = [target for target in target_splits(self._simulator, base) if target not in known]
            candidates = list(dict.fromkeys([*splits, *targets]))
            scored += score(self._simulator, candidates, self._config, self._until(_SHARE_OF_TARGETS))
            scored.sort(key=lambda s: s.rating)
        self._note_scored("placed start", scored[0])
        self._consider("refined start", self._placed(scored[0]) or self._best)
        return scored

    def _hurried(self, splits: Splits) -> list[Scored]:
        """One greedy placement under few caps."""
        scored = score(self._simulator, [splits], replace(self._config, grid=min(self._config.grid, _FEW_CAPS)))
        self._consider("refined start", self._placed(scored[0]) or self._best)
        return scored

    def _beam(self, starts: list[Scored]) -> None:
        """Cuts tables one after another, and refines the best found."""

        def on_level(level: int, scored: Scored) -> None:
            self._note_scored(f"beam level {level}", scored)

        found = beam_search(self._simulator, starts, self._config, self._until(_SHARE_BEFORE_LAST), on_level)
        for index, scored in enumerate(found, start=1):
            placement = self._placed(scored)
            if placement is not None and scored is not starts[0] and not self._out_of_time():
                self._consider(f"refined {index}", placement)

    def _repack(self) -> None:
        """Takes tables off the best placement and puts them back another way, many times."""
        config = self._config
        if not config.refine or self._out_of_time():
            return
        patience = config.repack_patience + _PATIENCE_OF_FEW // len(self._problem.tables)
        best, *others = repack(
            self._simulator, self._best, config.repack_rounds, patience, config.seed, self._out_of_time
        )
        self._consider("repacked", best)
        self._finalists += others

    def _consider(self, step: str, placement: Placement) -> None:
        """Refines a placement; it becomes the best when it is."""
        if self._config.refine and not self._out_of_time():
            placement = refine(self._simulator, placement, self._out_of_time)
        else:
            step = step.replace("refined", "placed")
        self._finalists.append(placement)
        total_ms = self._simulator.cost(placement).total_ms
        if total_ms < self._best_ms:
            self._best, self._best_ms = placement, total_ms
        self._note(step, total_ms, len(placement.shards))

    def _balanced(self, tolerance: float) -> bool:
        """Whether little is left to find: where costs add up, all ranks carry the mean of the whole tables' cost."""
        problem = self._problem
        if not self._simulator.additive or any(problem.spread):
            return False
        whole = self._simulator.alone((t, problem.tables[t].embedding_dim) for t in problem.placed_tables)
        return self._best_ms <= float(whole.sum()) / problem.cluster.world_size * (1 + tolerance)

    def _placed(self, scored: Scored) -> Placement | None:
        """The greedy placement; None where it does not fit in memory."""
        if not np.isfinite(scored.total_ms):
            return None
        return placement_of(self._problem, scored.splits, scored.placement.ranks)

    def _note_scored(self, step: str, scored: Scored) -> None:
        if np.isfinite(scored.total_ms):  # else no candidate fits in memory
            self._note(step, scored.total_ms, sum(map(len, scored.splits)))

    def _note(self, step: str, total_ms: float, shards: int) -> None:
        seconds = round(self._elapsed(), 4)
        self._log.append({"step": step, "seconds": seconds, "predicted_ms": round(total_ms, 4), "shards": shards})

    def _elapsed(self) -> float:
        return time.perf_counter() - self._begun

    def _out_of_time(self) -> bool:
        return self._until(1.0)()

    def _until(self, share: float) -> Callable[[], bool]:
        """Asks whether that share of the time limit is over."""
        limit = self._config.timeout_seconds
        return lambda: limit is not None and self._elapsed() > share * limit


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


def _splits_of(problem: ShardingProblem, placement: Placement) -> Splits:
    widths: list[list[int]] = [[] for _ in problem.tables]
    for shard in sorted(placement.shards, key=lambda s: (s.table, s.offset)):
        widths[shard.table].append(shard.width)
    return tuple(tuple(w) for w in widths)
