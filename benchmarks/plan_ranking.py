"""Does the cost model rank whole plans as the machine does? Measures plans from bad to good and compares.

    taskset -c 1 python -m benchmarks.plan_ranking --store out/plan_ranking.jsonl --rounds 3
    python -m benchmarks.plan_ranking --summary --store out/plan_ranking.jsonl --cost-model DIR

The plans of a workload (:mod:`benchmarks.plan_ranking_plans`) are made once and kept in the store, so that further
rounds, and cost models trained later, see the same plans. Measuring is that of :mod:`benchmarks.measure_plans`: a
round of a workload is one fresh process that times its plans rank by rank, the plans in turn; rounds go round the
workloads. What the store holds already is not measured again. Predictions are made when the figures are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.measure_plans import RoundTimer, TimedPlan, measure_plans, near_bottleneck
from benchmarks.plan_cache import DEFAULT_FOLDER
from benchmarks.plan_ranking_plans import PLANNERS, PlanMaker
from benchmarks.plan_ranking_records import (
    CASE,
    CaseKey,
    RankingCase,
    RankingRecords,
    case_key,
    case_record,
    round_record,
)
from benchmarks.plan_ranking_summary import (
    MeasuredCase,
    Ranking,
    goal_text,
    meets_goal,
    model_heads,
    predicted_bottlenecks,
    print_overall,
    print_plans,
    print_ranking,
    rank_all,
)
from benchmarks.sources import load_source
from torchrec_neuroshard.costs.hardware import detect_hardware
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.measure.collect import records_of_this_machine
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.workload import WorkloadError

DEFAULT_STORE = Path("out/plan_ranking.jsonl")
_FILES = Path(__file__).parent / "workloads"
WORKLOADS = (
    "skewed:1",
    "skewed:7",
    "skewed:10",
    *(str(_FILES / f"{name}.json") for name in ("avazu", "criteo_kaggle_dim16")),
)
PLANS = 10


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description="Compare a cost model's ranking of plans with the measured one.",
        epilog="Measure on a core where nothing else runs (taskset -c N); see benchmarks/README.md.",
    )
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help=f"plans and rounds ({DEFAULT_STORE})")
    parser.add_argument("--rounds", type=int, default=1, help="rounds wanted, those in the store included")
    parser.add_argument(
        "--workload",
        nargs="+",
        default=list(WORKLOADS),
        metavar="FILE|skewed:SEED",
        help="workloads; three generated and two public ones unless given",
    )
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--plans", type=int, default=PLANS, help=f"plans of each workload ({PLANS}), filled at random")
    parser.add_argument("--planners", nargs="*", choices=PLANNERS, default=list(PLANNERS), help="besides random plans")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans; another one makes further plans")
    parser.add_argument("--cost-model", default="auto", help="that is judged, and plans: auto, a shipped name or path")
    parser.add_argument("--summary", action="store_true", help="only report what the store holds")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help=f"kept plans ({DEFAULT_FOLDER})")
    parser.add_argument("--measure", type=int, metavar="ROUND", help=argparse.SUPPRESS)  # one workload, this process
    args = parser.parse_args(argv)
    for name, least in (("rounds", 1), ("world_size", 1), ("plans", 2), ("seed", 0)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    args.workload = list(dict.fromkeys(args.workload))
    args.planners = list(dict.fromkeys(args.planners))
    return args


def main(argv: list[str] | None = None) -> int:
    """Plans, measures and reports; returns the exit code."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    try:
        if args.measure is not None:
            (source,) = args.workload
            run_round(args.store, case_key(source, args.world_size, args.seed), source, args.measure)
            return 0
        model = resolve_cost_model(args.cost_model, "cpu", detect_hardware("cpu"))
        if not args.summary:
            keys = {source: case_key(source, args.world_size, args.seed) for source in args.workload}
            make_cases(args, keys, model)
            measure_rounds(args, keys)
        return report(args, model)
    except FileNotFoundError as error:
        print(f"{error.filename}: there is no such file; measure first, or give --store", file=sys.stderr)
    except (CostModelError, RecordError, WorkloadError) as error:
        print(error, file=sys.stderr)
    return 2


