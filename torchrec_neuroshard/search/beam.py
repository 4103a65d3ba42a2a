"""Beam search over column splits; each candidate is scored by its greedy grid placement.

A level proposes to cut one more shard of each kept candidate, of the tables that cost most and of those that
are largest in memory, in halves and unevenly. Splits that make a plan
worse (on a CPU each half of a hot, narrow table costs nearly as much as the whole) fall out of the beam
because the whole plan is scored, not the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.search.config import SearchConfig
from torchrec_neuroshard.search.greedy import GreedyPlacement, place_candidates
from torchrec_neuroshard.search.splits import Splits, split_table

SHARES = (0.5, 0.75)  # of the columns that the first piece keeps
_SHARDS_PER_LEVEL = 12_000  # placed while a level is scored
_FEWEST = 2
_WORTHWHILE = 1e-3  # relative gain of a level below which it counts as none


@dataclass(frozen=True)
class Scored:
    """Splits with their greedy placement."""

    splits: Splits
    placement: GreedyPlacement

    @property
    def total_ms(self) -> float:
        """Predicted time of an iteration; infinite where the placement does not fit."""
        return self.placement.total_ms

    @property
    def rating(self) -> tuple[float, float]:
        """Sorts candidates: total first, then how much compute the ranks behind the slowest have."""
        return float(f"{self.placement.total_ms:.6g}"), self.placement.spread_ms


def beam_search(
    simulator: PlanSimulator,
    starts: list[Scored],
    config: SearchConfig,
    out_of_time: Callable[[], bool],
    on_level: Callable[[int, Scored], None],
) -> list[Scored]:
    """Returns the best candidates found, best first, at most ``beam_width`` of them.

    Args:
        simulator: prices plans.
        starts: scored candidates to start from.
        config: widths and limits.
        out_of_time: asked before each level.
        on_level: told the level and its best candidate so far.
    """
    seen = {start.splits for start in starts}
    beam = sorted(starts, key=lambda s: s.rating)
    kept = beam[: config.beam_width]
    on_level(0, kept[0])
    stale = 0
    for level in range(1, config.levels + 1):
        if out_of_time() or stale >= config.patience:
            break
        proposals: list[Splits] = []
        for candidate in beam[: config.beam_width]:
            for splits in propose(simulator, candidate, config)[: _affordable(candidate.splits, config)]:
                if splits not in seen:
                    seen.add(splits)
                    proposals.append(splits)
        if not proposals:
            break
        beam = score(simulator, proposals, config, out_of_time)
        if not beam:
            break
        best_before = kept[0]
        kept = sorted([*kept, *beam], key=lambda s: s.rating)[: config.beam_width]  # stable: earlier wins ties
        stale = 0 if _gained(best_before, kept[0]) else stale + 1
        on_level(level, kept[0])
    return kept


def _affordable(splits: Splits, config: SearchConfig) -> int:
    """Proposals of one candidate that a level may score: of very many shards only a few, the costliest first."""
    return max(_FEWEST, _SHARDS_PER_LEVEL // (config.beam_width * sum(map(len, splits))))


def _gained(before: Scored, after: Scored) -> bool:
    """Whether a level was worth its time: a lower total, or as low a one with less behind the slowest rank."""
    if after.total_ms < before.total_ms * (1 - _WORTHWHILE):
        return True
    return after.rating[0] <= before.rating[0] and after.rating[1] < before.rating[1] * (1 - _WORTHWHILE)


def propose(simulator: PlanSimulator, candidate: Scored, config: SearchConfig) -> list[Splits]:
    """Splits with one more cut, of costly tables and of large ones."""
    problem, splits = simulator.problem, candidate.splits
    tables = [t for t in range(len(problem.tables)) if problem.splittable(t)]
    widest = {t: max(splits[t]) for t in tables}
    kinds = dict(zip(tables, simulator.kinds((t, widest[t]) for t in tables)))
    cost = {t: float(simulator.alone_ms[kinds[t]].sum()) for t in tables}
    size = {t: float(simulator.memory[kinds[t]].sum()) for t in tables}
    by_cost = sorted(tables, key=lambda t: (-cost[t], t))[: config.proposals]
    by_size = sorted(tables, key=lambda t: (-size[t], t))[: config.proposals]
    result: list[Splits] = []
    for table in dict.fromkeys([*by_cost, *by_size]):
        for share in SHARES:
            finer = split_table(problem, splits, table, share)
            if finer is not None and finer not in result:
                result.append(finer)
    return result


def score(
    simulator: PlanSimulator,
    candidates: list[Splits],
    config: SearchConfig,
    out_of_time: Callable[[], bool] = lambda: False,
) -> list[Scored]:
    """Places each candidate; best first. Those for which there is no time left are left out."""
    placed = place_candidates(simulator, candidates, config, out_of_time)
    scored = [Scored(splits, placement) for splits, placement in zip(candidates, placed)]
    return sorted(scored, key=lambda s: s.rating)
