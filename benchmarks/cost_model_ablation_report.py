"""Figures, tables and plot of :mod:`benchmarks.cost_model_ablation`."""

from __future__ import annotations

import os
from typing import Any, Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.cost_model_ablation_methods import AblationData, Outcome, in_papers_setting, method_names
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.report.accuracy_plot import require_matplotlib
from torchrec_neuroshard.training.evaluate import accuracy_of, percentage_errors

ALL = "all"
_SMALL = 15  # tables; the paper measures groups of at most so many
_IN_FULL = (ALL, f"up to {_SMALL} shards", f"more than {_SMALL} shards")  # subsets with all figures in the table
_ERRORS = ("median_ape", "p95_ape", "bias")
_TAUS = ("kendall_tau", "kendall_tau_strata")

Row = dict[str, Any]


def subsets(data: AblationData) -> dict[str, NDArray[np.bool_]]:
    """[held-out groups] masks of all groups, by size and by kind, and of the paper's one batch size."""
    specs = data.specs["test"]
    conditions: dict[str, Callable[[GroupSpec], bool]] = {
        ALL: lambda spec: True,
        _IN_FULL[1]: lambda spec: len(spec.shards) <= _SMALL,
        _IN_FULL[2]: lambda spec: len(spec.shards) > _SMALL,
        "paper's setting": in_papers_setting,
        "other pooled": lambda s: s.kernel == "fused" and s.pooling == "sum" and not in_papers_setting(s),
        "unpooled": lambda spec: spec.pooling == "none",
        "dense": lambda spec: spec.kernel == "dense",
    }
    masks = {name: np.asarray([condition(spec) for spec in specs], bool) for name, condition in conditions.items()}
    masks[one_batch_name(data)] = data.one_batch("test")
    return {name: mask for name, mask in masks.items() if mask.any()}


def one_batch_name(data: AblationData) -> str:
    """Name of the subset with the paper's setting and one batch size."""
    return f"paper's setting, batch {data.batch_size}"


def result_rows(data: AblationData, outcomes: Sequence[Outcome]) -> list[Row]:
    """One JSON object for each method, seed and subset; errors and biases are shares (0.1 is 10 %).

    "total" holds the errors of forward plus backward, "forward" and "backward" theirs, or null where a method does
    not predict them.
    """
    rows = []
    masks = subsets(data)
    for outcome in outcomes:
        for subset, mask in masks.items():
            if outcome.one_batch and subset != one_batch_name(data):
                continue
            test = data.split.test.subset(mask)
            half = outcome.total_ms[mask, None] / 2  # accuracy_of compares the sum of both passes
            accuracy = accuracy_of(np.concatenate([half, half], axis=1), test)
            row: Row = {
                "kind": "result",
                "method": outcome.method,
                "seed": outcome.seed,
                "subset": subset,
                "records": int(mask.sum()),
                "total": accuracy["total"],
                **{name: accuracy[name] for name in _TAUS},
                "cpu_seconds": round(outcome.seconds, 1),
                "best_epoch": outcome.best_epoch,
            }
            for index, name in enumerate(("forward", "backward")):
                passes = outcome.passes_ms
                row[name] = (
                    passes if passes is None else percentage_errors(passes[mask, index], test.measured_ms[:, index])
                )
            rows.append(row)
    return rows


