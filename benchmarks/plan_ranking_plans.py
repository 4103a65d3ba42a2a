"""The plans that :mod:`benchmarks.plan_ranking` ranks, from bad to good.

Random plans (whole tables, or some of them cut at random), greedy baselines of whole tables, a local search that is
stopped early, and what TorchRec's planner and ours make. Plans that give the ranks the same fused groups, in whatever
order, are one plan.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.plan_cache import PlanRequest, cached_plans, read_plan
from benchmarks.plan_records import PlannedResult
from benchmarks.sources import load_source, samples_per_rank, workload_id
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    WIDTH_MULTIPLE,
    Cluster,
    Placement,
    ShardingProblem,
    TableOptions,
)
from torchrec_neuroshard.search.feasibility import placement_of
from torchrec_neuroshard.search.refine import refine
from torchrec_neuroshard.search.splits import shards_of, split_table, whole_tables
from torchrec_neuroshard.workload import Workload, WorkloadError

PROGRAMS = ("torchrec_restricted", "neuroshard", "neuroshard_additive")  # of benchmarks.planners
BASELINES = ("greedy_size", "greedy_lookups", "early_search")
PLANNERS = (*PROGRAMS, *BASELINES)

# A random plan may put all tables on one rank, and that has to fit in the memory of a machine of 24 GiB.
LARGEST_BYTES = 12 << 30
_BYTES_PER_WEIGHT_BYTE = {"adagrad": 2, "adam": 3}  # optimizer states of the weights' own size included

_SPLIT_TABLES = (0.1, 0.6)  # share of the tables that a random plan cuts
_CUTS = 3  # at most, of one table
_CUT_AT = (0.25, 0.75)
_EARLY_CHANGES = 4  # of the refinement: far better than random, short of an optimum
_TRIES_PER_PLAN = 20


def ranking_problem(workload: Workload, world_size: int, batch_size: int) -> ShardingProblem:
    """The workload's tables on CPU ranks, each of which could hold them all.

    Args:
        workload: the tables.
        world_size: ranks.
        batch_size: samples per rank.

    Raises:
        WorkloadError: not any plan of the workload can be made and measured.
    """
    if workload.constraints:
        raise WorkloadError(f"{workload.name}: plans are drawn at random, which constraints of tables do not allow")
    weights = [
        float(t.num_embeddings * t.element_bytes * _BYTES_PER_WEIGHT_BYTE.get(t.optimizer, 1)) for t in workload.tables
    ]  # bytes per column
    total = sum(column * table.embedding_dim for column, table in zip(weights, workload.tables))
    if total > LARGEST_BYTES:
        raise WorkloadError(
            f"{workload.name}: its tables take {total / 2**30:.1f} GiB; at most {LARGEST_BYTES >> 30} can be measured"
        )
    return ShardingProblem(
        tables=workload.tables,
        options=tuple(TableOptions((TABLE_WISE, COLUMN_WISE), WIDTH_MULTIPLE) for _ in workload.tables),
        cluster=Cluster(world_size, world_size, "cpu", np.full((world_size, 2), float(LARGEST_BYTES))),
        batch_size=batch_size,
        memory=lambda table, width: (0.0, weights[table] * width),
    )


def random_placement(problem: ShardingProblem, rng: np.random.Generator, split: bool) -> Placement:
    """Puts every shard on a random rank; a rank never holds two shards of a table.

    Args:
        problem: the tables and ranks.
        rng: source of chance.
        split: cut some tables into columns first, which and where at random.
    """
    splits = whole_tables(problem)
    if split:
        chosen = rng.random(len(problem.tables)) < rng.uniform(*_SPLIT_TABLES)
        for table in np.flatnonzero(chosen).tolist():
            for _ in range(int(rng.integers(1, _CUTS + 1))):
                splits = split_table(problem, splits, table, float(rng.uniform(*_CUT_AT))) or splits
    orders = [rng.permutation(problem.cluster.world_size) for _ in problem.tables]
    taken = [0] * len(problem.tables)
    ranks = []
    for table, _, _ in shards_of(splits):
        ranks.append(int(orders[table][taken[table]]))
        taken[table] += 1
    return placement_of(problem, splits, np.asarray(ranks, dtype=np.int64))


def greedy_placement(problem: ShardingProblem, weights: NDArray[np.float64]) -> Placement:
    """Whole tables by falling weight, each to the rank with the least weight so far.

    Args:
        problem: the tables and ranks.
        weights: [tables] what is to be balanced.
    """
    load = np.zeros(problem.cluster.world_size)
    ranks = np.zeros(len(weights), dtype=np.int64)
    for table in np.argsort(-weights, kind="stable").tolist():
        ranks[table] = load.argmin()
        load[ranks[table]] += weights[table]
    return placement_of(problem, whole_tables(problem), ranks)


def early_search(problem: ShardingProblem, model: CostModel, rng: np.random.Generator) -> Placement:
    """A random plan of whole tables after the first few changes of the search's refinement."""
    changes = iter(range(_EARLY_CHANGES))
    start = random_placement(problem, rng, split=False)
    return refine(PlanSimulator(problem, model), start, lambda: next(changes, None) is None)


