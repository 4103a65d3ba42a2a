"""Measures plans with FBGEMM's TBE, one rank's fused groups after another on one core.

A *round* is one fresh process that measures all plans of a workload, so that what differs from process to process
(memory placement above all) is the same for the planners compared; round k starts with the k-th planner. The first
round of a plan times every rank, later ones only the ranks within 10 % of its slowest, which alone can be the
bottleneck. Fused groups that two plans share are timed once per round. Machines that are shared slow down by factors
for seconds at a time: a probe tells, and a group is then timed again; and the rank that comes out slowest is timed a
second time, until the slowest one has been, the lower figure of a group counting.

The bottleneck is the slowest rank: the medians of forward plus backward of its groups (of row-wise tables, those of its
block of rows), plus what every rank spends alike on bucketizing its ids for row-wise tables and on data_parallel
tables. Nothing else may run on the machine's core meanwhile:

    taskset -c 1 python -m benchmarks.measure_plans --workload skewed:0 --world-size 4 8 --planners torchrec neuroshard
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Iterable, Mapping, Sequence

import numpy as np
import torch

from benchmarks.plan_cache import DEFAULT_FOLDER, PlanRequest, read_plan
from benchmarks.plan_records import PlannedResult
from benchmarks.planners import PLANNERS, SHARDERS
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S, rank_work
from benchmarks.row_blocks import RowBlock, RowWiseTables, bucketize_ms
from benchmarks.sources import load_source, samples_per_rank, workload_id
from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.probe import DisturbanceProbe
from torchrec_neuroshard.measure.specs import GroupSpec, spec_id
from torchrec_neuroshard.measure.store import MeasurementStore, read_records
from torchrec_neuroshard.measure.tbe import measure_group
from torchrec_neuroshard.measure.timing import RepetitionPolicy

DEFAULT_STORE = Path("out/plan_rounds.jsonl")
POLICY = RepetitionPolicy(warmup=1, minimum=5, maximum=15, seconds=0.5, relative_error=0.015)
_CPU = torch.device("cpu")
NEAR_BOTTLENECK = 0.9  # share of the slowest rank's time from which a rank is timed again


@dataclass(frozen=True)
class MadePlan:
    """A plan to measure. Its file is named outright, so that code edited during a long run changes nothing.

    Attributes:
        source: ``skewed:SEED`` or a workload file.
        world_size: ranks.
        planner: who made it.
        file: where it is kept.
        sharders: what the planner was given, one of :data:`benchmarks.planners.SHARDERS`.
    """

    source: str
    world_size: int
    planner: str
    file: str
    sharders: str = "default"


@dataclass(frozen=True)
class PlanMeasurement:
    """One plan in one round.

    Attributes:
        rank_ms: rank -> forward plus backward of its fused groups, for the ranks that were timed.
        replicated_ms: what data_parallel tables cost each rank: lookup, dense gradient, optimizer.
        collectives_ms: priced at :data:`benchmarks.rank_costs.BANDWIDTH_GB_PER_S`, not measured.
        bucketize_ms: what every rank spends on bucketizing its own ids for row-wise tables.
    """

    rank_ms: dict[int, float]
    replicated_ms: float
    collectives_ms: float
    bucketize_ms: float = 0.0

    @property
    def alike_ms(self) -> float:
        """Compute that is the same for every rank."""
        return self.bucketize_ms + self.replicated_ms

    @property
    def bottleneck_ms(self) -> float:
        """Compute of the slowest rank."""
        return max(self.rank_ms.values()) + self.alike_ms


class RoundTimer:
    """Times groups, each distinct one once."""

    def __init__(self, policy: RepetitionPolicy = POLICY, device: torch.device = _CPU) -> None:
        self._policy, self._device = policy, device
        self._probe = DisturbanceProbe(device)
        self._fused: dict[str, float] = {}
        self._confirmed: set[str] = set()
        self._bucketize: dict[str, float] = {}
        self._replicated: dict[str, float] = {}

    def fused_ms(self, group: GroupSpec | RowBlock) -> float:
        """Median forward plus median backward of a fused group."""
        key = _group_id(group)
        if key not in self._fused:
            self._fused[key] = self._measure(group)
        return self._fused[key]

    def confirmed_ms(self, group: GroupSpec | RowBlock) -> float:
        """Times a fused group a second time; the lower figure counts, because disturbances only add time.

        Never a third time: plans that share a group would otherwise get lower figures than others.
        """
        key = _group_id(group)
        if key not in self._confirmed:
            self._confirmed.add(key)
            self._fused[key] = min(self.fused_ms(group), self._measure(group))
        return self._fused[key]

    def _measure(self, group: GroupSpec | RowBlock) -> float:
        if isinstance(group, RowBlock):
            return self._probe.undisturbed(partial(group.measure_ms, self._device, self._policy))[0]
        measure = partial(measure_group, group, self._device, self._policy)
        timing, _ = self._probe.undisturbed(measure)
        return timing.forward.median + timing.backward.median

    def bucketize_ms(self, tables: RowWiseTables) -> float:
        """Median of bucketizing one rank's ids of row-wise tables."""
        if tables.id not in self._bucketize:
            measure = partial(bucketize_ms, tables, self._device, self._policy)
            self._bucketize[tables.id], _ = self._probe.undisturbed(measure)
        return self._bucketize[tables.id]

    def replicated_ms(self, group: GroupSpec) -> float:
        """Median of lookup, dense gradient and optimizer step of data_parallel tables (without DDP's copies)."""
        key = spec_id(group)
        if key not in self._replicated:
            measure = partial(measure_group, group, self._device, self._policy)
            self._replicated[key] = self._probe.undisturbed(measure)[0].total.median
        return self._replicated[key]