def print_tables(rows: Sequence[Row], console: Console) -> None:
    """Prints all figures by size of the group, and errors by kind of group; means over seeds."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    names = list(dict.fromkeys(row["subset"] for row in rows))
    table = RichTable(
        "groups", "method", title="Error of forward + backward on held-out base tables", title_justify="left"
    )
    for heading in ("median", "p95", "bias", "tau", "tau in strata", "forward", "backward", "cpu s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for subset in (name for name in names if name in _IN_FULL):
        found = {method: _of(rows, method, subset) for method in methods}
        found = {method: members for method, members in found.items() if members}
        for number, (method, members) in enumerate(found.items()):
            table.add_row(
                f"{subset}\n({members[0]['records']})" if number == 0 else "",
                method,
                *(_error_cells(members, "total")),
                *(_number(_mean([row[name] for row in members])) for name in _TAUS),
                *(_percent(_figure(members, part, "median_ape")) for part in ("forward", "backward")),
                f"{np.mean([row['cpu_seconds'] for row in members]):.0f}" if subset == ALL else "",
                end_section=number == len(found) - 1,
            )
    console.print(table)
    kinds = [name for name in names if name not in _IN_FULL]
    table = RichTable("method", title="The same by kind of group: median, p95 (tau in strata)", title_justify="left")
    counts = {row["subset"]: row["records"] for row in rows}
    for name in kinds:
        table.add_column(f"{name}\n({counts[name]})", justify="right")
    for method in methods:
        table.add_row(method, *(_kind_cell(_of(rows, method, name)) for name in kinds))
    console.print(table)


def _of(rows: Sequence[Row], method: str, subset: str) -> list[Row]:
    """The rows of one method and subset, one for each seed."""
    return [row for row in rows if row["method"] == method and row["subset"] == subset]


def _figure(members: Sequence[Row], part: str, name: str) -> float | None:
    return _mean([None if row[part] is None else row[part][name] for row in members])


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return float(np.mean(found)) if found else None


def _error_cells(members: Sequence[Row], part: str) -> tuple[str, ...]:
    medians = [row[part]["median_ape"] for row in members]
    span = f" ({min(medians):.1%} to {max(medians):.1%})" if len(medians) > 1 else ""
    median, p95, bias = (_figure(members, part, name) for name in _ERRORS)
    return _percent(median) + span, _percent(p95), "-" if bias is None else f"{bias:+.1%}"


def _kind_cell(members: Sequence[Row]) -> str:
    if not members:
        return "-"
    tau = _number(_mean([row["kendall_tau_strata"] for row in members]))
    return (
        f"{_percent(_figure(members, 'total', 'median_ape'))}, {_percent(_figure(members, 'total', 'p95_ape'))} ({tau})"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def write_plot(
    data: AblationData, outcomes: Sequence[Outcome], rows: Sequence[Row], path: str | os.PathLike[str]
) -> None:
    """Writes a PNG file: how the errors are distributed, and how well groups are ranked; the first seed of each method.

    Raises:
        PlotError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14.0, 5.0), layout="constrained")
    FigureCanvasAgg(figure)
    errors, ranks = figure.subplots(1, 2, width_ratios=(3, 2))
    methods = [name for name in method_names(outcomes) if _of(rows, name, ALL)]
    colours: Mapping[str, Any] = {name: colormaps["tab20"](index) for index, name in enumerate(methods)}
    measured = data.split.test.measured_ms.sum(axis=1)
    shares = np.arange(1, len(measured) + 1) / len(measured)
    for name in methods:
        outcome = next(outcome for outcome in outcomes if outcome.method == name)
        error = np.sort(np.abs(outcome.total_ms / measured - 1.0))
        errors.plot(np.maximum(error, 1e-3), shares, color=colours[name])
    errors.set(xscale="log", xlim=(5e-3, 10.0), ylim=(0.0, 1.0))
    errors.set_title("absolute error of forward + backward (colours as beside)")
    errors.set(xlabel="error as a share of the measured ms", ylabel=f"share of {len(measured)} held-out groups")
    positions = np.arange(len(methods))
    taus = [_mean([row["kendall_tau_strata"] for row in _of(rows, name, ALL)]) for name in methods]
    ranks.barh(positions, [np.nan if tau is None else tau for tau in taus], color=[colours[n] for n in methods])
    ranks.set_yticks(positions, methods, fontsize="small")
    ranks.invert_yaxis()
    ranks.set(
        xlabel="Kendall tau within strata", title="ranking of groups with equal batch and lookups", xlim=(0.0, 1.0)
    )
    figure.savefig(path, format="png", dpi=110)
