"""How much few records give: of a new machine, or of a part of the space that a model has never seen.

Models are calibrated as ``torchrec-neuroshard calibrate`` does it, with a few hundred records drawn from all of a
machine's training space, and compared with models trained on the same records from random weights, with the base as
it is, and with the full model that was trained on everything. Errors are on groups of held-out base tables. Two
experiments:

*missing part*
    The base is of the same machine, but trained without some of its space: fp16 weights, weighted lookups, batches
    above 8,192 (``--missing``). Errors on the missing part stand beside those on all groups.
*new machine* (with ``--base-records``)
    The base is of other machines. Of several, the one that fits best, as ``calibrate`` chooses among shipped models,
    and one trained on all of them together.

    taskset -c 0 python -m benchmarks.calibration_transfer \\
        --records benchmarks/records/amd_epyc_l2_512k_l3_32m/groups.jsonl.xz \\
        --base-records benchmarks/records/intel_xeon_l2_2m_l3_480m/groups.jsonl.xz --out DIR

In DIR: ``results.jsonl`` (a line about the run, then one for each trained model), ``transfer.png``, and ``models/``
with what is trained once. A rerun goes on where a killed one stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Sequence

import torch
from rich.console import Console

from benchmarks.calibration_transfer_methods import PARTS, Kept, Row, Transfer, TransferConfig, machines_of
from benchmarks.calibration_transfer_report import print_tables, write_plot
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.report.accuracy_plot import PlotError
from torchrec_neuroshard.training.calibrate import calibration_config
from torchrec_neuroshard.training.dataset import load_groups, undisturbed
from torchrec_neuroshard.training.train_groups import TrainingConfig

RESULTS_FILE = "results.jsonl"
PLOT_FILE = "transfer.png"
MODELS_FOLDER = "models"


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    defaults = TransferConfig()
    parser = argparse.ArgumentParser(description="How much do few records give, with and without a base model?")
    parser.add_argument("--records", nargs="+", required=True, metavar="FILE", help="of the machine that is judged")
    parser.add_argument("--base-records", nargs="+", default=[], metavar="FILE", help="of other machines")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for results, models and plot")
    parser.add_argument("--sizes", nargs="+", type=int, default=list(defaults.sizes), metavar="N", help="of draws")
    parser.add_argument("--draws", type=int, default=defaults.draws, help="of each size")
    parser.add_argument("--missing", nargs="+", choices=tuple(PARTS), default=list(PARTS), help="the missing part")
    parser.add_argument("--nets", type=int, default=TrainingConfig.nets, help="of each ensemble")
    parser.add_argument("--epochs", type=int, default=TrainingConfig.epochs, help="of base and full models")
    parser.add_argument(
        "--base-epochs", type=int, metavar="EPOCHS", help="of other machines' models (default: as many)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of initial weights and the order of batches")
    parser.add_argument("--no-joint", action="store_true", help="no base trained on all base machines together")
    args = parser.parse_args(argv)
    if min(args.draws, args.nets, args.epochs, args.base_epochs or 1, *args.sizes) < 1:
        parser.error("--sizes, --draws, --nets and --epochs must be at least 1")
    if args.seed < 0:
        parser.error(f"--seed must not be negative, got {args.seed}")
    return args


def log(line: str) -> None:
    """Tells how far the run is."""
    print(line, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    """Trains, compares and reports; returns the exit code."""
    args = parse_args(argv)
    torch.set_num_threads(1)
    training = replace(TrainingConfig(), nets=args.nets, epochs=args.epochs, seed=args.seed)
    sizes = tuple(sorted(set(args.sizes)))
    parts = tuple(args.missing)
    config = TransferConfig(sizes, args.draws, training, args.base_epochs, parts, not args.no_joint)
    try:
        rows = run(args.records, args.base_records, args.out, config)
    except (RecordError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_tables(rows, Console(width=None if sys.stdout.isatty() else 170))
    try:
        write_plot(rows, args.out / PLOT_FILE)
    except PlotError as error:
        print(f"no plot: {error}", file=sys.stderr)
    return 0


def run(records: Sequence[str], base_records: Sequence[str], out: Path, config: TransferConfig) -> list[Row]:
    """Makes the results that a folder lacks, and returns all.

    Raises:
        ValueError: records do not suit, or the folder holds results of another run.
        RecordError: a file of records cannot be read.
        OSError: the folder cannot be written.
    """
    kept, others = (undisturbed(load_groups(files)) for files in (records, base_records))
    counts, other_counts = (dict(Counter(r["hardware"]["name"] for r in part)) for part in (kept, others))
    if len(counts) != 1:
        raise ValueError(f"--records must come from one kind of machine, found {counts or 'no group records'}")
    if set(counts) & set(other_counts):
        raise ValueError(f"--base-records must come from other machines than {', '.join(counts)}, found {other_counts}")
    about = {
        "kind": "run",
        "records": counts,
        "base_records": other_counts,
        "config": asdict(config),
        "calibration": [asdict(calibration_config(size, config.training.nets)) for size in config.sizes],
    }
    about = json.loads(json.dumps(about))  # as it is read back
    with MeasurementStore(out / RESULTS_FILE) as store:
        rows = _done(store, about)
        trained_from = json.dumps([about["records"], about["base_records"], about["config"]], sort_keys=True)
        models = Kept(out / MODELS_FOLDER / hashlib.sha256(trained_from.encode()).hexdigest()[:12])
        target = machines_of(kept, config.missing, models, log)[0]
        transfer = Transfer(target, machines_of(others, config.missing, models, log), config, models, log)
        for row in transfer.rows(rows):
            if not rows:
                store.append(about)
            store.append(row)
            rows.append(row)
    return rows


def _done(store: MeasurementStore, about: dict[str, Any]) -> list[Row]:
    """The results that a store holds.

    Raises:
        ValueError: they are of a run with other records or options.
    """
    first, *rows = list(store) or [about]
    if any(first.get(name) != value for name, value in about.items()):
        raise ValueError(f"{store.path} holds results of other records or options; give another --out")
    return [row for row in rows if row["kind"] == "result"]


if __name__ == "__main__":
    sys.exit(main())
