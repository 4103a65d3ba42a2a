"""Our search on TorchRec's own objective, against TorchRec's planner: rating and time of planning.

    taskset -c 0 python -m benchmarks.torchrec_rating --out out/torchrec_rating.jsonl

``cost_model="torchrec"`` takes the models out of the comparison: both planners minimise the slowest rank's sum of
TorchRec's estimates. TorchRec's planner runs in two forms: with its defaults, given ``--timeout`` seconds, and
restricted to table-wise and column-wise with the fused kernel, to its end. Each plan is made in a process of its own,
and rated by TorchRec's enumerator and ``NoopPerfModel`` on a fresh estimate. Problems are a host of 80 GB devices for
every 8 ranks; planning is CPU work. What the file holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ShardingOption

from benchmarks.plan_time import HBM_BYTES, many_tables
from benchmarks.skewed_workloads import SAMPLES_PER_RANK
from benchmarks.torchrec_planners import DDR_BYTES_PER_RANK, RESTRICTED
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, sharders
from torchrec_neuroshard.measure.store import MeasurementStore, read_records

PROBLEMS = ("100x8", "200x16", "400x16", "400x64", "856x16", "856x64")
PLANNERS = ("neuroshard", "torchrec_restricted", "torchrec")
_RANKS_PER_HOST = 8


def plan_once(problem: str, planner: str, timeout: int) -> dict[str, Any]:
    """Plans in this process.

    Args:
        problem: TABLESxRANKS.
        planner: one of :data:`PLANNERS`.
        timeout: seconds that TorchRec's default form is given.
    """
    tables, ranks = (int(number) for number in problem.split("x"))
    workload, local = many_tables(tables), min(ranks, _RANKS_PER_HOST)
    topology = Topology(ranks, "cuda", hbm_cap=HBM_BYTES, ddr_cap=DDR_BYTES_PER_RANK, local_world_size=local)
    common = {"topology": topology, "batch_size": SAMPLES_PER_RANK, "debug": False}
    constraints = parameter_constraints(workload, **(RESTRICTED if planner == "torchrec_restricted" else {}))
    if planner == "neuroshard":
        planning: Any = NeuroShardPlanner(**common, constraints=constraints, cost_model="torchrec")
    else:
        limit = timeout if planner == "torchrec" else None
        planning = EmbeddingShardingPlanner(**common, constraints=constraints, timeout_seconds=limit)
    model = embedding_model(workload)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    planning.plan(model, sharders())
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    options: list[ShardingOption] = planning._best_plan
    enumerator = EmbeddingEnumerator(topology, SAMPLES_PER_RANK, constraints=constraints)
    compat.populate_estimates(enumerator, options, compat.sharder_maps(sharders()))
    return {
        "problem": problem,
        "planner": planner,
        "timeout": timeout if planner == "torchrec" else None,
        "rating": _rate(options, ranks, topology),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "sharding_types": sorted({option.sharding_type for option in options}),
    }


def _rate(options: Sequence[ShardingOption], ranks: int, topology: Topology) -> float:
    """TorchRec's rating; a data_parallel shard counts on every rank, as its partitioner places it."""
    if all(shard.rank is not None for option in options for shard in option.shards):
        return float(NoopPerfModel(topology).rate(list(options)))
    loads = [0.0] * ranks
    for option in options:
        for shard in option.shards:
            assert shard.perf is not None
            for rank in range(ranks) if shard.rank is None else [shard.rank]:
                loads[rank] += shard.perf.total
    return max(loads)


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each problem."""
    table = Table(
        "tables x ranks", "ours", "restricted", "default", "ours / best", "ours s", "restricted s", "default s",
        "restricted / ours", title="Rating by TorchRec's own estimates, and wall time of planning",
    )  # fmt: skip
    by = {(one["problem"], one["planner"]): one for one in results}
    for problem in dict.fromkeys(one["problem"] for one in results):
        rows = [by.get((problem, planner)) for planner in PLANNERS]
        ours, restricted, _ = rows
        ratings = [f"{row['rating']:.4f}" if row else "" for row in rows]
        seconds = [f"{row['seconds']:.2f}" if row else "" for row in rows]
        others = [row["rating"] for row in rows[1:] if row]
        ratio = f"{ours['rating'] / min(others):.4f}" if ours and others else ""
        speed = f"{restricted['seconds'] / ours['seconds']:.1f}" if ours and restricted else ""
        table.add_row(problem, *ratings, ratio, *seconds, speed)
    return table


def main() -> int:
    """Runs what the file lacks and prints the table; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare planners on TorchRec's own objective.")
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS), metavar="TABLESxRANKS")
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--timeout", type=int, default=120, help="seconds of TorchRec's default form (120)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl file; a rerun resumes it")
    parser.add_argument("--one", nargs=2, metavar=("PROBLEM", "PLANNER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(plan_once(*args.one, args.timeout)))
        return 0
    with MeasurementStore(args.out) as store:
        done = {(one["problem"], one["planner"]) for one in store}
        for problem, planner in ((problem, planner) for problem in args.problems for planner in args.planners):
            if (problem, planner) in done:
                continue
            command = [sys.executable, "-m", "benchmarks.torchrec_rating", "--out", str(args.out)]
            command += ["--timeout", str(args.timeout), "--one", problem, planner]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{problem}, {planner} failed:\n{run.stderr[-2000:]}", file=sys.stderr)
                return 1
            result = json.loads(run.stdout.splitlines()[-1])
            store.append(result)
            print(f"{problem} {planner}: {result['seconds']} s", file=sys.stderr, flush=True)
    results = list(read_records(args.out))
    Console().print(summary(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