def make_cases(args: argparse.Namespace, keys: dict[str, CaseKey], model: CostModel) -> None:
    """Makes the plans of the workloads (source -> key) that the store has none of yet."""
    with MeasurementStore(args.store) as store:
        known = RankingRecords(records_of_this_machine(store, CASE, torch.device("cpu"))).cases
        for source, key in keys.items():
            if key in known:
                planned_with = known[key].cost_model["name"]
                if planned_with != model.name:
                    print(f"{source}: its plans are kept, made with the cost model {planned_with}", file=sys.stderr)
                continue
            maker = PlanMaker(source, args.world_size, args.seed, args.cost_model, model)
            plans = maker.make(args.planners, args.plans, args.folder)
            made_with = {"name": model.name, "provenance": model.provenance}
            case = RankingCase(load_source(source), args.world_size, key[2], args.seed, plans, made_with)
            store.append(case_record(case, source))
            print(f"{_now()} {source}: {len(plans)} plans ({', '.join(plans)})", file=sys.stderr, flush=True)


def measure_rounds(args: argparse.Namespace, keys: dict[str, CaseKey]) -> None:
    """Measures until every workload has the wanted number of complete rounds, each in a process of its own.

    Raises:
        RuntimeError: a round's process failed; its message went to standard error.
    """
    for number in range(args.rounds):
        for source, key in keys.items():
            records = RankingRecords(read_records(args.store))
            if records.complete(records.cases[key]) > number:
                continue
            command = [sys.executable, "-m", "benchmarks.plan_ranking", "--store", str(args.store)]
            command += ["--workload", source, "--world-size", str(args.world_size), "--seed", str(args.seed)]
            command += ["--measure", str(number)]
            if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
                raise RuntimeError("measuring failed; the message is above")


def run_round(path: Path, key: CaseKey, source: str, number: int) -> None:
    """Measures the plans of a case in this process and appends a record for each.

    Args:
        path: the store, which holds the case.
        key: of the case.
        source: of its workload.
        number: of the round; round k starts with the k-th plan and has batches of its own.
    """
    records = RankingRecords(read_records(path))
    case = records.cases[key]
    times = records.first_times(case)
    labels = list(case.plans)
    start = number % len(labels)
    labels = labels[start:] + labels[:start]
    timed = [
        TimedPlan(source, case.world_size, case.plans[label], near_bottleneck(times[label]) if label in times else None)
        for label in labels
    ]
    process, begun = f"{os.getpid()}-{int(time.time())}-{number}", time.perf_counter()
    results = measure_plans(timed, RoundTimer(), number)
    with MeasurementStore(path) as store:
        for order, (label, result) in enumerate(zip(labels, results)):
            store.append(round_record(case, label, result, number, order, process))
    seconds = time.perf_counter() - begun
    print(f"{_now()} round {number}, {source}: {len(labels)} plans in {seconds:.0f} s", file=sys.stderr, flush=True)


def report(args: argparse.Namespace, model: CostModel) -> int:
    """Prints the figures of all cases of the store that were measured; returns the exit code."""
    records = RankingRecords(read_records(args.store))
    cases = [case for case in records.cases.values() if records.complete(case)]
    if not cases:
        print(f"{args.store}: there is no complete round; measure first, or give --store", file=sys.stderr)
        return 2
    measured = [
        MeasuredCase(
            f"{case.workload.name} on {case.world_size} ranks" + (f" (seed {case.seed})" if case.seed else ""),
            tuple(case.plans),
            records.bottleneck_ms(case),
        )
        for case in cases
    ]
    rankings: dict[str, Ranking] = {
        head: rank_all(measured, [predicted_bottlenecks(case, judged) for case in cases])
        for head, judged in model_heads(model).items()
    }
    console = Console(width=None if sys.stdout.isatty() else 170)
    print_plans(rankings, console)
    console.print(f"cost model: {model.name} ({model.provenance}, {model.hardware})", markup=False)
    for head, ranking in rankings.items():
        print_ranking(head, ranking, console)
    print_overall(rankings, console)
    if args.json:
        result: dict[str, Any] = {
            "schema": 1,
            "cost_model": {"name": model.name, "provenance": model.provenance, "hardware": model.hardware},
            "goal": goal_text(),
            "heads": {
                head: {**ranking.to_json(), "meets_goal": meets_goal(ranking)} for head, ranking in rankings.items()
            },
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _now() -> str:
    return time.strftime("%H:%M:%S")


if __name__ == "__main__":
    sys.exit(main())
