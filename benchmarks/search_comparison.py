"""Is our search better than the paper's under the same cost model? Predicted cost and time, on the paper's tasks.

    python -m benchmarks.search_comparison --world-size 4 8 --tasks 100
    python -m benchmarks.search_comparison --summary

Each task (:mod:`benchmarks.paper_tasks`) is searched by ours, by the paper's search (:mod:`benchmarks.paper_search`)
under its own objective and under ours, and by greedy baselines. Nothing is measured: all plans are priced by the one
cost model that all searches see. The model's ensemble, by which our search chooses among its last few plans, is left
out, so that ours sees no more than the others. Results are appended as they come, and a rerun goes on where a killed
one stopped. What ours finds within a tenth or a fifth of the time of the paper's batched search:

    python -m benchmarks.search_comparison --methods paper neuroshard_tenth neuroshard_fifth --ours neuroshard_tenth
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Iterator

import torch
from rich.console import Console

import torchrec_neuroshard
from benchmarks.greedy_baselines import BALANCED, greedy_baseline, random_baseline
from benchmarks.paper_search import PaperSearchConfig, paper_search
from benchmarks.paper_search_costs import PlanObjective
from benchmarks.paper_tasks import LIMITS, paper_task
from benchmarks.search_comparison_summary import KIND, latest, print_summary, summarise
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.hardware import detect_hardware
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import InfeasibleError, Placement, ShardingProblem
from torchrec_neuroshard.search import SearchConfig, find_placement

DEFAULT_STORE = Path("out/search_comparison.jsonl")
OURS, PAPER, PAPER_OUR_OBJECTIVE, UNBATCHED = "neuroshard", "paper", "paper_our_objective", "paper_unbatched"
METHODS = (OURS, PAPER, PAPER_OUR_OBJECTIVE, *BALANCED, "random")
LIMITED = {"neuroshard_tenth": 0.1, "neuroshard_fifth": 0.2}  # ours, within that share of the paper's batched time

_Searched = tuple[Placement | None, dict[str, Any]]  # the plan, and what else there is to tell


@dataclass(frozen=True)
class Run:
    """One search of one task.

    Attributes:
        world_size: ranks of the task.
        task: its index.
        method: one of :data:`METHODS`, or :data:`UNBATCHED`.
        code: fingerprint of the code that the result depends on.
        model: fingerprint of the cost model.
    """

    world_size: int
    task: int
    method: str
    code: str
    model: str

    @classmethod
    def of(cls, record: dict[str, Any]) -> Run:
        """The run that a record tells of."""
        return cls(**{name: record[name] for name in ("world_size", "task", "method", "code", "model")})


def search(method: str, problem: ShardingProblem, model: CostModel, seed: int) -> _Searched:
    """Runs one method; the plan is None where it finds none that fits.

    Args:
        method: one of :data:`METHODS`, or :data:`UNBATCHED`.
        problem: the task.
        model: the cost model that all see.
        seed: of random plans.
    """
    if method == OURS:
        try:
            result = find_placement(problem, model, SearchConfig())
        except InfeasibleError:
            return None, {}
        return result.placement, {"progress": [[step["seconds"], step["predicted_ms"]] for step in result.log]}
    if method in LIMITED:
        return _limited(problem, model, LIMITED[method])
    if method in (PAPER, PAPER_OUR_OBJECTIVE, UNBATCHED):
        config = PaperSearchConfig(
            objective="simulator" if method == PAPER_OUR_OBJECTIVE else "paper", batched=method != UNBATCHED
        )
        result = paper_search(problem, model, config)
        return result.placement, {"calls": result.calls, "halvings": len(result.column_plan)}
    return (random_baseline(problem, seed) if method == "random" else greedy_baseline(problem, method)), {}


def _limited(problem: ShardingProblem, model: CostModel, share: float) -> _Searched:
    """Ours within a share of the time that the paper's batched search takes for the same task, right before."""
    begun = time.perf_counter()
    paper_search(dataclasses.replace(problem), model, PaperSearchConfig())
    limit = share * (time.perf_counter() - begun)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    placement = find_placement(problem, model, SearchConfig(timeout_seconds=limit)).placement
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    told = {"wall_seconds": round(seconds, 5), "cpu_seconds": round(cpu_seconds, 5), "limit_seconds": round(limit, 5)}
    return placement, told


def run_record(run: Run, model: CostModel) -> dict[str, Any]:
    """Runs a search, checks and prices its plan, and returns the record.

    Raises:
        AssertionError: the plan does not pass :func:`~torchrec_neuroshard.problem.check_placement`.
    """
    problem = paper_task(run.world_size, run.task)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    placement, told = search(run.method, problem, model, run.task)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    record: dict[str, Any] = {
        "kind": KIND,
        **vars(run),
        "cost_model": model.name,
        "tables": len(problem.tables),
        "feasible": placement is not None,
        "wall_seconds": round(seconds, 5),
        "cpu_seconds": round(cpu_seconds, 5),
        **told,
    }
    if placement is not None:
        faults = check_placement(problem, placement)
        assert not faults, f"{run}: {'; '.join(faults)}"
        objective = PlanObjective(problem, model, "paper")
        record["total_ms"] = objective.simulator.cost(placement).total_ms
        record["paper_objective_ms"] = objective.of(placement)
        record["shards"] = [[s.table, s.offset, s.width, s.rank] for s in placement.shards]
        assert math.isfinite(record["total_ms"])
    return record


