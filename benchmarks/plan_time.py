"""How long planners take to plan: each in a fresh process, everything from ``plan()`` included.

    python -m benchmarks.plan_time --tables 100 --world-size 8 --device cuda

Tables are those of the comparison's generator (seeds from 100 on), one after another. On ``cuda`` the topology is
one host of 80 GB devices and nothing runs on a GPU: planning itself is CPU work. Wall time is what a user waits;
processor time beside it tells how much other load stretched it.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import torch
from rich.console import Console
from rich.table import Table as RichTable
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from benchmarks.skewed_workloads import SAMPLES_PER_RANK, skewed_workload_json
from benchmarks.torchrec_planners import DDR_BYTES_PER_RANK, FORMS
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, sharders, table_stats
from torchrec_neuroshard.workload import Workload

PLANNERS = ("neuroshard", *FORMS)
_FIRST_SEED = 100
HBM_BYTES = 80 << 30


def many_tables(count: int) -> Workload:
    """The first ``count`` tables of the generated workloads from seed 100 on."""
    entries: list[dict[str, object]] = []
    seed = _FIRST_SEED
    while len(entries) < count:
        entries += skewed_workload_json(seed, None)["tables"]
        seed += 1
    tables = [{**entry, "name": f"t{index}"} for index, entry in enumerate(entries[:count])]
    return Workload.parse({"name": f"{count} tables", "batch_size": None, "optimizer": "sgd", "tables": tables})


def time_one(planner: str, tables: int, world_size: int, device: str) -> dict[str, float]:
    """Plans once in this process; returns wall and processor seconds and peak memory in MB."""
    torch.set_num_threads(1)
    workload = many_tables(tables)
    hbm = HBM_BYTES if device == "cuda" else 0
    local = min(world_size, 8) if device == "cuda" else world_size
    topology = Topology(world_size, device, hbm_cap=hbm, ddr_cap=DDR_BYTES_PER_RANK, local_world_size=local)
    common = {"topology": topology, "batch_size": SAMPLES_PER_RANK, "debug": False}
    if planner == "neuroshard":
        constraints = parameter_constraints(workload)
        planning = NeuroShardPlanner(**common, constraints=constraints, table_stats=table_stats(workload))
    else:
        planning = EmbeddingShardingPlanner(**common, constraints=parameter_constraints(workload, **FORMS[planner]))
    model = embedding_model(workload)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    planning.plan(model, sharders())
    return {
        "wall_seconds": round(time.perf_counter() - begun, 2),
        "cpu_seconds": round(time.process_time() - begun_cpu, 2),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> int:
    """Times each planner; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time planners, each in a fresh process.")
    parser.add_argument("--tables", type=int, default=100)
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--runs", type=int, default=3, help="runs of each planner, in turn")
    parser.add_argument("--one", choices=PLANNERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.tables, args.world_size, args.runs) < 1:
        parser.error("--tables, --world-size and --runs must be at least 1")
    if args.one:
        print(json.dumps(time_one(args.one, args.tables, args.world_size, args.device)))
        return 0
    shape = ["--tables", str(args.tables), "--world-size", str(args.world_size), "--device", args.device]
    results: dict[str, list[dict[str, float]]] = {planner: [] for planner in args.planners}
    for _ in range(args.runs):
        for planner in args.planners:
            command = [sys.executable, "-m", "benchmarks.plan_time", *shape, "--one", planner]
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{planner} failed:\n{run.stderr[-2000:]}", file=sys.stderr)
                return 1
            results[planner].append(json.loads(run.stdout.splitlines()[-1]))
    table = RichTable(title=f"{args.tables} tables on {args.world_size} ranks ({args.device} topology)")
    for column in ("planner", "wall s (min to max)", "cpu s", "peak MB"):
        table.add_column(column)
    for planner, runs in results.items():
        wall, cpu, peak = (sorted(run[key] for run in runs) for key in ("wall_seconds", "cpu_seconds", "peak_mb"))
        middle = len(runs) // 2
        table.add_row(planner, f"{wall[middle]} ({wall[0]} to {wall[-1]})", f"{cpu[middle]}", f"{peak[middle]:.0f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