def _group_id(group: GroupSpec | RowBlock) -> str:
    return group.id if isinstance(group, RowBlock) else spec_id(group)


@dataclass(frozen=True)
class TimedPlan:
    """A plan and the ranks of it that a round times.

    Attributes:
        source: workload of the plan.
        world_size: ranks.
        planned: the plan.
        ranks: the ranks to time; None for all.
    """

    source: str
    world_size: int
    planned: PlannedResult
    ranks: Sequence[int] | None = None


def measure_plans(plans: Sequence[TimedPlan], timer: RoundTimer, seed: int) -> list[PlanMeasurement]:
    """Measures plans of one workload together: rank by rank, the plans in turn.

    A machine's speed drifts by tenths within a minute; plans timed one after another would each get another speed.

    Args:
        plans: the plans, in the order they take turns.
        timer: of the round.
        seed: of the synthetic batches.
    """
    works = []
    for plan in plans:
        workload = load_source(plan.source)
        batch_size = samples_per_rank(workload, plan.world_size)
        works.append(rank_work(workload, plan.planned.placement, plan.world_size, batch_size, seed))
    rank_ms: list[dict[int, float]] = [{} for _ in plans]
    for rank in range(max(plan.world_size for plan in plans)):
        for plan, work, times in zip(plans, works, rank_ms):
            if rank < plan.world_size and (plan.ranks is None or rank in plan.ranks):
                times[rank] = sum(timer.fused_ms(group) for group in work.of_rank(rank))
    confirmed: list[set[int]] = [set() for _ in plans]
    while True:
        slowest = [max(times.items(), key=lambda item: item[1])[0] for times in rank_ms]
        if all(rank in known for rank, known in zip(slowest, confirmed)):
            break
        for rank, known, work, times in zip(slowest, confirmed, works, rank_ms):
            if rank not in known:
                known.add(rank)
                times[rank] = sum(timer.confirmed_ms(group) for group in work.of_rank(rank))
    return [
        PlanMeasurement(
            rank_ms=times,
            replicated_ms=sum(timer.replicated_ms(group) for group in work.replicated),
            collectives_ms=work.collectives_ms,
            bucketize_ms=sum(timer.bucketize_ms(tables) for tables in work.row_wise),
        )
        for work, times in zip(works, rank_ms)
    ]


