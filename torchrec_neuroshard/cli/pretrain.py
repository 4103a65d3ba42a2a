"""``pretrain``: trains a cost model on measurement files and writes it with its card."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.training.build import build_cost_model, check_trainable
from torchrec_neuroshard.training.machine_records import MachineRecords
from torchrec_neuroshard.training.train_groups import TrainingConfig


def run(options: argparse.Namespace) -> int:
    """Trains, evaluates on held-out base tables, and writes the model; returns 0."""
    torch.set_num_threads(1)
    records = load(options.records, "--records")
    others = load(options.other_machines, "--other-machines").groups
    config = TrainingConfig(nets=options.nets, epochs=options.epochs, seed=options.seed)
    try:
        check_trainable(records)
        prepare_folder(options.out)  # before minutes of training, not after
        model = build_cost_model(records, config, options.name, others, log=say)
    except ValueError as error:
        raise CliError(f"{', '.join(map(str, options.records))}: {error}") from error
    save(model, options.out)
    return 0


def say(line: str) -> None:
    """Prints a line of the training log where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def load(files: list[Path], option: str) -> MachineRecords:
    """The records of some files.

    Raises:
        CliError: a file cannot be read, or a record cannot be used.
    """
    try:
        return MachineRecords.load(files)
    except RecordError as error:
        raise CliError(f"{option}: {error}") from error
    except OSError as error:
        raise CliError(f"{option} {error.filename}: cannot be read ({error.strerror})") from error


def prepare_folder(folder: Path) -> None:
    """Makes the folder that a model goes to.

    Raises:
        CliError: it is a file, or cannot be made.
    """
    if folder.is_file():
        raise CliError(f"--out {folder} is a file; give a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"--out {folder}: not a folder that can be written ({error.strerror})") from error


def save(model: CostModel, folder: Path) -> None:
    """Writes a model and prints its errors on held-out records."""
    try:
        model.save(folder)
    except OSError as error:
        raise CliError(f"--out {folder}: cannot be written ({error.strerror})") from error
    print(f"wrote {folder}")
    for part, figures in model.card["accuracy"].items():
        print(part, figures)
