"""What the stored rounds of the two-host comparison say."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any, Collection, Iterable, Sequence

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.significance import RatioEstimate, geometric_mean, ratio_estimate
from benchmarks.sources import workload_id
from benchmarks.two_hosts_plans import DEFAULT, OURS, RANKS
from benchmarks.two_hosts_traffic import least_link_bytes
from benchmarks.two_hosts_workloads import load_two_hosts_source
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
)
from torchrec_neuroshard.workload import WorkloadError

PLAN_KIND, ROUND_KIND = "two_hosts_plan", "two_hosts_round"
_ABBREVIATIONS = {
    DATA_PARALLEL: "DP",
    TABLE_WISE: "TW",
    COLUMN_WISE: "CW",
    ROW_WISE: "RW",
    TABLE_ROW_WISE: "TWRW",
    TABLE_COLUMN_WISE: "TWCW",
    GRID_SHARD: "GRID",
}
_CASE = ("workload", "workload_id", "link_gbps", "intra_host_gb_per_s")


@dataclass(frozen=True)
class PlannerResult:
    """One planner's plan of one case.

    Attributes:
        planner: its name.
        plan_id: of its plan; planners may share one.
        types: sharding type -> number of tables.
        step_ms: measured: median over rounds of the rounds' median step.
        link_bytes: measured: bytes a step over the link, both directions, mean over rounds.
        busiest_bytes: measured: of the host that sends more.
        predicted_ms: by our cost model.
        torchrec_rating_ms: what TorchRec's planner minimised; None for ours.
        ours_to_this: measured: our step over this one's, round by round.
    """

    planner: str
    plan_id: str
    types: dict[str, int]
    step_ms: float
    link_bytes: float
    busiest_bytes: float
    predicted_ms: float
    torchrec_rating_ms: float | None
    ours_to_this: RatioEstimate


@dataclass(frozen=True)
class CaseResult:
    """All planners on one workload and link; a case has ours and TorchRec's default.

    Attributes:
        workload: its source.
        link_gbps: Gbit/s of the link.
        planners: the planners.
        least_bytes: computed: what any plan sends at least over the link in a step, without headers; None where the
            workload's file is gone or has changed.
    """

    workload: str
    link_gbps: float
    planners: tuple[PlannerResult, ...]
    least_bytes: float | None

    def of(self, planner: str) -> PlannerResult:
        """One planner's result."""
        return next(result for result in self.planners if result.planner == planner)

    @property
    def best_of_torchrec(self) -> PlannerResult:
        """The form of TorchRec's planner whose plan measured fastest."""
        return min((result for result in self.planners if result.planner != OURS), key=lambda result: result.step_ms)

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def complete_rounds(records: Iterable[dict[str, Any]], plan_ids: Collection[str]) -> list[str]:
    """Ids of the rounds that measured all the plans, in the order they were begun."""
    measured: dict[str, set[str]] = {}
    for record in records:
        measured.setdefault(record["round"], set()).add(record["plan_id"])
    return [number for number, of_round in measured.items() if of_round >= set(plan_ids)]


def summarize(plans: Sequence[dict[str, Any]], rounds: Sequence[dict[str, Any]]) -> list[CaseResult]:
    """The cases that have a complete round of the latest plan of each planner, ours and TorchRec's default included."""
    latest: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in plans:
        latest.setdefault(tuple(record[name] for name in _CASE), {})[record["planner"]] = record
    result = []
    for key, of_planner in latest.items():
        of_case = [record for record in rounds if tuple(record[name] for name in _CASE) == key]
        ids = complete_rounds(of_case, {record["plan_id"] for record in of_planner.values()})
        if not ids or not {OURS, DEFAULT} <= of_planner.keys():
            continue
        by_plan = {
            record["plan_id"]: [
                r for number in ids for r in of_case if (r["round"], r["plan_id"]) == (number, record["plan_id"])
            ]
            for record in of_planner.values()
        }
        steps = {plan_id: [statistics.median(r["step_ms"]) for r in found] for plan_id, found in by_plan.items()}
        planners = tuple(
            _planner_result(planner, record, by_plan[record["plan_id"]], steps, of_planner[OURS]["plan_id"])
            for planner, record in of_planner.items()
        )
        result.append(CaseResult(key[0], key[2], planners, _least_bytes(key[0], key[1])))
    return sorted(result, key=lambda case: (case.link_gbps, case.workload))


def _least_bytes(source: str, identity: str) -> float | None:
    try:
        workload = load_two_hosts_source(source, RANKS)
    except WorkloadError:
        return None
    return least_link_bytes(workload) if workload_id(workload) == identity else None


def _planner_result(
    planner: str,
    plan: dict[str, Any],
    rounds: Sequence[dict[str, Any]],
    steps: dict[str, list[float]],
    ours: str,
) -> PlannerResult:
    types = [entry["sharding_type"] for entry in plan["plan"].values()]
    mine = steps[plan["plan_id"]]
    return PlannerResult(
        planner,
        plan["plan_id"],
        {kind: types.count(kind) for kind in sorted(set(types))},
        statistics.median(mine),
        statistics.mean(sum(record["link_bytes"]) for record in rounds),
        statistics.mean(max(record["link_bytes"]) for record in rounds),
        plan["predicted_ms"],
        plan["torchrec_rating_ms"],
        ratio_estimate(steps[ours], mine),
    )


def print_summary(cases: Sequence[CaseResult], console: Console) -> None:
    """Prints a table of each case, and geometric means over the cases of each link."""
    for case in cases:
        console.print(_case_table(case))
    for link in sorted({case.link_gbps for case in cases}):
        of_link = [case for case in cases if case.link_gbps == link]
        for name, others in (
            ("TorchRec's default", [case.of(DEFAULT) for case in of_link]),
            ("its best form by measured step", [case.best_of_torchrec for case in of_link]),
        ):
            ours = [case.of(OURS) for case in of_link]
            time = geometric_mean([other.ours_to_this.ratio for other in others])
            moved = geometric_mean([mine.link_bytes / other.link_bytes for mine, other in zip(ours, others)])
            console.print(
                f"{link:g} Gbit/s, {len(of_link)} workloads, ours to {name}: step {time:.3f}, "
                f"bytes over the link {moved:.3f} (geometric means of measured ratios)"
            )
    if not cases:
        console.print("no case has a complete round yet")


def _case_table(case: CaseResult) -> RichTable:
    rounds = case.of(OURS).ours_to_this.rounds
    title = f"{case.workload}, link of {case.link_gbps:g} Gbit/s: measured in {rounds} rounds, and predicted"
    if case.least_bytes is not None:
        title += f"; no plan sends less than {case.least_bytes / 1e6:.2f} MB and headers (computed)"
    table = RichTable(title=title, title_justify="left")
    left, right = (
        ("planner", "tables"),
        ("link MB", "one way", "step ms", "ours / it (95 %)", "predicted ms", "its rating"),
    )
    for heading in left:
        table.add_column(heading)
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in case.planners:
        ratio = result.ours_to_this
        table.add_row(
            result.planner,
            " ".join(f"{_ABBREVIATIONS[kind]}:{count}" for kind, count in result.types.items()),
            f"{result.link_bytes / 1e6:.2f}",
            f"{result.busiest_bytes / 1e6:.2f}",
            f"{result.step_ms:.1f}",
            "" if result.planner == OURS else f"{ratio.ratio:.3f} ({ratio.low:.3f} to {ratio.high:.3f})",
            f"{result.predicted_ms:.1f}",
            "" if result.torchrec_rating_ms is None else f"{result.torchrec_rating_ms:.1f}",
        )
    return table
