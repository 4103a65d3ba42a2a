"""How planning grows with tables and ranks: wall time, peak memory, and where the time goes.

    taskset -c 0 python -m benchmarks.search_scaling --out out/search_scaling.jsonl

Each point is one process that plans generated tables (those of :mod:`benchmarks.plan_time`) for hosts of 8 devices of
80 GB; nothing runs on a GPU. The phases are those of the planner's search log; "around the search" is the rest of
``plan()``: gathering tables, estimating their storage, writing the plan, TorchRec's statistics. Exponents are those of
a least-squares fit of log seconds (log MB) to log tables and log ranks. What the file holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torchrec.distributed.planner import Topology

from benchmarks.plan_time import HBM_BYTES, many_tables
from benchmarks.skewed_workloads import SAMPLES_PER_RANK
from benchmarks.torchrec_planners import DDR_BYTES_PER_RANK
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, sharders, table_stats
from torchrec_neuroshard.measure.store import MeasurementStore, read_records

POINTS = ("26x8", "100x8", "100x64", "400x8", "400x64", "856x64", "856x128", "2000x64", "2000x256")
_RANKS_PER_HOST = 8
_PHASES = {
    "feasible": "spread, feasible",  # which tables to spread is settled before the first placement
    "refined": "refine",
    "placed": "refine",
    "beam": "beam",
    "repacked": "repack",
    "final": "choose",
}


def plan_point(point: str, cost_model: str, timeout: float | None) -> dict[str, Any]:
    """Plans one point in this process.

    Args:
        point: TABLESxRANKS.
        cost_model: of the planner.
        timeout: seconds; None without a limit.
    """
    tables, ranks = (int(number) for number in point.split("x"))
    workload = many_tables(tables)
    local = min(ranks, _RANKS_PER_HOST)
    planner = NeuroShardPlanner(
        topology=Topology(ranks, "cuda", hbm_cap=HBM_BYTES, ddr_cap=DDR_BYTES_PER_RANK, local_world_size=local),
        batch_size=SAMPLES_PER_RANK,
        constraints=parameter_constraints(workload),
        table_stats=table_stats(workload),
        cost_model=cost_model,
        timeout_seconds=timeout,  # type: ignore[arg-type]  # fractions of a second are fine
        debug=False,
    )
    model, base_mb = embedding_model(workload), _peak_mb()
    begun, begun_cpu = time.perf_counter(), time.process_time()
    planner.plan(model, sharders())
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    report = planner.report
    assert report is not None
    phases = _phases(report.search_log)
    return {
        "point": point,
        "timeout": timeout,
        "predicted_ms": round(report.cost.total_ms, 4),
        "seconds": round(seconds, 3),
        "cpu_seconds": round(cpu_seconds, 3),
        "peak_mb": round(_peak_mb()),
        "peak_mb_before": round(base_mb),
        "phases": {"around the search": round(seconds - sum(phases.values()), 3), **phases},
    }


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _phases(log: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Seconds of each phase of the search; splits for a target count to the first refinement."""
    phases = dict.fromkeys(_PHASES.values(), 0.0)
    before = 0.0
    for entry in log:
        phases[_PHASES[entry["step"].split()[0]]] += entry["seconds"] - before
        before = entry["seconds"]
    return {name: round(seconds, 3) for name, seconds in phases.items()}


def exponents(results: Sequence[dict[str, Any]], quantity: str) -> NDArray[np.float64]:
    """[2] powers of tables and of ranks with which a quantity grows, by least squares of logarithms."""
    sizes = np.asarray([[float(number) for number in one["point"].split("x")] for one in results])
    inputs = np.column_stack([np.log(sizes), np.ones(len(sizes))])
    solution, *_ = np.linalg.lstsq(inputs, np.log([one[quantity] for one in results]), rcond=None)
    return np.asarray(solution[:2])


def summary(results: Sequence[dict[str, Any]]) -> Table:
    """A row for each point."""
    names = list(results[0]["phases"])
    table = Table(
        "tables x ranks", "limit", "wall s", "cpu s", "peak MB", "predicted ms", *names,
        title="Planning, and the seconds of its phases",
    )  # fmt: skip
    for one in results:
        limit = "" if one["timeout"] is None else f"{one['timeout']:g} s"
        figures = (f"{one[key]:.2f}" for key in ("seconds", "cpu_seconds"))
        phases = (f"{one['phases'][name]:.2f}" for name in names)
        table.add_row(one["point"], limit, *figures, str(one["peak_mb"]), f"{one['predicted_ms']:.3f}", *phases)
    return table


def main() -> int:
    """Runs what the file lacks and prints the figures; returns the exit code."""
    parser = argparse.ArgumentParser(description="Time and memory of planning against tables and ranks.")
    parser.add_argument("--points", nargs="+", default=list(POINTS), metavar="TABLESxRANKS")
    parser.add_argument("--cost-model", default="auto")
    parser.add_argument("--timeouts", nargs="+", type=float, default=[], metavar="S", help="plan within these instead")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl file; a rerun resumes it")
    parser.add_argument("--one", metavar="POINT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limits: list[float | None] = args.timeouts or [None]
    if args.one:
        print(json.dumps(plan_point(args.one, args.cost_model, limits[0])))
        return 0
    with MeasurementStore(args.out) as store:
        done = {(one["point"], one["timeout"]) for one in store}
        for point, limit in ((point, limit) for point in args.points for limit in limits):
            if (point, limit) in done:
                continue
            command = [sys.executable, "-m", "benchmarks.search_scaling", "--out", str(args.out), "--one", point]
            command += ["--cost-model", args.cost_model] + ([] if limit is None else ["--timeouts", str(limit)])
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                print(f"{point} failed:\n{run.stderr[-2000:]}", file=sys.stderr)
                return 1
            store.append(json.loads(run.stdout.splitlines()[-1]))
            print(f"{point}: done", file=sys.stderr, flush=True)
    results = list(read_records(args.out))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(summary(results))
    unlimited = [one for one in results if one["timeout"] is None]
    if len(unlimited) >= 4:
        for quantity in ("seconds", "peak_mb"):
            tables, ranks = exponents(unlimited, quantity)
            console.print(f"{quantity} grow like tables^{tables:.2f} x ranks^{ranks:.2f}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
