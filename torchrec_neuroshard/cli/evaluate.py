"""``evaluate``: says how far a cost model is from measured records, and where."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.report.accuracy_plot import PlotError, require_matplotlib, write_plot
from torchrec_neuroshard.report.accuracy_records import EvaluationRecords, load_evaluation_records
from torchrec_neuroshard.report.accuracy_report import AccuracyReport


def run(options: argparse.Namespace) -> int:
    """Evaluates as the options say and prints the report; returns 0.

    Raises:
        CliError: the plot cannot be made, or the cost model or the records cannot be used.
    """
    if options.plot is not None:
        _check_plot(options.plot)
    model = _load_model(options.cost_model)
    records = _load_records(options, model)
    try:
        report = AccuracyReport.of(model, records)
    except RecordError as error:
        raise CliError(f"--records: {error}") from error
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if options.plot is not None:
        try:
            write_plot(report, options.plot)
        except OSError as error:
            raise CliError(f"--plot {options.plot}: cannot be written ({error.strerror})") from error
        print(f"wrote {options.plot}", file=sys.stderr)
    if options.json:
        print(json.dumps(report.to_json(), allow_nan=False))
    else:
        report.print_to(Console(highlight=False))
    return 0


def _check_plot(path: Path) -> None:
    """Finds out before the work what would keep the plot from being written after it."""
    if path.suffix.lower() != ".png":
        raise CliError(f"--plot {path}: plots are PNG files; give a name that ends in .png")
    if not path.parent.is_dir():
        raise CliError(f"--plot {path}: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise CliError(f"--plot {path} is a folder; give the name of a file")
    try:
        require_matplotlib()
    except PlotError as error:
        raise CliError(f"--plot: {error}") from error


def _load_model(name: str) -> CostModel:
    if name == "auto":
        known = ", ".join(shipped_models()) or "none"
        raise CliError(
            f"--cost-model auto: name the model to evaluate: a shipped one ({known}), analytic/PRESET, or a folder"
        )
    try:
        return resolve_cost_model(name, "cpu", "")  # device and hardware matter to "auto" alone
    except CostModelError as error:
        raise CliError(f"--cost-model: {error}") from error


def _load_records(options: argparse.Namespace, model: CostModel) -> EvaluationRecords:
    ranks_held_out = model.card.get("collective_ranks_held_out", ())
    try:
        return load_evaluation_records(options.records, options.held_out, ranks_held_out)
    except RecordError as error:
        raise CliError(f"--records: {error}") from error
    except OSError as error:
        raise CliError(
            f"--records {error.filename}: cannot be read ({error.strerror}); give files that `torchrec-neuroshard "
            "measure` wrote"
        ) from error