def wanted_runs(args: argparse.Namespace, model: CostModel) -> Iterator[Run]:
    """The runs that the command line asks for, task by task."""
    for world_size in args.world_size:
        for number in range(args.tasks):
            methods = [*args.methods, *([UNBATCHED] if number < args.unbatched else [])]
            for method in methods:
                yield Run(world_size, args.first + number, method, code_fingerprint(method), model_fingerprint(model))


def run_all(args: argparse.Namespace, model: CostModel) -> None:
    """Runs what is wanted and not in the store yet.

    Raises:
        RecordError: the store is not a file of records.
    """
    with MeasurementStore(args.store) as store:
        done = {Run.of(record) for record in store if record["kind"] == KIND}
        missing = [run for run in wanted_runs(args, model) if run not in done]
        if missing:  # the first search of a process also loads libraries
            find_placement(paper_task(4, 1), model, SearchConfig(levels=0, repack_rounds=0))
        for run in missing:
            record = run_record(run, model)
            store.append(record)
            cost = f"{record['total_ms']:.2f} ms" if record["feasible"] else "no plan"
            where = f"{run.world_size} ranks, task {run.task}, {record['tables']} tables"
            print(f"{where}: {run.method} {cost} in {record['wall_seconds']:.2f} s", file=sys.stderr, flush=True)


@cache
def code_fingerprint(method: str) -> str:
    """A hash of the code that a method's plan, its price and its task depend on."""
    package, here = Path(torchrec_neuroshard.__file__).parent, Path(__file__).parent
    files = [package / "access.py", package / "problem.py", package / "measure" / "base_tables.json"]
    files += [*sorted((package / "costs").glob("*.py")), here / "paper_tasks.py", here / "paper_search_costs.py"]
    if method == OURS or method in LIMITED:
        files += sorted((package / "search").glob("*.py"))
    elif method.startswith("paper"):
        files += [here / "paper_search.py", here / "paper_search_greedy.py"]
    else:
        files += [here / "greedy_baselines.py"]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def model_fingerprint(model: CostModel) -> str:
    """A hash of what a cost model computes with."""
    digest = hashlib.sha256(f"{model.name} {model.hardware} {model.collectives.prior}".encode())
    nets: list[torch.nn.Module] = [] if model.collectives.net is None else [model.collectives.net]
    if isinstance(model.groups, GroupCostModel):
        digest.update(json.dumps(model.groups.prior.to_json(), sort_keys=True).encode())
        nets += model.groups.nets
    for net in nets:
        for name, tensor in sorted(net.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:12]


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Compare searches under one cost model, on the paper's tasks.")
    parser.add_argument("--world-size", type=int, nargs="+", choices=sorted(LIMITS), default=[4])
    parser.add_argument("--tasks", type=int, default=10, help="tasks of each world size (10)")
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="index of the first task")
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *LIMITED), default=list(METHODS))
    parser.add_argument(
        "--unbatched",
        type=int,
        default=0,
        metavar="N",
        help="time the paper's search as its code evaluates, too, on the first N tasks (minutes each; the same plans)",
    )
    parser.add_argument("--cost-model", default="auto", help="auto, a shipped name or a path")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, help=f"results ({DEFAULT_STORE})")
    parser.add_argument("--summary", action="store_true", help="only report what the store holds")
    parser.add_argument("--ours", choices=(OURS, *LIMITED), help="which of ours to compare (the first that was run)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.tasks < 1 or args.first < 0 or args.unbatched < 0:
        parser.error("--tasks must be at least 1, --first and --unbatched at least 0")
    return args


def main(argv: list[str] | None = None) -> int:
    """Searches and reports; returns the exit code."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    try:
        if not args.summary:
            resolved = resolve_cost_model(args.cost_model, "cpu", detect_hardware("cpu"))
            run_all(args, replace(resolved, ensemble=None))
        records = latest(read_records(args.store))
    except FileNotFoundError as error:
        print(f"{error.filename}: there is no such file; search first, or give --store", file=sys.stderr)
        return 2
    except (CostModelError, RecordError) as error:
        print(error, file=sys.stderr)
        return 2
    run = {method for methods in records.values() for method in methods}
    ours = args.ours or next((name for name in (OURS, *LIMITED) if name in run), OURS)
    print(f"ours is {ours}", file=sys.stderr)
    figures = summarise(records, ours)
    print_summary(figures, Console(width=None if sys.stdout.isatty() else 170))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
