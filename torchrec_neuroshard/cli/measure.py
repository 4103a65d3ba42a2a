"""``measure``: appends timed records of this machine to a store, within a time budget."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Iterator

import torch
from tqdm import tqdm

from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError

if TYPE_CHECKING:
    from torchrec_neuroshard.costs.model import CostModel
    from torchrec_neuroshard.measure.collect import Sampled


def run(options: argparse.Namespace) -> int:
    """Measures as the options say; returns 0."""
    device = device_of(options)
    if options.what == "collectives":
        return _collectives(options, device)
    return _compute(options, device)


def device_of(options: argparse.Namespace) -> str:
    """The device to measure: what ``--device`` says, else a GPU where there is one.

    Raises:
        CliError: it is asked for, but not there.
    """
    device = str(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device == "cuda" and not torch.cuda.is_available():
        raise CliError("--device cuda: torch sees no CUDA device here; pass --device cpu, or see `doctor`")
    return device


def _compute(options: argparse.Namespace, device: str) -> int:
    from torchrec_neuroshard.measure.collect import collect_groups

    groups = _groups(options)
    torch.set_num_threads(1)  # what torchrun gives a rank
    try:
        with MeasurementStore(options.out) as store, tqdm(unit=" records") as bar:
            result = collect_groups(
                groups,
                store,
                torch.device(device),
                options.minutes,
                limit=options.limit,
                progress=lambda written: bar.update(written - bar.n),
            )
    except OSError as error:
        raise CliError(f"--out {options.out}: cannot be written ({error.strerror})") from error
    except RecordError as error:
        raise CliError(str(error)) from error
    print(
        f"{result.written} records written to {options.out}, {result.skipped} were there, {result.seconds:.0f} s",
        file=sys.stderr,
    )
    return 0


def _groups(options: argparse.Namespace) -> Iterator[Sampled]:
    from torchrec_neuroshard.measure.collect import sampled_groups
    from torchrec_neuroshard.measure.pool import is_held_out
    from torchrec_neuroshard.training.active import active_groups

    if options.held_out and options.active is not None:
        raise CliError("--held-out and --active exclude each other: tests are drawn by chance")
    if options.held_out:
        return (group for group in sampled_groups(options.seed) if is_held_out(group.spec))
    if options.active is None:
        return sampled_groups(options.seed)
    ensemble = model_with_ensemble(options.active, "--active").ensemble
    assert ensemble is not None
    return active_groups(ensemble, options.seed)


def model_with_ensemble(name: str, option: str) -> CostModel:
    """Loads a cost model whose nets can disagree.

    Raises:
        CliError: it does not exist, or has fewer than two nets; the message names the option.
    """
    from torchrec_neuroshard.costs.model import CostModel, CostModelError

    try:
        model = CostModel.load(name)
    except CostModelError as error:
        raise CliError(f"{option}: {error}") from error
    if model.ensemble is None or len(model.ensemble.nets) < 2:
        raise CliError(f"{option} {name}: a measured model of at least two nets is needed")
    return model


def _collectives(options: argparse.Namespace, device: str) -> int:
    from torchrec_neuroshard.measure import collectives

    arguments = ["--out", str(options.out), "--minutes", str(options.minutes), "--seed", str(options.seed)]
    arguments += ["--device", device, "--world-size", str(options.world_size)]
    arguments += ["--hosts", str(options.hosts)]
    if options.limit is not None:
        arguments += ["--limit", str(options.limit)]
    if options.link_gbps is not None:
        arguments += ["--link-gbps", str(options.link_gbps)]
    return collectives.main(arguments)
