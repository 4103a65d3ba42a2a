"""Plans for eight GPUs, ours against TorchRec's, and what their slowest ranks take, measured on one GPU.

Planning needs no GPU, so it is done before, here; the plans are carried to the GPU, which runs every rank's fused
groups alone, rank after rank, the plans of a workload in turn:

    python -m benchmarks.gpu.plan_bottlenecks plan --out plans.jsonl --hardware h200
    python -m benchmarks.gpu.plan_bottlenecks measure --plans plans.jsonl --out bottlenecks.jsonl --rounds 3
    python -m benchmarks.gpu.plan_bottlenecks summary --out bottlenecks.jsonl

All planners get the same sharders, the true pooling factors, and a topology with the hardware's memory and bandwidths.
TorchRec's run in two forms, as they come (for so many seconds) and restricted to table-wise and column-wise.
Collectives are not measured; what they take at the hardware's published bandwidth is told apart.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure_plans import RoundTimer, TimedPlan, measure_plans
from benchmarks.plan_records import PlannedResult
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S
from benchmarks.sources import load_source, samples_per_rank
from torchrec_neuroshard.costs.hardware import HARDWARE, HardwareSpec
from torchrec_neuroshard.measure.hardware import hardware_fingerprint, software_versions
from torchrec_neuroshard.measure.store import MeasurementStore, read_records

_HERE = Path(__file__).parent.parent
WORKLOADS = (
    str(_HERE / "workloads" / "mlperf_dlrm_dcnv2.json"),
    str(_HERE / "workloads" / "nv_synthetic_small.json"),
    "skewed:3",
    "skewed:7",
)
PLANNERS = ("neuroshard", "torchrec", "torchrec_restricted")
RANKS = 8
_DDR_BYTES = 256 << 30
# What the ranks of one GPU can run in turn: no rows cut within hosts, and nothing in the host's memory.
_TYPES, _KERNELS = ["table_wise", "column_wise", "row_wise", "data_parallel"], ["fused", "dense"]
_RESTRICTED = ["table_wise", "column_wise"]


def make_plan(source: str, planner: str, hardware: str, ranks: int, timeout: int, cost_model: str) -> PlannedResult:
    """Plans a workload for one host of GPUs (or CPU ranks, for "generic_cpu").

    Args:
        source: ``skewed:SEED`` or a workload file.
        planner: one of :data:`PLANNERS`.
        hardware: a preset of ``costs.hardware``.
        ranks: ranks.
        timeout: seconds that TorchRec's search is given.
        cost_model: of ours.
    """
    from torchrec.distributed.planner import EmbeddingShardingPlanner

    from benchmarks.all_types import AllTypesSharder
    from benchmarks.plan_records import placement_of
    from torchrec_neuroshard import NeuroShardPlanner
    from torchrec_neuroshard.adapters import compat
    from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, table_stats

    workload, spec = load_source(source), HARDWARE[hardware]
    memory = "hbm_mem_bw" if spec.device == "cuda" else "ddr_mem_bw"
    topology = compat.make_topology(
        world_size=ranks,
        local_world_size=ranks,
        device=spec.device,
        hbm_bytes=int(spec.memory_gib * 2**30),
        ddr_bytes=_DDR_BYTES,
        bandwidths_gbps={memory: spec.memory_gbps, "intra_host_bw": spec.intra_host_gbps},
    )
    types = _RESTRICTED if planner == "torchrec_restricted" else _TYPES
    constraints = parameter_constraints(workload, sharding_types=types, compute_kernels=_KERNELS)
    common: dict[str, Any] = {
        "batch_size": samples_per_rank(workload, ranks),
        "constraints": constraints,
        "debug": False,
    }
    if planner == "neuroshard":
        ours = {"cost_model": cost_model, "hardware": hardware, "table_stats": table_stats(workload)}
        planning: Any = NeuroShardPlanner(topology=topology, **common, **ours)
    else:
        planning = EmbeddingShardingPlanner(topology=topology, **common, timeout_seconds=timeout)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    plan = planning.plan(embedding_model(workload), [AllTypesSharder()])
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    predicted = np.zeros(ranks)
    for option in planning._best_plan:
        for shard in option.shards:
            predicted[slice(None) if shard.rank is None else shard.rank] += (
                shard.perf.fwd_compute + shard.perf.bwd_compute
            )
    inputs = {"hardware": hardware, "sharding_types": types, "timeout_seconds": timeout, "cost_model": cost_model}
    return PlannedResult(placement_of(plan, workload), seconds, cpu_seconds, float(predicted.max()), inputs)


def plan_all(args: argparse.Namespace) -> None:
    """Makes the plans that the file lacks."""
    with MeasurementStore(args.out) as store:
        done = {(record["source"], record["planner"]) for record in store}
        for source in args.workloads:
            for planner in PLANNERS:
                if (source, planner) in done:
                    continue
                made = make_plan(source, planner, args.hardware, args.ranks, args.timeout, args.cost_model)
                store.append({"source": source, "planner": planner, "ranks": args.ranks, **made.to_json()})
                print(f"{source}: {planner} in {made.plan_seconds:.1f} s", file=sys.stderr, flush=True)


def measure_all(args: argparse.Namespace) -> None:
    """Measures rounds of all plans, each workload's appended as it is done."""
    device = torch.device(args.device)
    plans: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for record in read_records(args.plans):
        plans[record["source"]].append(record)
    with MeasurementStore(args.out) as store:
        done = {(record["source"], record["round"]) for record in store}
        for number in range(args.rounds):
            for source, made in plans.items():
                if (source, number) in done:
                    continue
                timer = RoundTimer(device=device)
                turn = [made[(index + number) % len(made)] for index in range(len(made))]
                timed = [TimedPlan(source, record["ranks"], PlannedResult.from_json(record)) for record in turn]
                spec = HARDWARE[str(made[0]["inputs"]["hardware"])]
                for record, measured in zip(turn, measure_plans(timed, timer, number)):
                    store.append(_measured_json(record, measured, number, spec, device))
                print(f"round {number}, {source}", file=sys.stderr, flush=True)


