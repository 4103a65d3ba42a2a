"""Plans a workload with several planners, measures every plan, and says which is best and by how much.

taskset -c 1 python -m benchmarks.compare_planners --workload skewed:0 --world-size 4 8 16 --rounds 1
python -m benchmarks.compare_planners --summary
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from benchmarks.measure_plans import DEFAULT_STORE, matching_records, measure_rounds
from benchmarks.plan_cache import DEFAULT_FOLDER, PlanRequest, cached_plans, read_plan
from benchmarks.plan_records import PlannedResult
from benchmarks.planners import COMPARED, PLANNERS, SHARDERS
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S
from benchmarks.skewed_workloads import SEEDS
from benchmarks.sources import load_source, samples_per_rank
from benchmarks.summary import CaseResult, planner_means, print_case, print_means, summarize
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.workload import WorkloadError


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Compare planners by the measured bottleneck of their plans.",
        epilog="Measure on a core where nothing else runs (taskset -c N); see benchmarks/README.md.",
    )
    parser.add_argument(
        "--workload",
        nargs="+",
        metavar="FILE|skewed:SEED",
        help="workloads; skewed:all stands for the twelve generated ones",
    )
    parser.add_argument("--world-size", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, help="default: TorchRec's forms, and ours")
    parser.add_argument(
        "--sharders",
        choices=SHARDERS,
        default="default",
        help="what all planners are given: TorchRec's sharders, or such that offer row_wise on a CPU too, with ours "
        "told that it may replicate tables",
    )
    parser.add_argument("--rounds", type=int, default=1, help="interleaved rounds in fresh processes (a verdict: 7)")
    parser.add_argument("--timeout", type=int, help="seconds given to TorchRec's search (default: until it is done)")
    parser.add_argument("--cost-model", default="auto", help="of our planner: auto, a shipped name or a path")
    parser.add_argument("--replan", action="store_true", help="make plans again although they are kept")
    parser.add_argument("--plan-only", action="store_true", help="do not measure")
    parser.add_argument("--summary", action="store_true", help="only report what the store holds")
    parser.add_argument(
        "--real-step",
        type=int,
        nargs="?",
        const=2,
        metavar="RANKS",
        help="also train so many ranks (2) of this machine under DistributedModelParallel",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results to this file")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help=f"measured rounds ({DEFAULT_STORE})")
    parser.add_argument("--plans", type=Path, default=DEFAULT_FOLDER, help=f"kept plans ({DEFAULT_FOLDER})")
    args = parser.parse_args(argv)
    if not args.workload and not args.summary:
        parser.error("--workload is needed, except with --summary")
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {args.rounds}")
    if args.real_step is not None and args.real_step < 2:
        parser.error(f"--real-step trains at least 2 ranks, got {args.real_step}")
    args.planners = args.planners or list(COMPARED[args.sharders])
    sources = [[f"skewed:{seed}" for seed in SEEDS] if s == "skewed:all" else [s] for s in args.workload or []]
    args.workload = list(dict.fromkeys(source for group in sources for source in group))
    return args


def main(argv: list[str] | None = None) -> int:
    """Plans, measures and reports; returns the exit code."""
    args = parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 150)
    result: dict[str, object] = {"schema": 1, "bandwidth_gb_per_s": BANDWIDTH_GB_PER_S}
    if args.summary:
        if not args.store.exists():
            print(f"{args.store}: there is no such file; measure first, or give --store", file=sys.stderr)
            return 2
        cases = summarize(read_records(args.store))
    else:
        try:
            for source in args.workload:
                for world_size in args.world_size:
                    samples_per_rank(load_source(source), world_size)
        except WorkloadError as error:
            print(error, file=sys.stderr)
            return 2
        requests = [
            PlanRequest(source, world_size, planner, args.timeout, args.cost_model, args.sharders)
            for planner in args.planners
            for world_size in args.world_size
            for source in args.workload
        ]
        files = cached_plans(requests, args.plans, args.replan)
        plans = {request: read_plan(file) for request, file in files.items()}
        print_inputs(plans, console)
        result["plans"] = [{**asdict(request), **plan.to_json()} for request, plan in plans.items()]
        if args.real_step:
            from benchmarks.real_steps import print_real_steps, real_steps  # TorchRec's runtime takes seconds to import

            steps = real_steps(
                args.workload, args.planners, args.real_step, args.timeout, args.cost_model, args.sharders, args.plans
            )
            print_real_steps(steps, console)
            result["real_steps"] = steps
        if not args.plan_only:
            measure_rounds(args.workload, args.world_size, files, args.rounds, args.store)
        records = [
            record
            for source in args.workload
            for world_size in args.world_size
            for record in matching_records(args.store, source, world_size, args.sharders)
        ]
        cases = summarize(records)
    means: dict[str, object] = {}
    for case in cases:
        print_case(case, console)
    for sharders in SHARDERS:
        alike = [case for case in cases if case.sharders == sharders]
        if len(alike) > 1:
            print_means(alike, console)
        if alike:
            means[sharders] = planner_means(alike)
    result["cases"] = [asdict(case) for case in cases]
    result["geometric_means"] = means.get("default", {})
    if "all" in means:
        result["geometric_means_all_types"] = means["all"]
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def print_inputs(plans: dict[PlanRequest, PlannedResult], console: Console) -> None:
    """Prints what each planner was given, once per planner and world size."""
    shown: set[str] = set()
    for request, plan in plans.items():
        text = json.dumps(dict(plan.inputs), indent=1)
        if request.planner + text not in shown:
            shown.add(request.planner + text)
            console.print(f"[bold]{request.planner}[/bold] on {request.world_size} ranks is given:")
            console.print_json(text)


__all__ = ["CaseResult", "main"]

if __name__ == "__main__":
    sys.exit(main())
