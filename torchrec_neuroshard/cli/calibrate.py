"""``calibrate``: measures this machine for some minutes and fits a shipped cost model to it."""

from __future__ import annotations

import argparse
import itertools
from typing import Any, Iterator

import torch
from tqdm import tqdm

from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.cli.measure import device_of, model_with_ensemble
from torchrec_neuroshard.cli.pretrain import load, prepare_folder, save, say
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.measure.collect import Sampled, collect_groups, sampled_groups
from torchrec_neuroshard.measure.hardware import hardware_fingerprint
from torchrec_neuroshard.measure.store import MeasurementStore, RecordError
from torchrec_neuroshard.training.active import active_groups
from torchrec_neuroshard.training.build import build_cost_model
from torchrec_neuroshard.training.calibrate import calibration_config, nearest_model
from torchrec_neuroshard.training.dataset import group_data, split_groups, undisturbed

RECORDS_FILE = "records.jsonl"
_FEW_TO_JUDGE_BY = 30  # held-out groups
_FIRST_RECORDS = 30  # by which the base model is chosen


def run(options: argparse.Namespace) -> int:
    """Measures, fine-tunes, evaluates on held-out base tables, and writes the model; returns 0."""
    torch.set_num_threads(1)
    device = torch.device(device_of(options))
    prepare_folder(options.out)
    given, collectives = load(options.records, "--records")
    _require_this_machine([*given, *collectives], device)
    base = model_with_ensemble(options.base, "--base") if options.base is not None else None
    if base is None:
        first = _measure(options, device, itertools.islice(sampled_groups(options.seed), _FIRST_RECORDS))
        if not first and not given:
            _require_enough([], options)
        try:
            base = nearest_model([*given, *first], device.type)
        except CostModelError as error:
            raise CliError(str(error)) from error
    say(f"starting from cost model {base.name} ({base.hardware})")
    assert base.ensemble is not None
    measured = _measure(options, device, active_groups(base.ensemble, options.seed))
    groups = [*given, *measured]
    _require_enough(groups, options)
    config = calibration_config(len(groups), len(base.ensemble.nets), options.seed)
    try:
        model = build_cost_model(groups, collectives, config, options.name, start=base, log=say)
    except ValueError as error:
        raise CliError(f"{options.out / RECORDS_FILE}: {error}") from error
    model.card["calibrated_from"] = {"name": base.name, "hardware": base.hardware}
    save(model, options.out)
    _say_what_it_gained(model)
    print(f'use it with NeuroShardPlanner(cost_model="{options.out}") or `plan --cost-model {options.out}`')
    return 0


def _require_this_machine(records: list[dict[str, Any]], device: torch.device) -> None:
    here = hardware_fingerprint(device.type)["name"]
    others = sorted({str(record["hardware"]["name"]) for record in records} - {here})
    if others:
        raise CliError(f"--records: taken on {', '.join(others)}, but this machine is {here}")


def _say_what_it_gained(model: CostModel) -> None:
    accuracy = model.card["accuracy"]
    before, after = (accuracy[name] for name in ("groups_held_out_tables_before_tuning", "groups_held_out_tables"))
    was, now = (100 * part["total"]["median_ape"] for part in (before, after))
    print(f"median error on {after['records']} held-out groups: {now:.1f} %; {was:.1f} % with only the prior refitted")
    if after["records"] < _FEW_TO_JUDGE_BY:
        say("so few held-out groups tell little; run again with a longer --minutes, which keeps what was measured")


def _require_enough(groups: list[dict[str, Any]], options: argparse.Namespace) -> None:
    """Says what to do about too few records.

    Raises:
        CliError: training, validation or held-out groups would be missing.
    """
    try:
        split_groups(group_data(undisturbed(groups)))
    except ValueError as error:
        raise CliError(
            f"{options.out / RECORDS_FILE}: {len(groups)} records after {options.minutes:g} minutes are too few; run "
            f"the same again with a longer --minutes, which keeps them, or give more with --records ({error})"
        ) from error


def _measure(options: argparse.Namespace, device: torch.device, groups: Iterator[Sampled]) -> list[dict[str, Any]]:
    """Measures until the budget is used up, that of earlier runs included; returns all that the store holds."""
    path = options.out / RECORDS_FILE
    try:
        with MeasurementStore(path) as store, tqdm(unit=" records") as bar:
            spent = sum(float(record.get("seconds", 0.0)) for record in store) / 60
            progress = lambda written: bar.update(written - bar.n)  # noqa: E731
            collect_groups(groups, store, device, options.minutes - spent, progress=progress)
    except OSError as error:
        raise CliError(f"{path}: cannot be written ({error.strerror})") from error
    except RecordError as error:
        raise CliError(str(error)) from error
    return load([path], "--out")[0]
