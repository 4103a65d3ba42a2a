"""Figures of :mod:`benchmarks.search_comparison`: who finds the cheaper plan, how much cheaper, and how fast.

References:
    [Aiex2007ttt] R. Aiex, M. Resende, C. Ribeiro. TTT plots: a perl program to create time-to-target plots.
        Optimization Letters 1, 2007.
"""

from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

KIND = "search_comparison"
COSTS = {"total_ms": "predicted iteration", "paper_objective_ms": "the paper's objective"}
QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)

_EQUAL = 1e-4  # relative difference of costs that counts as none

Record = Mapping[str, Any]
Results = dict[int, dict[str, dict[int, Record]]]  # world size -> method -> task -> record


def latest(records: Iterable[Record]) -> Results:
    """The last record of each (world size, method, task), of the cost model that was used last."""
    ours = [record for record in records if record["kind"] == KIND]
    results: Results = {}
    for record in ours:
        if record["model"] == ours[-1]["model"]:
            by_method = results.setdefault(record["world_size"], {})
            by_method.setdefault(record["method"], {})[record["task"]] = record
    return results


def summarise(results: Results, ours: str) -> dict[str, Any]:
    """All figures as JSON.

    Args:
        results: what was found.
        ours: the method that others are compared with.

    Returns:
        {"cost_model", "world_sizes": {ranks: {"methods": {method: ...}, "against": {method: ...}}}}; see
        :func:`method_figures` and :func:`comparison`.
    """
    names = {r["cost_model"] for methods in results.values() for runs in methods.values() for r in runs.values()}
    figures: dict[str, Any] = {"schema": 1, "cost_model": ", ".join(sorted(names)), "world_sizes": {}}
    for world_size, methods in sorted(results.items()):
        against = {}
        if ours in methods:
            against = {name: comparison(methods[ours], runs) for name, runs in methods.items() if name != ours}
        unbatched = methods.get("paper_unbatched", {})
        shared = [task for task in unbatched if task in methods.get("paper", {})]
        figures["world_sizes"][str(world_size)] = {
            "methods": {name: method_figures(runs) for name, runs in methods.items()},
            "against": against,
            "unbatched_plans_equal": [
                sum(unbatched[task].get("shards") == methods["paper"][task].get("shards") for task in shared),
                len(shared),
            ],
        }
    return figures


def method_figures(runs: Mapping[int, Record]) -> dict[str, Any]:
    """Tasks, those with a plan, and median seconds, of one method."""
    return {
        "tasks": len(runs),
        "feasible": sum(record["feasible"] for record in runs.values()),
        **{
            name: round(float(np.median([record[name] for record in runs.values()])), 4)
            for name in ("wall_seconds", "cpu_seconds")
        },
    }


def comparison(ours: Mapping[int, Record], theirs: Mapping[int, Record]) -> dict[str, Any]:
    """Ours against another method on the tasks that both ran.

    Returns:
        "tasks"; "only_ours" and "only_theirs" (tasks with a plan from one alone), "neither"; "speedup" (median of their
        over our processor seconds); and for each of :data:`COSTS`: "lower", "equal" and "higher" tasks of ours among
        those that both have a plan for, "quantiles" (:data:`QUANTILES`) and "geometric_mean" of our cost over theirs,
        and "worst" ({task: ratio} where ours is higher). With ours' progress on record, also "to_their_plan", see
        :func:`time_to_their_plan`.
    """
    tasks = sorted(ours.keys() & theirs.keys())
    mine = [ours[task]["feasible"] for task in tasks]
    other = [theirs[task]["feasible"] for task in tasks]
    both = [task for task, *feasible in zip(tasks, mine, other) if all(feasible)]
    result: dict[str, Any] = {
        "tasks": len(tasks),
        "only_ours": [task for task, a, b in zip(tasks, mine, other) if a and not b],
        "only_theirs": [task for task, a, b in zip(tasks, mine, other) if b and not a],
        "neither": [task for task, a, b in zip(tasks, mine, other) if not a and not b],
    }
    if tasks:
        # A greedy baseline may be faster than the clock of processor time ticks.
        speedups = [max(theirs[t]["cpu_seconds"], 1e-5) / max(ours[t]["cpu_seconds"], 1e-5) for t in tasks]
        result["speedup"] = float(f"{np.median(speedups):.4g}")
    for cost in COSTS:
        ratios = {task: ours[task][cost] / theirs[task][cost] for task in both}
        values = np.asarray(list(ratios.values()))
        higher = {task: round(ratio, 5) for task, ratio in ratios.items() if ratio > 1 + _EQUAL}
        result[cost] = {
            "lower": int((values < 1 - _EQUAL).sum()),
            "equal": int((np.abs(values - 1) <= _EQUAL).sum()),
            "higher": len(higher),
            "quantiles": [round(float(q), 4) for q in np.quantile(values, QUANTILES)] if both else [],
            "geometric_mean": round(float(np.exp(np.log(values).mean())), 4) if both else None,
            "worst": dict(sorted(higher.items(), key=lambda item: -item[1])),
        }
    if any("progress" in ours[task] for task in both):
        result["to_their_plan"] = time_to_their_plan(ours, theirs, both)
    return result


