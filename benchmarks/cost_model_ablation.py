"""Compares our cost model of fused groups with NeuroShard's, and with parts of itself, on the same measured groups.

All are trained on the same groups and judged on groups of base tables that none has seen. The paper's nets see one
batch size and one kind of group (fused SGD, fp32, sums without weights), but records span batches from 64 to 65,536
and all kinds; so they stand here in four forms: as published ("paper"), with the logarithm of the batch as one more
feature ("paper + batch"), on our features, and as published on the groups of one kind and batch size alone. "log cost"
learns the logarithm of the cost with the same squared error.

    taskset -c 0 python -m benchmarks.cost_model_ablation --records benchmarks/records/MACHINE/groups.jsonl.xz --out DIR

"ours without the set residual" and "sum of single-table costs" are the nets of "ours" with a part switched off, not
trained anew. In DIR: ``results.jsonl`` (a line about the run, then one for each method, seed and subset of groups) and
``ablation.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.cost_model_ablation_methods import AblationConfig, AblationData, train_and_predict
from benchmarks.cost_model_ablation_report import print_tables, result_rows, write_plot
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.report.accuracy_plot import PlotError
from torchrec_neuroshard.training.dataset import load_groups, undisturbed
from torchrec_neuroshard.training.train_groups import TrainingConfig

RESULTS_FILE = "results.jsonl"
PLOT_FILE = "ablation.png"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Compare cost models of fused groups on held-out base tables.")
    parser.add_argument("--records", nargs="+", required=True, metavar="FILE", help="measurement files of one machine")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results and plot")
    parser.add_argument("--epochs", type=int, default=AblationConfig.epochs, help="of the paper's nets, at most")
    parser.add_argument("--nets", type=int, default=3, help="of our ensemble (shipped models: 6)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="each method is trained once for each")
    parser.add_argument("--batch-size", type=int, help="of the pure form (default: the commonest one)")
    parser.add_argument("--passes", action="store_true", help="also the paper's nets for forward and backward alone")
    parser.add_argument("--as-measured", action="store_true", help="leave the drift of the machine's speed in")
    parser.add_argument("--quick", action="store_true", help="a few epochs, to see that everything runs")
    args = parser.parse_args(argv)
    if args.epochs < 1 or args.nets < 1:
        parser.error(f"--epochs and --nets must be at least 1, got {args.epochs} and {args.nets}")
    if min(args.seeds) < 0:
        parser.error(f"--seeds must not be negative, got {args.seeds}")
    return args


def log(line: str) -> None:
    """Tells how far the run is."""
    print(line, file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Trains, compares and reports; returns the exit code."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    started = time.perf_counter()
    ours = TrainingConfig(nets=args.nets)
    config = AblationConfig(args.epochs, ours, tuple(args.seeds), args.passes, batch_size=args.batch_size)
    if args.quick:
        ours = replace(ours, nets=min(args.nets, 2), epochs=3)
        config = replace(config, epochs=min(args.epochs, 5), ours=ours, distil_groups=20, distil_epochs=2)
    try:
        records = load_groups(args.records)
        hardware = Counter(record["hardware"]["name"] for record in records)
        if len(hardware) > 1:
            raise ValueError(f"records must come from one kind of machine, found {dict(hardware)}")
        kept = undisturbed(records)
        data = AblationData(kept, args.batch_size, args.as_measured, log)
        args.out.mkdir(parents=True, exist_ok=True)
    except (RecordError, OSError, ValueError) as error:
        print(f"error: {', '.join(args.records)}: {error}", file=sys.stderr)
        return 2
    outcomes = train_and_predict(data, config, log)
    rows = result_rows(data, outcomes)
    run = {
        "kind": "run",
        "schema": 1,
        "records": args.records,
        "hardware": dict(hardware),
        "groups": {part: len(specs) for part, specs in data.specs.items()},
        "drift_left_in": args.as_measured,
        "dropped_as_disturbed": len(records) - len(kept),
        "config": asdict(config),
        "seconds": round(time.perf_counter() - started, 1),
    }
    lines = "".join(json.dumps(line) + "\n" for line in (run, *rows))
    (args.out / RESULTS_FILE).write_text(lines)
    console = Console(width=None if sys.stdout.isatty() else 190)
    counts = ", ".join(f"{count} {part}" for part, count in run["groups"].items())
    console.print(
        f"{', '.join(args.records)} ({', '.join(hardware)}): {counts}; {run['dropped_as_disturbed']} disturbed ones "
        f"dropped; seeds {args.seeds}, {config.epochs} epochs of the paper's nets, {run['seconds']:.0f} s in all",
        markup=False,
        soft_wrap=True,
    )
    print_tables(rows, console)
    try:
        write_plot(data, outcomes, rows, args.out / PLOT_FILE)
    except PlotError as error:
        print(f"no plot: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
