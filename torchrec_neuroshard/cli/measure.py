"""``measure``: appends timed records of this machine to a store, within a time budget."""

from __future__ import annotations

import argparse
import sys

import torch
from tqdm import tqdm

from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError


def run(options: argparse.Namespace) -> int:
    """Measures as the options say; returns 0."""
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise CliError("--device cuda: torch sees no CUDA device here; pass --device cpu, or see `doctor`")
    if options.what == "collectives":
        return _collectives(options, device)
    return _compute(options, device)


def _compute(options: argparse.Namespace, device: str) -> int:
    from torchrec_neuroshard.measure.collect import collect_groups, sampled_groups

    torch.set_num_threads(1)  # what torchrun gives a rank
    try:
        with MeasurementStore(options.out) as store, tqdm(unit=" records") as bar:
            result = collect_groups(
                sampled_groups(options.seed),
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
