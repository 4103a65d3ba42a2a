"""Pre-trains a cost model on measurement files: ``python -m torchrec_neuroshard.training --help``."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import RecordError
from torchrec_neuroshard.training.dataset import load_groups, split_groups, undisturbed
from torchrec_neuroshard.training.evaluate import collective_accuracy, group_accuracy
from torchrec_neuroshard.training.train_collectives import (
    MINIMUM_COLLECTIVES,
    collective_data,
    is_test_collective,
    load_collectives,
    train_collective_model,
)
from torchrec_neuroshard.training.train_groups import TrainingConfig, train_group_model

# Properties that all shards of a group share.
_KINDS = ("optimizer", "data_type", "weighted", "kernel", "pooling")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m torchrec_neuroshard.training", description=__doc__)
    parser.add_argument("--records", nargs="+", required=True, metavar="FILE", help="measurement files")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for weights.safetensors and card.json")
    parser.add_argument("--name", default="", help="name on the card (default: the measured hardware)")
    parser.add_argument("--nets", type=_positive, default=TrainingConfig.nets, help="networks averaged")
    parser.add_argument("--epochs", type=_positive, default=TrainingConfig.epochs, help="passes over the records")
    parser.add_argument("--seed", type=_seed, default=0)
    return parser.parse_args(arguments)


def _is_of_a_plan(record: dict[str, Any]) -> bool:
    """Whether a group was built by a planner rather than sampled from the pool of base tables."""
    return not any(shard.get("base") for shard in record["spec"]["shards"])


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text}")
    return int(text)


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Trains, evaluates on held-out base tables, and writes the model with its card."""
    options = parse_arguments(arguments)
    torch.set_num_threads(1)
    if Path(options.out).is_file():
        print(f"error: --out {options.out} is a file; give a folder", file=sys.stderr)
        return 2
    try:
        groups, collectives = load_groups(options.records), load_collectives(options.records)
    except (RecordError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not groups:
        print(f"error: {', '.join(options.records)}: there are no group records", file=sys.stderr)
        return 2
    hardware = Counter(record["hardware"]["name"] for record in [*groups, *collectives])
    if len(hardware) > 1:
        print(f"error: records must come from one kind of machine, found {dict(hardware)}", file=sys.stderr)
        return 2
    kept = undisturbed(groups)
    try:
        split = split_groups(kept)
    except ValueError as error:
        print(f"error: {', '.join(options.records)}: {error}", file=sys.stderr)
        return 2
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)  # before minutes of training, not after
    except OSError as error:
        print(f"error: --out {options.out}: not a folder that can be written ({error.strerror})", file=sys.stderr)
        return 2
    config = TrainingConfig(nets=options.nets, epochs=options.epochs, seed=options.seed)
    group_model = train_group_model(split, config)
    accuracy: dict[str, Any] = {
        "groups_held_out_tables": group_accuracy(group_model, split.test),
        "groups_held_out_tables_prior_alone": group_accuracy(GroupCostModel(group_model.prior), split.test),
        "groups_validation": group_accuracy(group_model, split.validation),
    }
    training = [record for record in collectives if not is_test_collective(record)]
    if 0 < len(training) < MINIMUM_COLLECTIVES:
        print(f"{len(training)} collective records are too few (at least {MINIMUM_COLLECTIVES}): not used")
        training = []
    if training:
        collective_model = train_collective_model(collective_data(training), seed=options.seed)
        testing = collective_data(record for record in collectives if is_test_collective(record))
        accuracy["collectives_held_out"] = collective_accuracy(collective_model, testing)
    else:
        preset = HARDWARE["generic_cpu" if groups[0]["device"] == "cpu" else "generic_gpu"]
        collective_model = CostModel.analytic("generic_cpu").collectives
        collective_model.prior = preset.collective_prior()
    specs = [GroupSpec.from_json(record["spec"]) for record in kept]
    card = {
        "hardware": groups[0]["hardware"],
        "versions": groups[0]["versions"],
        "records": {
            "groups": len(kept),
            "groups_dropped_as_disturbed": len(groups) - len(kept),
            "groups_taken_without_a_disturbance_probe": sum("disturbance" not in record for record in kept),
            "groups_of_plans": sum(_is_of_a_plan(record) for record in kept),
            "groups_train": len(split.train),
            "groups_validation": len(split.validation),
            "groups_held_out_tables": len(split.test),
            "collectives": dict(Counter(f"{r['spec']['world_size']}_ranks" for r in collectives)),
        },
        "collectives_provenance": "measured" if training else "analytic",
        "accuracy": accuracy,
        "training": vars(config),
        "measured_kinds": {name: dict(Counter(str(getattr(spec, name)) for spec in specs)) for name in _KINDS},
        "limits": "One thread and one core per rank; ranks of the collective records shared this machine's cores.",
    }
    name = options.name or groups[0]["hardware"]["name"]
    CostModel(name, "measured", groups[0]["hardware"]["name"], group_model, collective_model, card).save(options.out)
    print(f"wrote {options.out}")
    for part, figures in accuracy.items():
        print(part, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
