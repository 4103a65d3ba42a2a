"""The collective part of a cost model: split, trained and tested, with what its card says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.collective_prior import CollectivePriors
from torchrec_neuroshard.costs.hardware import HardwareSpec
from torchrec_neuroshard.training.collective_data import (
    Record,
    collective_counts,
    collective_data,
    oversubscription,
    split_collectives,
)
from torchrec_neuroshard.training.evaluate import collective_accuracy
from torchrec_neuroshard.training.train_collectives import (
    MINIMUM_COLLECTIVES,
    CollectiveConfig,
    train_collective_model,
)


@dataclass(frozen=True)
class CollectivePart:
    """A model of collectives, and what a card says of it.

    Attributes:
        model: the model.
        accuracy: held-out errors by name; empty without records.
        counts: numbers of records, for the card's "records".
        card: entries of the card itself.
    """

    model: CollectiveModel
    accuracy: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, Any] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=dict)


def train_collective_part(
    records: Sequence[Record], preset: HardwareSpec, seed: int = 0, log: Callable[[str], None] = print
) -> CollectivePart:
    """Trains on collective records; without enough of them, takes the data sheet's constants.

    Args:
        records: all collective records, those to be tested on among them.
        preset: published figures of the hardware.
        seed: seeds the training.
        log: told how it goes.
    """
    split = split_collectives(records)
    if len(split.train) < MINIMUM_COLLECTIVES:
        if split.train:
            log(f"{len(split.train)} collective records are too few (at least {MINIMUM_COLLECTIVES}): not used")
        analytic = CollectiveModel(CollectivePriors.uniform(preset.collective_prior(), preset.device))
        return CollectivePart(
            analytic,
            counts={"collectives": {}},
            card={"collectives_provenance": "analytic", "collectives_source": preset.links},
        )
    config = CollectiveConfig(seed=seed)
    model = train_collective_model(collective_data(split.train), config, log)
    prior = CollectiveModel(model.prior)
    tests = {"same_ranks": collective_data(split.same_ranks), "unseen_ranks": collective_data(split.unseen_ranks)}
    accuracy: dict[str, Any] = {}
    for name, data in tests.items():
        if data:
            alone = collective_accuracy(prior, data)
            accuracy[f"collectives_{name}"] = collective_accuracy(model, data)
            accuracy[f"collectives_{name}_prior_alone"] = {k: alone[k] for k in ("records", "per_rank", "slowest")}
    counts = collective_counts(records)
    return CollectivePart(
        model,
        accuracy,
        {
            "collectives": counts["by_ranks"],
            "collectives_by_kind": counts["by_kind"],
            "collectives_by_layout": counts["by_layout"],
            "collectives_train": len(split.train),
        },
        {
            "collectives_provenance": "measured",
            "collective_ranks_held_out": sorted(split.ranks_held_out),
            "collectives_oversubscribed": oversubscription(records),
            "collectives_training": vars(config),
        },
    )


def limits(records: Sequence[Record]) -> str:
    """What a card says of the cores that ranks ran on."""
    outnumbered = oversubscription(records)
    if not outnumbered["records"]:
        return "One thread and one core per rank."
    return (
        "One thread and one core per rank in the group records; in "
        f"{outnumbered['records']:.0f} of {outnumbered['of']:.0f} collective records ranks outnumbered the machine's "
        f"cores (up to {outnumbered['most_ranks_per_core']:g} ranks a core): oversubscribed, so slower than ranks with "
        "a core each."
    )