def near_bottleneck(rank_ms: dict[int, float]) -> list[int]:
    """Ranks that may be the slowest in another round."""
    slowest = max(rank_ms.values())
    return sorted(rank for rank, milliseconds in rank_ms.items() if milliseconds >= NEAR_BOTTLENECK * slowest)


def complete_rounds(records: Iterable[dict[str, Any]], wanted: dict[str, str]) -> int:
    """Counts the rounds that measured each wanted planner's plan, given as planner -> plan id."""
    rounds: dict[str, set[tuple[str, str]]] = {}
    for record in records:
        rounds.setdefault(record["process"], set()).add((record["planner"], record["plan_id"]))
    return sum(set(wanted.items()) <= measured for measured in rounds.values())


def measure_rounds(
    sources: Sequence[str], world_sizes: Sequence[int], files: Mapping[PlanRequest, Path], rounds: int, store: Path
) -> None:
    """Measures until each workload and world size has that many complete rounds; what is done is not done again.

    Args:
        sources: workloads.
        world_sizes: ranks.
        files: the plans to measure.
        rounds: complete rounds wanted.
        store: where records are kept.

    Raises:
        RuntimeError: a round's process failed; its message went to standard error.
    """
    made = [MadePlan(r.source, r.world_size, r.planner, str(file), r.sharders) for r, file in files.items()]
    sharders = {plan.sharders for plan in made}
    if len(sharders) > 1:
        raise ValueError(f"plans made with different sharders are not measured together: {sorted(sharders)}")
    plan_ids = {plan: read_plan(Path(plan.file)).plan_id for plan in made}
    for number in range(rounds):
        for source in sources:
            missing = []
            for world_size in world_sizes:
                chosen = [plan for plan in made if (plan.source, plan.world_size) == (source, world_size)]
                wanted = {plan.planner: plan_ids[plan] for plan in chosen}
                known = [r for kind in sharders for r in matching_records(store, source, world_size, kind)]
                if complete_rounds(known, wanted) <= number:
                    missing += chosen
            if missing:
                arguments = [json.dumps([p.source, p.world_size, p.planner, p.file, p.sharders]) for p in missing]
                command = [sys.executable, "-m", "benchmarks.measure_plans", "--store", str(store)]
                command += ["--round", str(number), "--plans", *arguments]
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                if subprocess.run(command, env=environment).returncode:
                    raise RuntimeError("measuring failed; the message is above")


def run_round(plans: Sequence[MadePlan], number: int, store: Path) -> None:
    """Measures plans in this process and appends one record for each."""
    torch.set_num_threads(1)
    process = f"{os.getpid()}-{int(time.time())}"
    with MeasurementStore(store) as records:
        for source, world_size in dict.fromkeys((plan.source, plan.world_size) for plan in plans):
            chosen = [plan for plan in plans if (plan.source, plan.world_size) == (source, world_size)]
            start = number % len(chosen)
            begun = time.perf_counter()
            turn = chosen[start:] + chosen[:start]
            timed = [_timed_plan(plan, store) for plan in turn]
            results = measure_plans(timed, RoundTimer(), number)
            for position, (made, plan, result) in enumerate(zip(turn, timed, results)):
                record = _record(made, plan, result)
                records.append({**record, "round": number, "order": position, "process": process})
                print(
                    f"{time.strftime('%H:%M:%S')} round {number}, {source} on {world_size} ranks, {made.planner}: "
                    f"{record['bottleneck_ms']:.2f} ms (all took {time.perf_counter() - begun:.0f} s)",
                    file=sys.stderr,
                    flush=True,
                )


