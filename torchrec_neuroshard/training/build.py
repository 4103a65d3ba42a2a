"""Builds a cost model with its card from measured records."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any, Callable, Sequence

from torchrec_neuroshard.costs.additive import GroupCosts
from torchrec_neuroshard.costs.hardware import HardwareSpec, hardware_spec
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.training.calibrate import as_start
from torchrec_neuroshard.training.collective_part import CollectivePart, limits, train_collective_part
from torchrec_neuroshard.training.dataset import sampling_of, undisturbed
from torchrec_neuroshard.training.host_link import fit_host_link
from torchrec_neuroshard.training.machine_records import MachineRecords, bandwidths_json
from torchrec_neuroshard.training.pretrain import train_groups_of
from torchrec_neuroshard.training.torchrec_coefficients import fit_torchrec_coefficients
from torchrec_neuroshard.training.train_groups import TrainingConfig

_BYTES_PER_MS = 1e6  # of 1 GB/s

# Properties that all shards of a group share.
_KINDS = ("optimizer", "data_type", "weighted", "kernel", "pooling")

Records = Sequence[dict[str, Any]]


def check_trainable(records: MachineRecords) -> None:
    """Checks that a model can be trained on some records.

    Raises:
        ValueError: there are no groups, or records come from several machines.
    """
    machines = Counter(record["hardware"]["name"] for record in records.everything)
    if not records.groups:
        raise ValueError("there are no group records")
    if len(machines) > 1:
        raise ValueError(f"records must come from one kind of machine, found {dict(machines)}")


def build_cost_model(
    records: MachineRecords,
    config: TrainingConfig,
    name: str = "",
    others: Records = (),
    start: CostModel | None = None,
    log: Callable[[str], None] = print,
) -> CostModel:
    """Trains on the records of one machine.

    Args:
        records: of the machine. Groups taken while it was disturbed are left out; with too few collectives, these are
            predicted from data-sheet constants; with enough groups in the host's memory, the host link is fitted.
        config: hyper-parameters of the group nets.
        name: name on the card; the machine's when empty.
        others: group records of other machines, trained on beside them.
        start: measured model that training starts from; its collectives stay where there are too few records of any,
            if it describes the same kind of machine.
        log: called with a line for each step.

    Raises:
        ValueError: there are no groups, they come from several machines, or too few are left for a split.
    """
    check_trainable(records)
    groups, collectives = records.groups, records.collectives
    kept, beside = undisturbed(groups), undisturbed(others)
    trained = train_groups_of(kept, config, beside, as_start(start.ensemble) if start and start.ensemble else None, log)
    described = groups[0]["hardware"]
    machine, device = str(described["name"]), str(groups[0].get("device", "cpu"))
    preset = hardware_spec(str(described.get("gpu", machine)), device)
    collective_part = train_collective_part(collectives, preset, config.seed, log)
    if (
        start is not None
        and start.hardware == machine  # ranks that shared another machine's cores say nothing about this one's
        and collective_part.card.get("collectives_provenance") == "analytic"
    ):
        log(f"too few records of collectives: they stay those of {start.name}, measured on this kind of machine")
        collective_part = CollectivePart(
            start.collectives,
            counts={"collectives": {}},
            card={"collectives_provenance": f"of {start.name}, measured on {start.hardware}"},
        )
    specs = [GroupSpec.from_json(record["spec"]) for record in kept]
    card = {
        "hardware": described,
        "versions": groups[0].get("versions", {}),
        "records": {
            "groups": len(kept),
            "groups_dropped_as_disturbed": len(groups) - len(kept),
            "groups_by_sampling": dict(sorted(Counter(map(sampling_of, kept)).items())),
            "groups_train": len(trained.split.train),
            "groups_validation": len(trained.split.validation),
            "groups_held_out_tables": len(trained.split.test),
            "groups_in_host_memory": len(records.host_memory),
            "groups_of_other_machines": dict(sorted(Counter(r["hardware"]["name"] for r in beside).items())),
            **collective_part.counts,
        },
        **collective_part.card,
        "accuracy": {**trained.accuracy(), **collective_part.accuracy},
        "machine_drift": trained.drift_json(),
        "reference_speed": trained.speed.to_json() if trained.speed is not None else None,
        **_constants(records, kept, trained.mean, preset),
        "training": asdict(config),
        "measured_kinds": {kind: dict(Counter(str(getattr(spec, kind)) for spec in specs)) for kind in _KINDS},
        "limits": limits(collectives),
    }
    return CostModel(
        name or machine,
        "measured",
        machine,
        trained.mean,
        collective_part.model,
        card,
        trained.ensemble,
        trained.uncertainty,
    )


def _constants(records: MachineRecords, kept: Records, groups: GroupCosts, preset: HardwareSpec) -> dict[str, Any]:
    """Constants of the hardware that records tell, for a card; those are left out that too few records would tell."""
    link = fit_host_link(undisturbed(records.host_memory), groups, preset)
    constants = {
        "torchrec_coefficients": fit_torchrec_coefficients(kept, preset.memory_gbps * _BYTES_PER_MS),
        "host_link": link.to_json() if link is not None else None,
        "bandwidths": bandwidths_json(records.bandwidths, preset),
    }
    return {name: value for name, value in constants.items() if value}
