"""NeuroShard's search as published: beam search over column-wise halvings, each scored by greedy grid search.

A column plan is an ordered list of shards that are halved. A level extends each kept plan by one more halving, of the
shards that cost most alone and of those that take most memory; every extension is placed greedily under each cap on a
rank's columns, and the best few are kept. Plans that do not fit in memory are ranked blindly, in the order of proposal.

What differs from the paper: no rank holds two shards of a table, because TorchRec cannot run that (see
:attr:`PaperSearchConfig.siblings_share_ranks`); shards that cannot be halved give their place among the proposals to
the next ones; unsplit tables count as split ones where that puts them in one fused group, as in all our plans.

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868, section 3.3.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Callable

import numpy as np

from benchmarks.paper_search_costs import GroupQueries, Objective, PlanObjective
from benchmarks.paper_search_greedy import (
    BatchPlacer,
    GridSettings,
    Placed,
    Placer,
    ShardList,
    SingleCosts,
    SinglePlacer,
)
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.problem import COLUMN_WISE, WIDTH_MULTIPLE, Placement, Shard, ShardingProblem


@dataclass(frozen=True)
class PaperSearchConfig:
    """Settings of :func:`paper_search`; the defaults are the paper's.

    Attributes:
        levels: halvings of the longest column plan (L).
        beam_width: column plans kept at each level (K).
        proposals: shards, by cost and by size each, that a kept plan proposes to halve (N).
        grid: caps on the columns of a rank tried for each column plan (M).
        grid_span: the largest cap, as a multiple of the mean columns per rank; the smallest is the mean.
        objective: "paper" or "simulator", see :class:`~benchmarks.paper_search_costs.PlanObjective`.
        batched: predict in batches and remember, with the same result; False asks the model as the paper's code does.
        siblings_share_ranks: let a rank hold several shards of a table. TorchRec cannot run such a plan.
    """

    levels: int = 10
    beam_width: int = 3
    proposals: int = 10
    grid: int = 11
    grid_span: float = 1.5
    objective: Objective = "paper"
    batched: bool = True
    siblings_share_ranks: bool = False

    @property
    def grid_settings(self) -> GridSettings:
        """Settings of the grid search."""
        return GridSettings(tuple(np.linspace(1.0, self.grid_span, self.grid).tolist()), self.siblings_share_ranks)


@dataclass(frozen=True)
class PaperSearchResult:
    """The best plan found.

    Attributes:
        placement: None where no plan that was tried fits in memory.
        column_plan: positions of the shards halved, one after another. Halving replaces a shard by its first half and
            appends the second to the list, which starts as the tables.
        objective_ms: what the search minimised; infinite without a placement.
        total_ms: predicted time of an iteration by our simulator; infinite without a placement.
        calls: calls of the model of fused groups.
        seconds: wall time.
    """

    placement: Placement | None
    column_plan: tuple[int, ...]
    objective_ms: float
    total_ms: float
    calls: int
    seconds: float


@dataclass(frozen=True)
class _ColumnPlan:
    """A column plan with its placement."""

    halved: tuple[int, ...]
    shards: ShardList
    placed: Placed


def paper_search(
    problem: ShardingProblem, model: CostModel, config: PaperSearchConfig | None = None
) -> PaperSearchResult:
    """Searches as the paper does; deterministic."""
    config = config or PaperSearchConfig()
    begun = time.perf_counter()
    if not problem.tables:
        return PaperSearchResult(Placement((), ()), (), 0.0, 0.0, 0, time.perf_counter() - begun)
    objective = PlanObjective(problem, model, config.objective)
    queries = GroupQueries(objective.simulator)
    alone = SingleCosts(queries, remember=config.batched)
    make: Callable[..., Placer] = BatchPlacer if config.batched else SinglePlacer
    best = _beam_search(problem, queries, alone, make(objective, queries, alone, config.grid_settings), config)
    seconds = time.perf_counter() - begun
    if not math.isfinite(best.placed.objective_ms):
        return PaperSearchResult(None, (), math.inf, math.inf, queries.calls, seconds)
    placement = _placement(problem, best)
    total_ms = objective.simulator.cost(placement).total_ms
    return PaperSearchResult(placement, best.halved, best.placed.objective_ms, total_ms, queries.calls, seconds)


def _beam_search(
    problem: ShardingProblem, queries: GroupQueries, alone: SingleCosts, placer: Placer, config: PaperSearchConfig
) -> _ColumnPlan:
    whole: ShardList = tuple((index, table.embedding_dim) for index, table in enumerate(problem.tables))
    best = _ColumnPlan((), whole, placer.place([whole], config.beam_width)[0])
    beam = [best]
    for _ in range(config.levels):
        halved: list[tuple[int, ...]] = []
        shards: list[ShardList] = []
        for plan in beam:
            for position in _proposals(problem, queries, alone, plan.shards, config):
                halved.append((*plan.halved, position))
                shards.append(_halve(plan.shards, position))
        if not shards:
            break
        plans = [_ColumnPlan(*plan) for plan in zip(halved, shards, placer.place(shards, config.beam_width))]
        beam = sorted(plans, key=lambda plan: plan.placed.objective_ms)[: config.beam_width]
        if beam[0].placed.objective_ms < best.placed.objective_ms:
            best = beam[0]
    return best


def _proposals(
    problem: ShardingProblem, queries: GroupQueries, alone: SingleCosts, shards: ShardList, config: PaperSearchConfig
) -> list[int]:
    """Positions of the shards to halve: the costliest, then those of the largest that are not among them."""
    pieces = np.bincount([table for table, _ in shards], minlength=len(problem.tables))
    room = problem.cluster.world_size
    possible = [
        position
        for position, (table, width) in enumerate(shards)
        if _can_halve(problem, table, width) and (config.siblings_share_ranks or pieces[table] < room)
    ]
    cost = dict(zip(possible, alone(queries.kinds(shards[position] for position in possible).tolist())))
    size = {position: sum(problem.shard_memory(*shards[position])) for position in possible}
    by_cost, by_size = (
        sorted(possible, key=lambda position: (-of[position], position))[: config.proposals]  # noqa: B023 (used at once)
        for of in (cost, size)
    )
    return list(dict.fromkeys([*by_cost, *by_size]))


def _can_halve(problem: ShardingProblem, table: int, width: int) -> bool:
    option = problem.options[table]
    return COLUMN_WISE in option.sharding_types and width % (2 * WIDTH_MULTIPLE) == 0 and width // 2 >= option.min_width


def _halve(shards: ShardList, position: int) -> ShardList:
    table, width = shards[position]
    half = (table, width // 2)
    return (*shards[:position], half, *shards[position + 1 :], half)


def _placement(problem: ShardingProblem, plan: _ColumnPlan) -> Placement:
    offsets = [0] * len(problem.tables)
    placed = []
    for (table, width), rank in zip(plan.shards, plan.placed.ranks):
        placed.append(Shard(table, offsets[table], width, rank))
        offsets[table] += width
    pieces = np.bincount([shard.table for shard in placed], minlength=len(problem.tables))
    placed.sort(key=lambda shard: (shard.table, shard.offset))
    return Placement(tuple(placed), problem.sharding_types((pieces > 1).tolist()))
