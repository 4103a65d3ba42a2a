"""``measure``: appends timed records of this machine to a store, within a time budget."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator

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
    for name in ("--held-out", "--active", "--repeat"):
        if options.what != "compute" and _given(options, name):
            raise CliError(f"{name} says which groups to measure; it goes with `measure compute` only")
    return {"compute": _compute, "collectives": _collectives, "bandwidth": _bandwidth}[options.what](options, device)


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

    groups = _groups(options, device)
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
    except RuntimeError as error:
        raise CliError(f"group after group failed on {device}, the last with: {error}") from error
    left_out = f", {result.too_large} left out for want of memory" if result.too_large else ""
    left_out += f", {result.failed} failed" if result.failed else ""
    print(
        f"{result.written} records written to {options.out}, {result.skipped} were there{left_out}, "
        f"{result.seconds:.0f} s",
        file=sys.stderr,
    )
    return 0


def _bandwidth(options: argparse.Namespace, device: str) -> int:
    from torchrec_neuroshard.measure.collect import collect_bandwidths

    torch.set_num_threads(1)
    try:
        with MeasurementStore(options.out) as store:
            found = collect_bandwidths(store, torch.device(device), options.mebibytes)
    except RuntimeError as error:  # torch's way to say that memory is short
        raise CliError(f"--mebibytes {options.mebibytes}: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise CliError(f"--out {options.out}: cannot be written ({error.strerror})") from error
    except RecordError as error:
        raise CliError(str(error)) from error
    for figure in found:
        speed = "" if figure.gb_per_s is None else f", {figure.gb_per_s:.1f} GB/s"
        print(f"{figure.name}: {figure.timing.median:.4f} ms{speed}", file=sys.stderr)
    return 0


def _groups(options: argparse.Namespace, device: str) -> Iterator[Sampled]:
    from torchrec_neuroshard.measure.collect import repeated_groups, sampled_groups
    from torchrec_neuroshard.measure.pool import is_held_out

    chosen = [name for name in ("--held-out", "--active", "--repeat") if _given(options, name)]
    if len(chosen) > 1:
        raise CliError(f"{' and '.join(chosen)} exclude each other: each says which groups to measure")
    if options.repeat:
        if options.out.resolve() in [path.resolve() for path in options.repeat]:
            raise CliError(f"--out {options.out} holds the records to repeat; give another file for the new ones")
        return repeated_groups(_records_to_repeat(options.repeat, device))
    if options.held_out:
        return (group for group in sampled_groups(options.seed, device) if is_held_out(group.spec))
    if options.active is None:
        return sampled_groups(options.seed, device)
    # Machines that only measure need no more than what measuring needs.
    from torchrec_neuroshard.training.active import active_groups

    ensemble = model_with_ensemble(options.active, "--active").ensemble
    assert ensemble is not None
    return active_groups(ensemble, options.seed, device)


def _given(options: argparse.Namespace, name: str) -> bool:
    return bool(getattr(options, name.removeprefix("--").replace("-", "_")))


def _records_to_repeat(files: list[Path], device: str) -> list[dict[str, Any]]:
    """Group records of some files, but for those that a CPU cannot run.

    Raises:
        CliError: a file cannot be read, or holds no group that this device runs.
    """
    from torchrec_neuroshard.training.dataset import in_host_memory, records_of_kind

    try:
        records = records_of_kind("group", files)
    except RecordError as error:
        raise CliError(f"--repeat: {error}") from error
    except OSError as error:
        raise CliError(f"--repeat {error.filename}: cannot be read ({error.strerror})") from error
    kept = [record for record in records if device == "cuda" or not in_host_memory(record)]
    if not kept:
        raise CliError(f"--repeat {', '.join(map(str, files))}: there are no group records that a {device} device runs")
    if len(kept) < len(records):
        print(f"{len(records) - len(kept)} groups in managed memory are left out: only a GPU has any", file=sys.stderr)
    return kept


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