def _timed_plan(plan: MadePlan, store: Path) -> TimedPlan:
    planned = read_plan(Path(plan.file))
    earlier = [
        record
        for record in matching_records(store, plan.source, plan.world_size, plan.sharders)
        if record["plan_id"] == planned.plan_id and len(record["rank_ms"]) == plan.world_size
    ]
    ranks = near_bottleneck({int(k): v for k, v in earlier[0]["rank_ms"].items()}) if earlier else None
    return TimedPlan(plan.source, plan.world_size, planned, ranks)


def _record(made: MadePlan, plan: TimedPlan, result: PlanMeasurement) -> dict[str, Any]:
    workload, planned = load_source(made.source), plan.planned
    return {
        "kind": "plan_round",
        "workload": workload.name,
        "workload_id": workload_id(workload),
        "world_size": made.world_size,
        "batch_size_per_rank": samples_per_rank(workload, made.world_size),
        "sharders": made.sharders,
        "planner": made.planner,
        "plan_id": planned.plan_id,
        "plan_seconds": planned.plan_seconds,
        "plan_cpu_seconds": planned.plan_cpu_seconds,
        "predicted_ms": planned.predicted_ms,
        "rank_ms": {str(rank): round(ms, 4) for rank, ms in sorted(result.rank_ms.items())},
        "bucketize_ms": round(result.bucketize_ms, 4),
        "replicated_ms": round(result.replicated_ms, 4),
        "bottleneck_ms": round(result.bottleneck_ms, 4),
        "imbalance": _imbalance(result) if plan.ranks is None else None,
        "collectives_ms": round(result.collectives_ms, 4),
        "bandwidth_gb_per_s": BANDWIDTH_GB_PER_S,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "hardware": hardware_fingerprint("cpu")["name"],
        "versions": software_versions(),
    }


def _imbalance(result: PlanMeasurement) -> float:
    """Slowest rank over the mean rank."""
    totals = np.asarray(list(result.rank_ms.values())) + result.alike_ms
    return round(float(totals.max() / totals.mean()), 4)


def matching_records(store: Path, source: str, world_size: int, sharders: str = "default") -> list[dict[str, Any]]:
    """All stored records of a workload on so many ranks, planned with these sharders, oldest first."""
    if not store.exists():
        return []
    workload = load_source(source)
    wanted = (workload_id(workload), world_size, samples_per_rank(workload, world_size), sharders)
    return [
        record
        for record in read_records(store)
        if (record["workload_id"], record["world_size"], record["batch_size_per_rank"], sharders_of(record)) == wanted
    ]


def sharders_of(record: Mapping[str, Any]) -> str:
    """What the planners of a record were given; older records do not say, and had the default."""
    return str(record.get("sharders", "default"))


def main() -> None:
    """Measures plans that are in the plan folder already."""
    parser = argparse.ArgumentParser(description="Measure plans that benchmarks.plan_cache made.")
    parser.add_argument("--workload", nargs="*", default=[], metavar="FILE|skewed:SEED")
    parser.add_argument("--world-size", nargs="*", type=int, default=[])
    parser.add_argument("--planners", nargs="*", choices=PLANNERS, default=[])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--timeout", type=int, help="the limit with which TorchRec's plans were made")
    parser.add_argument("--cost-model", default="auto", help="the cost model with which our plans were made")
    parser.add_argument("--sharders", choices=SHARDERS, default="default", help="with which the plans were made")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE)
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--plans", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plans:
        run_round([MadePlan(*json.loads(text)) for text in args.plans], args.round, args.store)
        return
    requests = [
        PlanRequest(source, world_size, planner, args.timeout, args.cost_model, args.sharders)
        for source in args.workload
        for world_size in args.world_size
        for planner in args.planners
    ]
    files = {request: request.path(args.folder) for request in requests}
    absent = [str(file) for file in files.values() if not file.exists()]
    if absent:
        parser.error(f"not planned yet, run benchmarks.plan_cache first: {', '.join(absent)}")
    measure_rounds(args.workload, args.world_size, files, args.rounds, args.store)


if __name__ == "__main__":
    main()
