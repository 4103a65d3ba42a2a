"""How far the search ends from the optimum, on small problems whose optimum is known.

    python -m benchmarks.search_gap

solves problems of two families (:mod:`benchmarks.known_optima.problems`) and compares: up to 6 tables on 2 or 3 ranks
under the cost model, against enumeration; up to 12 tables on 2 to 4 ranks under costs that add up, against CP-SAT. Half
of them have hardly any memory to spare. What is solved is kept in the store, so a killed run goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Iterable, Sequence

import numpy as np
import torch
from rich.console import Console
from rich.table import Column, Table

from benchmarks.known_optima.gaps import Goal, below
from benchmarks.known_optima.problems import FAMILIES, is_tight
from benchmarks.search_gap_records import Solved, Solver
from torchrec_neuroshard.costs.hardware import detect_hardware
from torchrec_neuroshard.costs.model import CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.problem import Pipeline

_WORTH_A_LOOK = 0.01
_MOST_SHOWN = 30
_LEAST_WIDTH = 130  # of a table, where it is printed to a file


def summary(solved: Sequence[Solved]) -> Table:
    """A row for each family and kind of memory; "finer" are gaps to the optimum over finer splits."""
    table = Table(
        Column("problems", no_wrap=True), "", "feasible", "found", "gap 0", "median", "mean", "worst", "below",
        "finer mean", "worst", "search s", "optimum s", title="How far the search ends from the optimum (gaps in %)",
    )  # fmt: skip
    for family in dict.fromkeys(one.family for one in solved):
        for memory, chosen in (("", (False, True)), (" roomy", (False,)), (" tight", (True,))):
            rows = [one for one in solved if one.family == family and is_tight(one.seed) in chosen]
            if rows:
                table.add_row(family.name + memory, *_cells(rows), end_section=chosen == (True,))
    return table


def _cells(rows: Sequence[Solved]) -> Iterable[str]:
    compared = [one for one in rows if one.found and one.reference.placement is not None]
    gaps = np.asarray([one.gap for one in compared]) if compared else np.full(1, np.nan)
    finest = np.asarray([one.finest_gap for one in rows if one.found] or [np.nan])
    yield str(len(rows))
    yield str(sum(one.feasible for one in rows))
    yield str(sum(one.found for one in rows))
    yield str(int((gaps == 0).sum()))
    yield from (f"{100 * figure:.2f}" for figure in (np.median(gaps), gaps.mean(), gaps.max()))
    yield str(sum(below(one.found_ms, one.reference.total_ms) for one in compared))
    yield from (f"{100 * figure:.2f}" for figure in (finest.mean(), finest.max()))
    yield f"{sum(one.seconds for one in rows):.1f}"
    yield f"{sum(one.reference_seconds for one in rows):.1f}"


def misses(solved: Sequence[Solved]) -> Table:
    """Problems worth a look, worst first: not solved, or more than 1 % above a known optimum."""
    table = Table(
        "problem", "tables", "ranks", "memory", "what else", "optimum", "found", "gap %", "finer %",
        title="Problems that the search does not solve well (ms)",
    )  # fmt: skip
    rows = [one for one in solved if one.feasible and max(one.gap, one.finest_gap) > _WORTH_A_LOOK]
    for one in sorted(rows, key=lambda one: -max(one.gap, one.finest_gap))[:_MOST_SHOWN]:
        problem = one.problem
        modules = len({of.module for of in problem.tables})
        features = [
            *(["no pipeline"] if problem.cluster.pipeline is Pipeline.NONE else []),
            *([f"{modules} modules"] if modules > 1 else []),
        ]
        table.add_row(
            f"{one.family.name} {one.seed}",
            str(len(problem.tables)),
            str(problem.cluster.world_size),
            "tight" if is_tight(one.seed) else "roomy",
            ", ".join(features),
            f"{one.reference.total_ms:.3f}",
            f"{one.found_ms:.3f}" if one.found else "none",
            f"{100 * one.gap:.2f}" if one.found else "",
            f"{100 * one.finest_gap:.2f}" if one.found else "",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Solves what is not solved yet and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compare the search with known optima of small problems.")
    names = [family.name for family in FAMILIES]
    parser.add_argument("--families", nargs="+", choices=names, default=names)
    parser.add_argument("--problems", type=int, default=100, help="of each family (default: 100)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--cost-model", default="auto", metavar="NAME_OR_PATH", help="(default: auto)")
    parser.add_argument("--store", type=Path, default=Path("out/search_gap.jsonl"), metavar="FILE.jsonl")
    parser.add_argument("--minutes", type=float, help="after which nothing more is solved; 0 prints what is")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        model = resolve_cost_model(options.cost_model, "cpu", detect_hardware("cpu"))
        store = MeasurementStore(options.store)
        solver = Solver(store, model)
    except (CostModelError, RecordError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    begun = time.monotonic()

    def may_compute() -> bool:
        return options.minutes is None or time.monotonic() - begun < 60 * options.minutes

    asked = [
        (family, seed)
        for family in FAMILIES
        if family.name in options.families
        for seed in range(options.first_seed, options.first_seed + options.problems)
    ]
    solved = [one for one in (solver.solve(family, seed, may_compute) for family, seed in asked) if one is not None]
    console = Console(highlight=False, width=max(_LEAST_WIDTH, Console().width))
    if len(solved) < len(asked):
        print(f"{len(asked) - len(solved)} of {len(asked)} problems are not solved yet; run again", file=sys.stderr)
    if not solved:
        return 0
    console.print(summary(solved))
    missed = misses(solved)
    if missed.row_count:
        console.print(missed)
    unproved = [f"{one.family.name} {one.seed}" for one in solved if not one.reference.proved]
    if unproved:
        print(f"not proved to be optima: {', '.join(unproved)}")
    goal = Goal()
    for family in dict.fromkeys(one.family for one in solved):
        rows = [one for one in solved if one.family == family and one.feasible]
        met = all(one.found for one in rows) and goal.met_by([one.gap for one in rows])
        print(
            f"{family.name}: goal {'met' if met else 'missed'} (all feasible problems solved, gap median 0, "
            f"mean at most {100 * goal.mean:g} %, worst at most {100 * goal.worst:g} %)"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
