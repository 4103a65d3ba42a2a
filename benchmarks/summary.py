"""What stored rounds say: each planner against the best of TorchRec's forms on the same workload.

Plans made with TorchRec's own sharders are judged by compute. Where row-wise and data_parallel are chosen from too,
which buy compute with communication, plans are judged with their collectives, against the form that is best by that.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.measure_plans import sharders_of
from benchmarks.planners import ALL_TORCHREC_FORMS, PLANNERS
from benchmarks.significance import (
    LOSS_RATIO,
    LOSS_RATIO_ALL_TYPES,
    LOSS_ROUNDS,
    RatioEstimate,
    geometric_mean,
    ratio_estimate,
)


@dataclass(frozen=True)
class PlannerResult:
    """One planner on one workload and world size, from the rounds of its latest plan.

    Attributes:
        planner: its name.
        plan_seconds: wall time of planning.
        plan_cpu_seconds: processor time of planning.
        predicted_ms: the planner's own cost of its plan.
        bottleneck_ms: geometric mean over rounds, compute only.
        with_collectives_ms: the same plus collectives at the stated bandwidth.
        imbalance: slowest rank over mean rank.
        compute: bottleneck against that of the best TorchRec form; None for lack of a common round.
        total: the same with collectives; against the form that is best with them, where plans are judged so.
    """

    planner: str
    plan_seconds: float
    plan_cpu_seconds: float
    predicted_ms: float
    bottleneck_ms: float
    with_collectives_ms: float
    imbalance: float | None
    compute: RatioEstimate | None
    total: RatioEstimate | None


@dataclass(frozen=True)
class CaseResult:
    """All planners on one workload and world size.

    Attributes:
        workload: its name.
        world_size: ranks.
        reference: the TorchRec form with the lowest measured bottleneck; None when none was measured.
        planners: results in the order of :data:`benchmarks.planners.PLANNERS`.
        sharders: what the planners were given, one of :data:`benchmarks.planners.SHARDERS`.
        total_reference: the form against which collectives are compared too.
    """

    workload: str
    world_size: int
    reference: str | None
    planners: tuple[PlannerResult, ...]
    sharders: str = "default"
    total_reference: str | None = None

    @property
    def with_collectives(self) -> bool:
        """Whether plans are judged with their collectives."""
        return self.sharders == "all"

    @property
    def limit(self) -> float:
        """Ratio above which a plan is a loss."""
        return LOSS_RATIO_ALL_TYPES if self.with_collectives else LOSS_RATIO

    def judged(self, result: PlannerResult) -> RatioEstimate | None:
        """The ratio by which a planner is judged."""
        return result.total if self.with_collectives else result.compute

    @property
    def judged_against(self) -> str | None:
        """The form that planners are judged against."""
        return self.total_reference if self.with_collectives else self.reference


def summarize(records: Iterable[dict[str, Any]]) -> list[CaseResult]:
    """Groups records by workload, world size and sharders, and compares the planners' latest plans."""
    cases: dict[tuple[str, str, int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for record in records:
        key = ("workload", "workload_id", "world_size", "batch_size_per_rank")
        cases[(*(record[name] for name in key), sharders_of(record))].append(record)
    order = sorted(cases, key=lambda key: (key[4] == "all", key[2], _natural(key[0]), key[1], key[3]))
    return [_case(key[0], key[2], cases[key], key[4]) for key in order]


def _natural(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition(":")
    return (stem, int(number)) if number.isdecimal() else (name, 0)


def _case(workload: str, world_size: int, records: Sequence[dict[str, Any]], sharders: str) -> CaseResult:
    latest = {record["planner"]: record["plan_id"] for record in records}
    rounds: dict[str, dict[str, dict[str, Any]]] = defaultdict(dict)  # planner -> process -> record
    for record in records:
        if record["plan_id"] == latest[record["planner"]]:
            rounds[record["planner"]][record["process"]] = record
    bottlenecks = {planner: _mean(_compute, measured) for planner, measured in rounds.items()}
    totals = {planner: _mean(_with_collectives, measured) for planner, measured in rounds.items()}
    forms = [planner for planner in rounds if planner in ALL_TORCHREC_FORMS]
    reference = min(forms, key=lambda planner: bottlenecks[planner], default=None)
    total_reference = reference
    if sharders == "all":
        total_reference = min(forms, key=lambda planner: totals[planner], default=None)
    results = []
    for planner in sorted(rounds, key=PLANNERS.index):
        measured = rounds[planner]
        last = list(measured.values())[-1]
        results.append(
            PlannerResult(
                planner,
                last["plan_seconds"],
                last["plan_cpu_seconds"],
                last["predicted_ms"],
                bottlenecks[planner],
                totals[planner],
                next((r["imbalance"] for r in measured.values() if r["imbalance"] is not None), None),
                _ratio(_compute, measured, rounds.get(str(reference), {})),
                _ratio(_with_collectives, measured, rounds.get(str(total_reference), {})),
            )
        )
    return CaseResult(workload, world_size, reference, tuple(results), sharders, total_reference)


def _mean(figure: Callable[[dict[str, Any]], float], measured: Mapping[str, dict[str, Any]]) -> float:
    return geometric_mean([figure(record) for record in measured.values()])


def _ratio(
    figure: Callable[[dict[str, Any]], float],
    measured: Mapping[str, dict[str, Any]],
    reference: Mapping[str, dict[str, Any]],
) -> RatioEstimate | None:
    """Ratio over the rounds (process -> record) that both have; None without any."""
    common = [process for process in measured if process in reference]
    if not common:
        return None
    return ratio_estimate([figure(measured[p]) for p in common], [figure(reference[p]) for p in common])


def _compute(record: dict[str, Any]) -> float:
    return float(record["bottleneck_ms"])


def _with_collectives(record: dict[str, Any]) -> float:
    return float(record["bottleneck_ms"] + record["collectives_ms"])


def print_case(case: CaseResult, console: Console) -> None:
    """Prints one workload's table."""
    judged = "ratios with collectives" if case.with_collectives else "ratios"
    given = ", all sharding types" if case.sharders == "all" else ""
    table = RichTable(
        title=f"{case.workload} on {case.world_size} ranks{given} ({judged} against {case.judged_against})"
    )
    table.add_column("planner")
    columns = ("plan s (cpu s)", "predicted", "measured ms", "+collectives", "max/mean", "ratio", "95 %", "rounds")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for result in case.planners:
        ratio = case.judged(result)
        table.add_row(
            result.planner,
            f"{result.plan_seconds:.1f} ({result.plan_cpu_seconds:.1f})",
            f"{result.predicted_ms:.2f}",
            f"{result.bottleneck_ms:.2f}",
            f"{result.with_collectives_ms:.2f}",
            "-" if result.imbalance is None else f"{result.imbalance:.2f}",
            "-" if ratio is None else f"{ratio.ratio:.3f}",
            "-" if ratio is None or ratio.rounds < 2 else f"{ratio.low:.3f} to {ratio.high:.3f}",
            "0" if ratio is None else str(ratio.rounds),
        )
    console.print(table)


def planner_means(cases: Sequence[CaseResult]) -> dict[str, dict[str, dict[str, float]]]:
    """Geometric mean ratio of each planner per world size and over all.

    Returns:
        planner -> world size or "all" -> {"compute", "with_collectives", "workloads"}.
    """
    ratios: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        for result in case.planners:
            if result.compute is not None and result.total is not None:
                for group in (str(case.world_size), "all"):
                    ratios[result.planner][group].append((result.compute.ratio, result.total.ratio))
    return {
        planner: {
            group: {
                "compute": geometric_mean([compute for compute, _ in pairs]),
                "with_collectives": geometric_mean([total for _, total in pairs]),
                "workloads": len(pairs),
            }
            for group, pairs in groups.items()
        }
        for planner, groups in sorted(ratios.items(), key=lambda item: PLANNERS.index(item[0]))
    }


def print_means(cases: Sequence[CaseResult], console: Console) -> None:
    """Prints geometric means, which hold the ablation too, and the losses of each planner of ours.

    Args:
        cases: of one choice of sharders, at least one.
        console: where to print.
    """
    means = planner_means(cases)
    groups = list(dict.fromkeys(str(case.world_size) for case in cases)) + ["all"]
    table = RichTable(
        title="Measured bottleneck against the best TorchRec form of each workload, geometric mean "
        "(with collectives; workloads)" + (", all sharding types" if cases[0].sharders == "all" else "")
    )
    table.add_column("planner")
    for group in groups:
        table.add_column(group if group == "all" else f"{group} ranks", justify="right")
    for planner, by_group in means.items():
        cells = [by_group.get(group) for group in groups]
        table.add_row(
            planner,
            *(
                "-" if c is None else f"{c['compute']:.3f} ({c['with_collectives']:.3f}; {c['workloads']})"
                for c in cells
            ),
        )
    console.print(table)
    for kind, found in (("loss", losses(cases)), ("undecided", undecided(cases))):
        for case, result in found:
            ratio = case.judged(result)
            assert ratio is not None
            console.print(
                f"{kind}: {result.planner} on {case.workload}, {case.world_size} ranks: {ratio.ratio:.3f} "
                f"({ratio.low:.3f} to {ratio.high:.3f}, {ratio.rounds} rounds) against {case.judged_against}"
            )
    if not losses(cases):
        console.print(f"no losses (interval over {LOSS_ROUNDS} rounds or more wholly above {cases[0].limit})")


def losses(cases: Sequence[CaseResult]) -> list[tuple[CaseResult, PlannerResult]]:
    """Where a planner of ours lost."""
    judged = [(c, r, c.judged(r)) for c, r in _ours(cases)]
    return [(c, r) for c, r, ratio in judged if ratio is not None and ratio.is_loss(c.limit)]


def undecided(cases: Sequence[CaseResult]) -> list[tuple[CaseResult, PlannerResult]]:
    """Where a planner of ours may lose and more rounds are needed to say."""
    judged = [(c, r, c.judged(r)) for c, r in _ours(cases)]
    return [(c, r) for c, r, ratio in judged if ratio is not None and ratio.may_be_loss(c.limit)]


def _ours(cases: Sequence[CaseResult]) -> list[tuple[CaseResult, PlannerResult]]:
    return [(c, r) for c in cases for r in c.planners if r.planner not in ALL_TORCHREC_FORMS]
