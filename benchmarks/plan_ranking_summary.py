"""Whether a cost model ranks measured plans as the machine does: rank correlation, regret and error."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.plan_ranking_plans import ranking_problem
from benchmarks.plan_ranking_records import RankingCase
from benchmarks.significance import ratio_estimate
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.training.evaluate import kendall_tau, percentage_errors

GOAL_TAU, GOAL_REGRET, GOAL_PLANS, GOAL_WORKLOADS = 0.9, 0.03, 30, 5
_PREDICTION_DECIMALS = 6  # of ms: equal plans stay equal, whatever the order of a sum


@dataclass(frozen=True)
class MeasuredCase:
    """A case and its rounds.

    Attributes:
        name: of the workload, with its number of ranks.
        labels: [plans].
        rounds_ms: [plans, rounds] measured bottleneck.
    """

    name: str
    labels: tuple[str, ...]
    rounds_ms: NDArray[np.float64]

    @property
    def measured_ms(self) -> NDArray[np.float64]:
        """[plans] geometric mean over the rounds, which all hold every plan: drift weighs on all alike."""
        result: NDArray[np.float64] = np.exp(np.log(self.rounds_ms).mean(axis=1))
        return result


@dataclass(frozen=True)
class CaseRanking:
    """How a model ranks the plans of one workload.

    Attributes:
        name: of the workload, with its number of ranks.
        plans: number of plans.
        rounds: number of rounds.
        kendall_tau: of predicted and measured bottlenecks (tau-b); None where all are alike.
        first: label of the plan that the model ranks first.
        best: label of the plan that measured best.
        regret: measured bottleneck of ``first`` over that of ``best``, less 1.
        regret_high: upper end of its 95 % interval over the rounds; None with a single one.
        median_ape: median absolute error as a share of the measured bottleneck.
        bias: geometric mean of predicted over measured, less 1.
        rounds_tau: what a perfect model could reach: mean tau of each round with the mean of the others; None with
            a single round.
        plan_ms: label -> {"predicted", "measured"} in ms.
    """

    name: str
    plans: int
    rounds: int
    kendall_tau: float | None
    first: str
    best: str
    regret: float
    regret_high: float | None
    median_ape: float
    bias: float
    rounds_tau: float | None
    plan_ms: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Ranking:
    """How a model ranks the plans of all workloads.

    Attributes:
        cases: by workload.
        plans: number of plans.
        tau_all: over all plans of all workloads together.
        tau_mean: mean over the workloads.
        tau_within: over all pairs of plans of the same workload.
        rounds_tau_mean: mean over the workloads of what a perfect model could reach; None with single rounds.
        regret_mean: mean over the workloads.
        regret_max: of the worst workload.
        median_ape: over all plans.
        bias: over all plans.
    """

    cases: tuple[CaseRanking, ...]
    plans: int
    tau_all: float | None
    tau_mean: float | None
    tau_within: float | None
    rounds_tau_mean: float | None
    regret_mean: float
    regret_max: float
    median_ape: float
    bias: float

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return asdict(self)


def model_heads(model: CostModel) -> dict[str, CostModel]:
    """The model as the search sees it, and by its ensemble where it has one."""
    heads = {"mean head": model}
    if model.ensemble is not None:
        heads["ensemble"] = model.by_ensemble()
    return heads


def predicted_bottlenecks(case: RankingCase, model: CostModel) -> NDArray[np.float64]:
    """[plans] ms of forward plus backward on the slowest rank."""
    simulator = PlanSimulator(ranking_problem(case.workload, case.world_size, case.batch_size), model)
    costs = [simulator.cost(planned.placement) for planned in case.plans.values()]
    return np.round([cost.compute_ms.max() for cost in costs], _PREDICTION_DECIMALS)


def rank_case(case: MeasuredCase, predicted_ms: NDArray[np.float64]) -> CaseRanking:
    """Compares one workload's plans with their predictions, [plans] ms."""
    measured = case.measured_ms
    first, best = int(predicted_ms.argmin()), int(measured.argmin())
    rounds = case.rounds_ms.shape[1]
    regret = ratio_estimate(case.rounds_ms[first].tolist(), case.rounds_ms[best].tolist())
    errors = percentage_errors(predicted_ms, measured)
    return CaseRanking(
        case.name,
        len(measured),
        rounds,
        kendall_tau(predicted_ms, measured),
        case.labels[first],
        case.labels[best],
        regret.ratio - 1.0,
        regret.high - 1.0 if rounds > 1 else None,
        errors["median_ape"],
        errors["bias"],
        tau_of_rounds(case.rounds_ms),
        {
            label: {"predicted": float(guess), "measured": round(float(truth), 4)}
            for label, guess, truth in zip(case.labels, predicted_ms, measured)
        },
    )


def rank_all(cases: Sequence[MeasuredCase], predicted_ms: Sequence[NDArray[np.float64]]) -> Ranking:
    """Compares all workloads; ``predicted_ms`` is [plans] ms for each.

    Raises:
        ValueError: there is no workload.
    """
    if not cases:
        raise ValueError("there is no case to rank")
    rankings = tuple(rank_case(case, predicted) for case, predicted in zip(cases, predicted_ms))
    guess = np.concatenate(list(predicted_ms))
    truth = np.concatenate([case.measured_ms for case in cases])
    errors = percentage_errors(guess, truth)
    regrets = [ranking.regret for ranking in rankings]
    return Ranking(
        rankings,
        len(truth),
        kendall_tau(guess, truth),
        _mean([ranking.kendall_tau for ranking in rankings]),
        tau_within(predicted_ms, [case.measured_ms for case in cases]),
        _mean([ranking.rounds_tau for ranking in rankings]),
        float(np.mean(regrets)),
        max(regrets),
        errors["median_ape"],
        errors["bias"],
    )


