"""``calibrate``: measures this machine for some minutes and makes a cost model of it, from a shipped one if it can."""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from typing import Iterator

import torch
from tqdm import tqdm

from torchrec_neuroshard import cuda
from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.cli.measure import device_of, model_with_ensemble
from torchrec_neuroshard.cli.pretrain import load, prepare_folder, save, say
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.measure.collect import Sampled, collect_bandwidths, collect_groups, sampled_groups
from torchrec_neuroshard.measure.hardware import hardware_fingerprint
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.training.active import active_groups
from torchrec_neuroshard.training.build import build_cost_model
from torchrec_neuroshard.training.calibrate import calibration_config, nearest_model
from torchrec_neuroshard.training.dataset import group_data, split_groups, undisturbed
from torchrec_neuroshard.training.machine_records import MachineRecords
from torchrec_neuroshard.training.train_groups import TrainingConfig

RECORDS_FILE = "records.jsonl"
COLLECTIVES_FILE = "collectives.jsonl"
_FEW_TO_JUDGE_BY = 30  # held-out groups
_FIRST_RECORDS = 30  # by which the base model is chosen
_COLLECTIVES_SHARE = 1 / 3  # of the minutes, where there are ranks to talk to each other
_COPY_MEBIBYTES = {"cuda": 1024, "cpu": 64}


def run(options: argparse.Namespace) -> int:
    """Measures, trains, evaluates on held-out base tables, and writes the model; returns 0."""
    torch.set_num_threads(1)
    device = torch.device(device_of(options))
    prepare_folder(options.out)
    given = load(options.records, "--records")
    _require_this_machine(given, device)
    base = model_with_ensemble(options.base, "--base") if options.base is not None else None
    if base is None:
        first = _measure(options, device, itertools.islice(sampled_groups(options.seed, device.type), _FIRST_RECORDS))
        base = _nearest(given.plus(first), device, options)
    groups = sampled_groups(options.seed, device.type)
    if base is None:
        say(f"no cost model of a {device.type} device is shipped: this one is trained from the records alone")
    else:
        say(f"starting from cost model {base.name} ({base.hardware})")
        assert base.ensemble is not None
        groups = active_groups(base.ensemble, options.seed, device.type)
    records = given.plus(_measure(options, device, groups)).plus(_measure_collectives(options, device))
    _require_enough(records, options)
    config = TrainingConfig(seed=options.seed)
    if base is not None and base.ensemble is not None:
        config = calibration_config(len(records.groups), len(base.ensemble.nets), options.seed)
    try:
        model = build_cost_model(records, config, options.name, start=base, log=say)
    except ValueError as error:
        raise CliError(f"{options.out / RECORDS_FILE}: {error}") from error
    if base is not None:
        model.card["calibrated_from"] = {"name": base.name, "hardware": base.hardware}
    save(model, options.out)
    _say_how_good_it_is(model)
    print(f'use it with NeuroShardPlanner(cost_model="{options.out}") or `plan --cost-model {options.out}`')
    return 0


def _nearest(records: MachineRecords, device: torch.device, options: argparse.Namespace) -> CostModel | None:
    """The shipped model that fits some records best; None where none of such a device is shipped."""
    if not records.groups:
        _require_enough(records, options)
    try:
        return nearest_model(records.groups, device.type)
    except CostModelError:
        return None


def _require_this_machine(records: MachineRecords, device: torch.device) -> None:
    here = hardware_fingerprint(device.type)["name"]
    others = sorted({str(record["hardware"]["name"]) for record in records.everything} - {here})
    if others:
        raise CliError(f"--records: taken on {', '.join(others)}, but this machine is {here}")


def _say_how_good_it_is(model: CostModel) -> None:
    accuracy = model.card["accuracy"]
    after = accuracy["groups_held_out_tables"]
    before = accuracy.get("groups_held_out_tables_before_tuning")
    gain = f"; {100 * before['total']['median_ape']:.1f} % with only the prior refitted" if before is not None else ""
    print(f"median error on {after['records']} held-out groups: {100 * after['total']['median_ape']:.1f} %{gain}")
    if before is not None and after["total"]["median_ape"] > before["total"]["median_ape"]:
        say("tuning made it worse by these groups; measure for longer before you use it")
    if after["records"] < _FEW_TO_JUDGE_BY:
        say("so few held-out groups tell little; run again with a longer --minutes, which keeps what was measured")


def _require_enough(records: MachineRecords, options: argparse.Namespace) -> None:
    """Says what to do about too few records.

    Raises:
        CliError: training, validation or held-out groups would be missing.
    """
    try:
        split_groups(group_data(undisturbed(records.groups)))
    except ValueError as error:
        raise CliError(
            f"{options.out / RECORDS_FILE}: {len(records.groups)} records after {options.minutes:g} minutes are too "
            f"few; run the same again with a longer --minutes, which keeps them, or give more with --records ({error})"
        ) from error


def _measure(options: argparse.Namespace, device: torch.device, groups: Iterator[Sampled]) -> MachineRecords:
    """Measures until the budget is used up, that of earlier runs included; returns all that the store holds."""
    path = options.out / RECORDS_FILE
    minutes = options.minutes * (1.0 - _COLLECTIVES_SHARE if _ranks(options, device) > 1 else 1.0)
    try:
        with MeasurementStore(path) as store, tqdm(unit=" records") as bar:
            known = list(store)
            if not any(record.get("kind") == "bandwidth" for record in known):
                collect_bandwidths(store, device, _COPY_MEBIBYTES[device.type])
            spent = sum(float(record.get("seconds", 0.0)) for record in known) / 60
            progress = lambda written: bar.update(written - bar.n)  # noqa: E731
            collect_groups(groups, store, device, minutes - spent, progress=progress)
    except OSError as error:
        raise CliError(f"{path}: cannot be written ({error.strerror})") from error
    except RecordError as error:
        raise CliError(str(error)) from error
    except RuntimeError as error:
        raise CliError(f"group after group failed on {device}, the last with: {error}") from error
    return load([path], "--out")


def _measure_collectives(options: argparse.Namespace, device: torch.device) -> MachineRecords:
    """Measures collectives over the ranks of this host, where there is more than one, likewise within its budget."""
    ranks, path = _ranks(options, device), options.out / COLLECTIVES_FILE
    if ranks < 2:
        return MachineRecords([])
    known = load([path], "--out").collectives if path.exists() else []
    minutes = _COLLECTIVES_SHARE * options.minutes - sum(float(r.get("seconds", 0.0)) for r in known) / 60
    if minutes > 0:
        if device.type == "cuda":
            cuda.free_memory_bytes()  # the ranks need what this process measured with
        command = [sys.executable, "-m", "torchrec_neuroshard.measure.collectives", "--out", str(path)]
        command += ["--minutes", f"{minutes:.4f}", "--seed", str(options.seed)]
        command += ["--device", device.type, "--world-size", str(ranks)]
        if subprocess.run(command).returncode:
            raise CliError(f"collectives of {ranks} ranks could not be measured; leave them out with --world-size 1")
    return load([path], "--out")


def _ranks(options: argparse.Namespace, device: torch.device) -> int:
    """Ranks whose collectives are measured: those asked for, else one per GPU, and none on a CPU."""
    return int(options.world_size or (cuda.device_count() if device.type == "cuda" else 1))
