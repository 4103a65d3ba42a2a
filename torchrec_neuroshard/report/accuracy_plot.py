"""Draws an accuracy report: predicted against measured, and the spread of their ratio by property.

Matplotlib is optional (extra ``plot``) and imported only here, when a plot is asked for.
"""

from __future__ import annotations

import importlib.util
import math
import os
from typing import TYPE_CHECKING

import numpy as np

from torchrec_neuroshard.report.accuracy_bins import Breakdown
from torchrec_neuroshard.report.accuracy_report import AccuracyReport, PartAccuracy

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLUMNS = 4
_DPI = 110
_PANEL_INCHES = (4.2, 3.4)
_LEAST_RATIO_LIMIT = 4.0  # the breakdowns' axes reach from its inverse to it, or further where boxes do


class PlotError(RuntimeError):
    """A plot that cannot be drawn here; the message names the remedy."""


def require_matplotlib() -> None:
    """Raises :class:`PlotError` when matplotlib is not installed, without importing it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(
            "plots need matplotlib, which is not installed: `pip install matplotlib` "
            "(or this package with its extra: `pip install 'torchrec-neuroshard[plot]'`)"
        )


def write_plot(report: AccuracyReport, path: str | os.PathLike[str]) -> None:
    """Writes a PNG file: for each part of the model one scatter plot, then one panel per breakdown.

    A breakdown's boxes reach from the 25th to the 75th percentile of predicted over measured, its whiskers from
    the 5th to the 95th, and a mark stands at the median. Breakdowns with a single bin say nothing new, and are left
    out.

    Raises:
        PlotError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels: list[tuple[str, PartAccuracy, Breakdown | None]] = []
    for title, part in report.parts.items():
        panels.append((title, part, None))
        panels += [(title, part, breakdown) for breakdown in part.breakdowns if len(breakdown.bins) > 1]
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    # Not pyplot: it would pick a backend for the whole process, and keep the figure alive.
    figure = Figure(figsize=(columns * _PANEL_INCHES[0], rows * _PANEL_INCHES[1]), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for panel, (title, part, breakdown) in zip(axes, panels):
        if breakdown is None:
            _draw_scatter(panel, title, part)
        else:
            _draw_breakdown(panel, title, part, breakdown)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    model = report.cost_model
    heading = f"cost model {model['name']} ({model['provenance']}, {model['hardware']})"
    machines = ", ".join(f"{name} ({count})" for name, count in sorted(report.records.hardware.items()))
    figure.suptitle(f"{heading} on records of {machines}".replace("$", r"\$"))
    figure.savefig(path, format="png", dpi=_DPI)


def _draw_scatter(axes: Axes, title: str, part: PartAccuracy) -> None:
    clouds = {name: times for name, times in part.times.items() if name != "total"}
    for name, times in clouds.items():
        axes.scatter(times.measured, times.predicted, s=5, alpha=0.35, linewidths=0, label=name, rasterized=True)
    values = np.concatenate([np.concatenate([times.measured, times.predicted]) for times in clouds.values()])
    low, high = float(values.min()) / 1.3, float(values.max()) * 1.3
    axes.plot([low, high], [low, high], color="black", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), title=title)
    axes.set(xlabel="measured ms", ylabel="predicted ms")
    axes.legend(loc="upper left", markerscale=3, fontsize="small")


def _draw_breakdown(axes: Axes, title: str, part: PartAccuracy, breakdown: Breakdown) -> None:
    rows = range(len(breakdown.bins))
    low, first, median, third, high = np.asarray([bin.ratio_percentiles for bin in breakdown.bins]).T
    # By hand: the arguments of matplotlib's box plots for this differ between the versions that may be installed.
    axes.hlines(rows, low, high, color="black", linewidth=0.8)
    axes.barh(rows, third - first, left=first, height=0.5, color="lightsteelblue", edgecolor="black", linewidth=0.8)
    axes.plot(median, rows, linestyle="none", marker="|", markersize=12, markeredgewidth=2, color="tab:orange")
    axes.set_yticks(rows, [f"{bin.label}\n({bin.records})" for bin in breakdown.bins])
    axes.axvline(1.0, color="black", linewidth=0.8)
    limit = _ratio_limit(part)
    axes.set(xscale="log", xlim=(1 / limit, limit), title=f"{title}: {breakdown.title}")
    ticks = (1 / limit, limit**-0.5, 1.0, limit**0.5, limit)
    axes.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"predicted / measured ({part.broken_down})")
    axes.tick_params(labelsize="small")
    axes.set_ylim(len(breakdown.bins) - 0.5, -0.5)


def _ratio_limit(part: PartAccuracy) -> float:
    """Power of 4 that holds the boxes of all breakdowns, so that panels can be compared; whiskers may be cut."""
    quartiles = [
        ratio for breakdown in part.breakdowns for bin in breakdown.bins for ratio in bin.ratio_percentiles[1:4]
    ]
    farthest = float(np.abs(np.log(quartiles)).max())
    return max(_LEAST_RATIO_LIMIT, 4.0 ** math.ceil(farthest / math.log(4.0)))