def tau_within(predicted_ms: Sequence[NDArray[np.float64]], measured_ms: Sequence[NDArray[np.float64]]) -> float | None:
    """Kendall's tau-b over the pairs of plans of the same workload; None where there is no pair to compare.

    Args:
        predicted_ms: [plans] ms for each workload.
        measured_ms: likewise.
    """
    agreement, pairs = 0.0, np.zeros(2)  # pairs that differ in prediction, and in measurement
    for predicted, measured in zip(predicted_ms, measured_ms):
        guess, truth = (np.sign(ms[:, None] - ms[None, :]) for ms in (predicted, measured))
        agreement += float((guess * truth).sum())
        pairs += [np.abs(guess).sum(), np.abs(truth).sum()]
    return round(agreement / float(np.sqrt(pairs.prod())), 4) if pairs.all() else None


def tau_of_rounds(rounds_ms: NDArray[np.float64]) -> float | None:
    """Mean tau of each round of [plans, rounds] with the mean of the other rounds; None with a single round."""
    count = rounds_ms.shape[1]
    if count < 2:
        return None
    logs = np.log(rounds_ms)
    others = (logs.sum(axis=1, keepdims=True) - logs) / (count - 1)
    return _mean([kendall_tau(logs[:, index], others[:, index]) for index in range(count)])


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(float(np.mean(known)), 4) if known else None


def print_plans(rankings: Mapping[str, Ranking], console: Console) -> None:
    """Prints measured and predicted bottleneck of every plan; ``rankings`` is by head of the model."""
    for index, case in enumerate(next(iter(rankings.values())).cases):
        table = RichTable(title=f"{case.name}: bottleneck in ms over {case.rounds} rounds")
        table.add_column("plan")
        for column in ("measured", *rankings):
            table.add_column(column, justify="right")
        order = sorted(case.plan_ms, key=lambda label: case.plan_ms[label]["measured"])
        for label in order:
            predictions = [ranking.cases[index].plan_ms[label]["predicted"] for ranking in rankings.values()]
            table.add_row(label, *(f"{ms:.3f}" for ms in (case.plan_ms[label]["measured"], *predictions)))
        console.print(table)


def print_ranking(head: str, ranking: Ranking, console: Console) -> None:
    """Prints one head's figures by workload."""
    table = RichTable(title=f"Ranking of plans by the {head}")
    table.add_column("workload")
    for column in ("plans", "rounds", "tau", "tau of rounds", "regret (95 % up to)", "median error", "bias"):
        table.add_column(column, justify="right")
    table.add_column("ranked first; measured best")
    for case in ranking.cases:
        bound = "" if case.regret_high is None else f" ({case.regret_high:.1%})"
        table.add_row(
            case.name,
            str(case.plans),
            str(case.rounds),
            _number(case.kendall_tau),
            _number(case.rounds_tau),
            f"{case.regret:.1%}{bound}",
            f"{case.median_ape:.1%}",
            f"{case.bias:+.1%}",
            case.first if case.first == case.best else f"{case.first}; {case.best}",
        )
    console.print(table)


def print_overall(rankings: Mapping[str, Ranking], console: Console) -> None:
    """Prints the figures over all workloads, one row for each head of the model, and what they should be."""
    first = next(iter(rankings.values()))
    table = RichTable(title=f"{first.plans} plans of {len(first.cases)} workloads")
    table.add_column("predicted by")
    for column in (
        "tau over all",
        "tau, mean by workload",
        "tau within workloads",
        "tau of rounds",
        "regret, mean",
        "regret, worst",
        "median error",
        "bias",
    ):
        table.add_column(column, justify="right")
    table.add_column("goal")
    for head, ranking in rankings.items():
        taus = (ranking.tau_all, ranking.tau_mean, ranking.tau_within, ranking.rounds_tau_mean)
        table.add_row(
            head,
            *map(_number, taus),
            *(f"{share:.1%}" for share in (ranking.regret_mean, ranking.regret_max, ranking.median_ape)),
            f"{ranking.bias:+.1%}",
            "met" if meets_goal(ranking) else "not met",
        )
    console.print(table)
    console.print(f"goal: {goal_text()}")


def goal_text() -> str:
    """What :func:`meets_goal` asks for."""
    return (
        f"tau over all, by workload and within them at least {GOAL_TAU}, worst regret at most {GOAL_REGRET:.0%}, "
        f"{GOAL_PLANS} plans of {GOAL_WORKLOADS} workloads"
    )


def meets_goal(ranking: Ranking) -> bool:
    """Whether a ranking is good enough, over enough plans, by every figure of rank correlation."""
    taus = (ranking.tau_all, ranking.tau_mean, ranking.tau_within)
    enough = ranking.plans >= GOAL_PLANS and len(ranking.cases) >= GOAL_WORKLOADS
    return enough and ranking.regret_max <= GOAL_REGRET and all(tau is not None and tau >= GOAL_TAU for tau in taus)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