def time_to_their_plan(
    ours: Mapping[int, Record], theirs: Mapping[int, Record], tasks: Sequence[int]
) -> dict[str, Any]:
    """How much sooner ours has a plan as cheap as the other method's last one [Aiex2007ttt].

    Returns:
        "quantiles" (:data:`QUANTILES`) over tasks of their wall time over ours until then, 0 where ours never has one;
        "ten_times" and "hundred_times": tasks in which it is at least as much.
    """
    ratios = []
    for task in tasks:
        goal = theirs[task]["total_ms"] * (1 + _EQUAL)
        reached = [seconds for seconds, ms in ours[task].get("progress", ()) if ms <= goal]
        ratios.append(theirs[task]["wall_seconds"] / min(reached) if reached else 0.0)
    return {
        "quantiles": [float(f"{q:.4g}") for q in np.quantile(ratios, QUANTILES)],
        "ten_times": sum(ratio >= 10 for ratio in ratios),
        "hundred_times": sum(ratio >= 100 for ratio in ratios),
    }


def print_summary(figures: Mapping[str, Any], console: Console) -> None:
    """Prints the figures, one set of tables for each world size."""
    console.print(f"cost model: {figures['cost_model']}", markup=False)
    for world_size, of_world in figures["world_sizes"].items():
        _print_methods(world_size, of_world["methods"], console)
        for cost, name in COSTS.items():
            _print_comparisons(f"{world_size} ranks, {name}: ours against", of_world["against"], cost, console)
        for method, found in of_world["against"].items():
            for missed, said in (("only_theirs", "ours has no plan"), ("only_ours", "no plan")):
                if found[missed] and method.startswith("paper"):
                    console.print(f"{method}, {said}: tasks {', '.join(map(str, found[missed]))}", markup=False)
            if "to_their_plan" in found:
                sooner = found["to_their_plan"]
                ratios = " ".join(f"{ratio:.3g}" for ratio in sooner["quantiles"])
                console.print(
                    f"{method}: their time over ours until ours has a plan as cheap, min, quartiles, max: {ratios}; "
                    f"at least 10 in {sooner['ten_times']} tasks, 100 in {sooner['hundred_times']}",
                    markup=False,
                )
            worse = found["total_ms"]["worst"]
            if worse:
                tasks = ", ".join(f"{task} ({ratio})" for task, ratio in worse.items())
                console.print(f"{method}, ours predicted slower: tasks {tasks}", markup=False)
        equal, shared = of_world["unbatched_plans_equal"]
        if shared:
            console.print(f"paper_unbatched makes the plan of paper on {equal} of {shared} tasks")


def _print_methods(world_size: str, methods: Mapping[str, Any], console: Console) -> None:
    table = RichTable(title=f"{world_size} ranks: searches")
    for column in ("method", "tasks", "with a plan", "median wall s", "median cpu s"):
        table.add_column(column)
    for name, found in methods.items():
        counts = str(found["tasks"]), str(found["feasible"])
        table.add_row(name, *counts, f"{found['wall_seconds']:.4g}", f"{found['cpu_seconds']:.4g}")
    console.print(table)


def _print_comparisons(title: str, against: Mapping[str, Any], cost: str, console: Console) -> None:
    table = RichTable(title=title)
    columns = ("method", "tasks", "lower", "equal", "higher", "plan of ours alone", "of theirs alone", "of neither")
    for column in (*columns, "mean ratio", "min, quartiles, max", "their time / ours"):
        table.add_column(column)
    for method, found in against.items():
        of = found[cost]
        compared = found["tasks"] - sum(len(found[name]) for name in ("only_ours", "only_theirs", "neither"))
        table.add_row(
            method,
            str(found["tasks"]),
            *(f"{of[name] / compared:.0%}" if compared else "-" for name in ("lower", "equal", "higher")),
            *(str(len(found[name])) for name in ("only_ours", "only_theirs", "neither")),
            f"{of['geometric_mean']:.4f}" if compared else "-",
            " ".join(f"{ratio:.3f}" for ratio in of["quantiles"]) or "-",
            f"{found['speedup']:.3g}" if "speedup" in found else "-",
        )
    console.print(table)
