"""Tables and plot of :mod:`benchmarks.calibration_transfer`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.calibration_transfer_methods import (
    ALL,
    BASE,
    CALIBRATED,
    FULL,
    MISSING,
    MISSING_PART,
    NEW_MACHINE,
    SCRATCH,
    Row,
)
from torchrec_neuroshard.report.accuracy_plot import require_matplotlib

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GOAL = 1.3  # largest error of a calibrated model over the full model's
_TITLES = {
    MISSING_PART: "Base trained without a part of the space",
    NEW_MACHINE: "Base of another machine",
}
_BASE_TITLES = {"": "", "nearest": " (the one that fits best)", "joint": " (trained on all of them together)"}


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Prints a table for each experiment and kind of base; figures are means over draws."""
    for experiment, base in _pairs(rows):
        table = RichTable("method", title=_title(experiment, base), title_justify="left")
        for heading in ("records", "median", "p95", "tau", "of full's"):
            table.add_column(heading, justify="right", no_wrap=True)
        subsets = _subsets(rows, experiment)
        if MISSING in subsets:
            count = _figure(_of(rows, FULL), MISSING, "records")
            for heading in (f"median, missing part ({count:.0f})", "p95", "tau", "of full's"):
                table.add_column(heading, justify="right")
        shown = _shown(rows, experiment, base)
        for number, (method, records, members) in enumerate(shown):
            cells = [cell for subset in subsets for cell in _cells(members, subset, _of(rows, FULL))]
            last = number + 1 == len(shown) or shown[number + 1][1] != records
            table.add_row(method, "all" if records is None else f"{records:,}", *cells, end_section=last)
        console.print(table)
        _print_verdict(rows, experiment, base, console)


def _print_verdict(rows: Sequence[Row], experiment: str, base: str, console: Console) -> None:
    calibrated = _of(rows, CALIBRATED, experiment, base)
    if not calibrated:
        return
    most = max(row["records"] for row in calibrated)
    members = [row for row in calibrated if row["records"] == most]
    ratios = (f"{_ratio(members, subset, _of(rows, FULL)):.2f} ({subset})" for subset in _subsets(rows, experiment))
    machines = ", ".join(sorted({row["base_machine"] for row in members}))
    console.print(
        f"{most:,} records, from {machines}: {', '.join(ratios)} times the full model's median error; goal {GOAL}",
        markup=False,
        soft_wrap=True,
    )


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Experiments with kinds of base, in order."""
    return list(dict.fromkeys((row["experiment"], row["base"]) for row in rows if row["experiment"]))


def _title(experiment: str, base: str) -> str:
    return _TITLES[experiment] + _BASE_TITLES[base] + ": error on held-out base tables"


def _subsets(rows: Sequence[Row], experiment: str) -> list[str]:
    """Subsets of the held-out groups that an experiment is about."""
    known = {subset for row in rows for subset in row["errors"]}
    return [subset for subset in (ALL, MISSING) if subset in known and (subset == ALL or experiment == MISSING_PART)]


def _shown(rows: Sequence[Row], experiment: str, base: str) -> list[tuple[str, int | None, list[Row]]]:
    """Method, number of records and results of all draws, in the order of the table."""
    own = [row for row in rows if (row["experiment"], row["base"]) == (experiment, base)]
    members = [*_of(rows, SCRATCH), *own]
    sizes = sorted({row["records"] for row in members if row["records"] is not None})
    of_sizes = [[row for row in members if row["records"] == size] for size in sizes]
    result = []
    for part in ([row for row in members if row["records"] is None], *of_sizes, _of(rows, FULL)):
        for method in dict.fromkeys(row["method"] for row in part):
            chosen = [row for row in part if row["method"] == method]
            result.append((method, chosen[0]["records"], chosen))
    return result


def _of(rows: Sequence[Row], method: str, experiment: str = "", base: str = "") -> list[Row]:
    key = (method, experiment, base)
    return [row for row in rows if (row["method"], row["experiment"], row["base"]) == key]


def _figure(members: Sequence[Row], subset: str, name: str, part: str | None = None) -> float:
    """Mean over draws of a figure; NaN where there is none."""
    found = [row["errors"][subset] if part is None else row["errors"][subset][part] for row in members]
    known = [figures[name] for figures in found if figures[name] is not None]
    return float(np.mean(known)) if known else float("nan")


def _ratio(members: Sequence[Row], subset: str, full: Sequence[Row]) -> float:
    return _figure(members, subset, "median_ape", "total") / _figure(full, subset, "median_ape", "total")


def _cells(members: Sequence[Row], subset: str, full: Sequence[Row]) -> tuple[str, ...]:
    medians = [row["errors"][subset]["total"]["median_ape"] for row in members]
    span = f" ({min(medians):.1%} to {max(medians):.1%})" if len(medians) > 1 else ""
    return (
        f"{np.mean(medians):.1%}{span}",
        f"{_figure(members, subset, 'p95_ape', 'total'):.1%}",
        f"{_figure(members, subset, 'kendall_tau'):.3f}",
        f"{_ratio(members, subset, full):.2f}" if full else "-",
    )


def write_plot(rows: Sequence[Row], path: str | os.PathLike[str]) -> None:
    """Writes a PNG file: median error against the number of records, a panel for each experiment and subset.

    Raises:
        PlotError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(*pair, subset) for pair in _pairs(rows) for subset in _subsets(rows, pair[0])]
    figure = Figure(figsize=(5.0 * len(panels), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (experiment, base, subset) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        axes.set_title(f"{_TITLES[experiment]}{_BASE_TITLES[base]}:\n{subset} held-out groups", fontsize="small")
        _draw(axes, rows, experiment, base, subset)
    figure.savefig(path, format="png", dpi=110)


def _draw(axes: Axes, rows: Sequence[Row], experiment: str, base: str, subset: str) -> None:
    curves = {CALIBRATED: _of(rows, CALIBRATED, experiment, base), SCRATCH: _of(rows, SCRATCH)}
    axes.set_xscale("log")  # which puts ticks of its own, so before ours
    for (label, members), colour in zip(curves.items(), ("tab:blue", "tab:red")):
        sizes = sorted({row["records"] for row in members})
        of_sizes = [[_percent(row, subset) for row in members if row["records"] == size] for size in sizes]
        axes.plot(sizes, [np.mean(errors) for errors in of_sizes], marker="o", color=colour, label=label)
        axes.fill_between(sizes, [min(e) for e in of_sizes], [max(e) for e in of_sizes], color=colour, alpha=0.2)
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    for row in _of(rows, BASE, experiment, base):
        axes.axhline(_percent(row, subset), color="gray", linestyle="--", label=BASE)
    for row in _of(rows, FULL):
        axes.axhline(_percent(row, subset), color="black", label=FULL)
        axes.axhline(GOAL * _percent(row, subset), color="black", linestyle=":", label=f"goal, {GOAL} times that")
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0.0)
    axes.set(xlabel="records of the machine", ylabel="median absolute error in %")
    axes.legend(fontsize="small")


def _percent(row: Row, subset: str) -> float:
    return 100.0 * float(row["errors"][subset]["total"]["median_ape"])