@dataclass(frozen=True)
class PlanMaker:
    """Makes the plans of one workload.

    Attributes:
        source: ``skewed:SEED`` or a workload file.
        world_size: ranks.
        seed: of whatever is random.
        model_name: cost model of our planners: "auto", a shipped name or a path.
        model: the same, loaded.
    """

    source: str
    world_size: int
    seed: int
    model_name: str
    model: CostModel

    def make(self, planners: Sequence[str], count: int, folder: Path) -> dict[str, PlannedResult]:
        """Plans of the named planners, then random ones up to a number of different plans.

        Args:
            planners: some of :data:`PLANNERS`. One that makes the plan of an earlier one is left out.
            count: plans wanted; where there are not so many different ones, all that were found.
            folder: where the plans of :data:`PROGRAMS` are kept.

        Returns:
            label -> plan; random plans are labelled ``random_whole_0``, ``random_split_1`` and so on.

        Raises:
            WorkloadError: the workload does not suit, see :func:`ranking_problem`.
            RuntimeError: a planner failed; its message went to standard error.
        """
        plans: dict[str, PlannedResult] = {}
        labels: dict[tuple[Any, ...], str] = {}  # what the ranks hold -> plan
        for label, planned in self._candidates(planners, count, folder):
            same = labels.setdefault(_contents(planned.placement), label)
            if same == label:
                plans[label] = planned
            elif label in planners:
                print(f"{self.source}: {label} makes the same plan as {same}", file=sys.stderr)
            if len(plans) >= max(count, len(planners)):
                break
        return plans

    def _candidates(self, planners: Sequence[str], count: int, folder: Path) -> Iterator[tuple[str, PlannedResult]]:
        workload = load_source(self.source)
        batch_size = samples_per_rank(workload, self.world_size)
        problem = ranking_problem(workload, self.world_size, batch_size)
        names = [planner for planner in PROGRAMS if planner in planners]
        requests = [PlanRequest(self.source, self.world_size, name, None, self.model_name) for name in names]
        files = {request.planner: file for request, file in cached_plans(requests, folder).items()}
        rows, dims, pooling = (
            np.asarray([getattr(table, field) for table in workload.tables], dtype=np.float64)
            for field in ("num_embeddings", "embedding_dim", "pooling_factor")
        )
        makers: dict[str, Callable[[], Placement]] = {
            "greedy_size": lambda: greedy_placement(problem, rows * dims),
            "greedy_lookups": lambda: greedy_placement(problem, dims * pooling),
            "early_search": lambda: early_search(problem, self.model, self._rng(0)),
        }
        for planner in planners:
            yield planner, read_plan(files[planner]) if planner in files else self._timed(planner, makers[planner])
        for index in range(count * _TRIES_PER_PLAN):
            split = bool(index % 2)
            rng = self._rng(1 + index)
            label = f"random_{'split' if split else 'whole'}_{index}"
            yield label, self._timed(label, lambda: random_placement(problem, rng, split))  # noqa: B023 (called at once)

    def _rng(self, index: int) -> np.random.Generator:
        """Depends on the workload too, so that no two workloads get alike plans."""
        return np.random.default_rng([self.seed, int(workload_id(load_source(self.source)), 16), index])

    def _timed(self, label: str, make: Callable[[], Placement]) -> PlannedResult:
        begun, begun_cpu = time.perf_counter(), time.process_time()
        placement = make()
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
        inputs = {"planner": f"benchmarks.plan_ranking {label}", "seed": self.seed}
        if label == "early_search":
            inputs["cost_model"] = self.model.name
        return PlannedResult(placement, seconds, cpu_seconds, 0.0, inputs)  # they predict nothing


def _contents(placement: Placement) -> tuple[Any, ...]:
    """What the fused groups of the ranks hold, whatever the ranks' numbers and the sharding types' names."""
    ranks: dict[int, dict[str, list[tuple[int, int]]]] = {}
    for shard in placement.shards:
        groups = ranks.setdefault(shard.rank, {})
        groups.setdefault(placement.sharding_types[shard.table], []).append((shard.table, shard.width))
    return tuple(sorted(tuple(sorted(tuple(sorted(group)) for group in groups.values())) for groups in ranks.values()))
