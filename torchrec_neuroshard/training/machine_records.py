"""What was measured on one machine, sorted by what it serves."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Iterable, Sequence

from torchrec_neuroshard.costs.hardware import HardwareSpec
from torchrec_neuroshard.training.dataset import in_host_memory, records_of_kind

Records = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class MachineRecords:
    """Records of some measurement files; of several of one thing on one machine, the last.

    Attributes:
        groups: fused groups in the device's memory.
        collectives: collectives.
        host_memory: fused groups whose rows lie in the host's memory.
        bandwidths: copies and launches (:mod:`torchrec_neuroshard.measure.bandwidth`).
    """

    groups: Records
    collectives: Records = ()
    host_memory: Records = ()
    bandwidths: Records = ()

    @classmethod
    def load(cls, paths: Iterable[str | os.PathLike[str]]) -> MachineRecords:
        """Reads and checks files.

        Raises:
            RecordError: a file is damaged, or a record cannot be used.
            OSError: a file cannot be read.
        """
        paths = list(paths)
        groups = records_of_kind("group", paths)
        return cls(
            [record for record in groups if not in_host_memory(record)],
            records_of_kind("collective", paths),
            [record for record in groups if in_host_memory(record)],
            records_of_kind("bandwidth", paths),
        )

    @property
    def everything(self) -> list[dict[str, Any]]:
        """All records."""
        return [*self.groups, *self.collectives, *self.host_memory, *self.bandwidths]

    def plus(self, other: MachineRecords) -> MachineRecords:
        """These records and others of the same machine."""
        return MachineRecords(
            [*self.groups, *other.groups],
            [*self.collectives, *other.collectives],
            [*self.host_memory, *other.host_memory],
            [*self.bandwidths, *other.bandwidths],
        )


def bandwidths_json(records: Records, preset: HardwareSpec) -> dict[str, Any]:
    """What a card says of measured bandwidths and launches, beside the figures that the data sheet gives.

    Args:
        records: of kind "bandwidth"; of several of one name, the last counts.
        preset: the device's published figures.
    """
    published = {"copy": preset.memory_gbps, "launch_forward": preset.launch_ms}
    result: dict[str, Any] = {}
    for record in records:
        name, speed = record["name"], record["gb_per_s"]
        unit, value = ("ms", record["ms"]["median"]) if speed is None else ("gb_per_s", speed)
        result[name] = {unit: value}
        if name in published and preset.has_data_sheet:
            result[name][f"data_sheet_{unit}"] = published[name]
    return result
