"""Two hosts with a slow link: what each planner's plan sends across it, and the real step under DMP.

    python -m benchmarks.two_hosts --workload two_hosts:0 two_hosts:1 --rounds 7     # needs root and iproute2
    python -m benchmarks.two_hosts --summary

Four gloo ranks, two in each of two network namespaces joined by a rate-limited link, train every planner's plan in
interleaved rounds. Plans and rounds are appended to a file, and a rerun goes on where a killed one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Sequence

from rich.console import Console

from benchmarks.sources import workload_id
from benchmarks.two_hosts_plans import PLANNERS, RANKS, RANKS_PER_HOST, Links, planner_inputs, plans_in_fresh_process
from benchmarks.two_hosts_summary import PLAN_KIND, ROUND_KIND, complete_rounds, print_summary, summarize
from benchmarks.two_hosts_workloads import PREFIX, SEEDS, load_two_hosts_source
from torchrec_neuroshard.measure import netns
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError, read_records
from torchrec_neuroshard.workload import WorkloadError

DEFAULT_STORE = Path("out/two_hosts.jsonl")
# One number for all planners: two gloo ranks of a host exchange 4 MB at about this rate (see README.md).
INTRA_HOST_GB_PER_S = 1.0


def kept_plans(source: str, links: Links, planners: Sequence[str], cost_model: str, store: Path) -> dict[str, Any]:
    """Planner -> record of its plan, made and appended to the store where it is not there yet."""
    case = case_of(source, links)
    wanted = {
        planner: {"kind": PLAN_KIND, **case, "planner": planner, "inputs": planner_inputs(planner, links, cost_model)}
        for planner in planners
    }
    kept = records_of(store, PLAN_KIND)
    plans = {name: record for name, asked in wanted.items() for record in kept if asked.items() <= record.items()}
    missing = [planner for planner in planners if planner not in plans]
    if missing:
        made = plans_in_fresh_process(missing, source, links, cost_model)
        with MeasurementStore(store) as opened:
            for planner in missing:
                plans[planner] = {**wanted[planner], **made[planner]}
                opened.append(plans[planner])
    return {planner: plans[planner] for planner in planners}


def case_of(source: str, links: Links) -> dict[str, Any]:
    """What plans and rounds have to share to be compared."""
    return {"workload": source, "workload_id": workload_id(load_two_hosts_source(source, RANKS)), **asdict(links)}


def records_of(store: Path, kind: str) -> list[dict[str, Any]]:
    """The store's records of a kind; none where there is no store yet."""
    return [record for record in read_records(store) if record["kind"] == kind] if store.exists() else []


def measure_rounds(
    source: str, links: Links, plans: dict[str, Any], rounds: int, steps: int, store: Path, budget_seconds: float
) -> int:
    """Measures the rounds that are missing; returns the exit code of the ranks.

    Args:
        source: the workload.
        links: how hosts and ranks are joined.
        plans: planner -> record, from :func:`kept_plans`; equal plans are trained once.
        rounds: of each plan, those in the store included.
        steps: timed steps of a plan in a round.
        store: file that rank 0 appends to.
        budget_seconds: after which no further round begins.

    Raises:
        NetnsError: hosts cannot be emulated here.
    """
    case = case_of(source, links)
    distinct = {record["plan_id"]: record["plan"] for record in plans.values()}
    done = complete_rounds([r for r in records_of(store, ROUND_KIND) if case.items() <= r.items()], distinct)
    if len(done) >= rounds:
        return 0
    job = {
        "source": source,
        "plans": distinct,
        "rounds": rounds - len(done),
        "steps": steps,
        "store": str(store.resolve()),
        "process": f"{os.getpid()}-{int(time.time())}",
        "budget_seconds": budget_seconds,
        "case": {"kind": ROUND_KIND, **case, "steps": steps},
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job))
        module = ["-m", "benchmarks.two_hosts_rank", "--job", str(path)]
        return netns.run_on_two_hosts(module, RANKS_PER_HOST, links.link_gbps)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare plans on two emulated hosts with a slow link.")
    parser.add_argument(
        "--workload", nargs="+", metavar=f"FILE|{PREFIX}SEED", default=[f"{PREFIX}{seed}" for seed in SEEDS]
    )
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, default=list(PLANNERS))
    parser.add_argument("--link-gbps", type=float, default=0.2, help="Gbit/s in each direction (default: 0.2)")
    parser.add_argument(
        "--intra-host-gb-per-s",
        type=float,
        default=INTRA_HOST_GB_PER_S,
        help=f"GB/s of a rank within its host that planners are told (default: {INTRA_HOST_GB_PER_S:g})",
    )
    parser.add_argument("--rounds", type=int, default=7, help="of each plan, those in the store included (default: 7)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a plan in a round (default: 5)")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which no further round begins (default: 60)")
    parser.add_argument("--cost-model", default="auto", metavar="NAME_OR_PATH", help="of ours (default: auto)")
    parser.add_argument("--store", type=Path, default=DEFAULT_STORE, metavar="FILE.jsonl")
    parser.add_argument("--plan-only", action="store_true", help="make the plans, measure nothing")
    parser.add_argument("--summary", action="store_true", help="print what the store says, measure nothing")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the summary there too")
    return parser


def _check(options: argparse.Namespace) -> None:
    for name in ("link_gbps", "intra_host_gb_per_s", "rounds", "steps"):
        value = getattr(options, name)
        if not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} {value} must be a positive number")
    if options.summary and not options.store.exists():
        raise ValueError(f"--store {options.store}: no such file; measure first")


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans and measures what is missing, and prints the summary; returns the exit status."""
    options = _parser().parse_args(arguments)
    begun = time.monotonic()
    try:
        _check(options)
        links = Links(options.link_gbps, options.intra_host_gb_per_s)
        for source in () if options.summary else options.workload:
            plans = kept_plans(source, links, options.planners, options.cost_model, options.store)
            left = 60 * options.minutes - (time.monotonic() - begun)
            if options.plan_only or left <= 0:
                continue
            failed = measure_rounds(source, links, plans, options.rounds, options.steps, options.store, left)
            if failed:
                print(f"error: training {source} failed; see above", file=sys.stderr)
                return failed
        cases = summarize(records_of(options.store, PLAN_KIND), records_of(options.store, ROUND_KIND))
    except (netns.NetnsError, RecordError, WorkloadError, ValueError, RuntimeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console(highlight=False, width=max(140, Console().width))
    print_summary(cases, console)
    if options.json is not None:
        options.json.write_text(json.dumps([case.to_json() for case in cases], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