def _measured_json(
    record: dict[str, Any], measured: Any, number: int, spec: HardwareSpec, device: torch.device
) -> dict[str, Any]:
    figures = dataclasses.asdict(measured)
    at_published = measured.collectives_ms * BANDWIDTH_GB_PER_S / spec.intra_host_gbps
    return {
        "kind": "plan_bottleneck",
        **{name: record[name] for name in ("source", "planner", "ranks", "plan_id", "plan_seconds", "predicted_ms")},
        "round": number,
        "bottleneck_ms": round(measured.bottleneck_ms, 4),
        "rank_ms": {str(rank): round(ms, 4) for rank, ms in figures["rank_ms"].items()},
        "bucketize_ms": round(measured.bucketize_ms, 4),
        "replicated_ms": round(measured.replicated_ms, 4),
        "collectives_ms_at_published_bandwidth": round(at_published, 4),
        "hardware": hardware_fingerprint(device.type),
        "versions": software_versions(),
    }


def summary(records: Sequence[dict[str, Any]]) -> tuple[Table, float]:
    """A row for each workload, and the geometric mean of ours over the better of TorchRec's two."""
    by: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    predicted: dict[str, float] = {}
    for record in records:
        by[record["source"]][record["planner"]].append(record["bottleneck_ms"])
        if record["planner"] == "neuroshard":
            predicted[record["source"]] = record["predicted_ms"]
    table = Table("workload", *(f"{name} ms" for name in PLANNERS), "ours predicted ms", "ours / better")
    ratios = []
    for source, planners in by.items():
        medians = [float(np.median(planners[name])) for name in PLANNERS]
        ratios.append(medians[0] / min(medians[1:]))
        shown = (*(f"{ms:.3f}" for ms in medians), f"{predicted[source]:.3f}", f"{ratios[-1]:.3f}")
        table.add_row(Path(source).stem, *shown)
    return table, float(np.exp(np.mean(np.log(ratios))))


def main(argv: Sequence[str] | None = None) -> int:
    """Plans, measures or reports; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the slowest ranks of plans for several GPUs on one.")
    parser.add_argument("what", choices=("plan", "measure", "summary"))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".jsonl file; a rerun resumes it")
    parser.add_argument("--plans", type=Path, metavar="FILE", help="what plan wrote (measure)")
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), metavar="FILE|skewed:SEED")
    parser.add_argument("--hardware", choices=sorted(HARDWARE), default="h200")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--timeout", type=int, default=120, help="seconds of TorchRec's search (120)")
    parser.add_argument("--cost-model", default="auto")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if args.what == "plan":
        plan_all(args)
        return 0
    if args.what == "measure":
        if args.plans is None or not args.plans.exists():
            print("--plans: give the file that `plan` wrote", file=sys.stderr)
            return 2
        if args.device == "cuda" and not torch.cuda.is_available():
            print("--device cuda: torch sees no CUDA device here", file=sys.stderr)
            return 2
        measure_all(args)
    if not args.out.exists():
        print(f"{args.out}: there is no such file; measure first", file=sys.stderr)
        return 2
    table, mean = summary(list(read_records(args.out)))
    Console().print(table)
    print(f"measured bottleneck, ours over the better of TorchRec's two forms: {mean:.3f} in geometric mean")
    return 0


if __name__ == "__main__":
    sys.exit(main())
