"""Measured groups as training data."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any, Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardFeatures, ShardWork, segment_sums, shard_features
from torchrec_neuroshard.measure.pool import is_held_out
from torchrec_neuroshard.measure.probe import DISTURBED
from torchrec_neuroshard.measure.reference import reference_of
from torchrec_neuroshard.measure.specs import DATA_TYPES, GroupSpec
from torchrec_neuroshard.measure.store import RecordError, read_records
from torchrec_neuroshard.training.record_checks import check_record

_VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class GroupData:
    """Fused groups and what they cost.

    Attributes:
        shards: features of all shards, group after group.
        group: [shards] index of the group that each shard belongs to, rising.
        measured_ms: [groups, 2] median forward and backward.
        total_ms: [groups] median of forward plus backward.
        noise: [groups] (p90 - p10) / median of the total, within the record.
        ids: [groups] record ids.
        batch_size: [groups] batch of the TBE.
        lookups: [groups] mean number of ids in a batch.
        machine: [groups] name of the machine.
        session: [groups] machine and process that measured, rising from 0.
        unix_time: [groups] when, in seconds.
        held_out: [groups] whether a group holds a held-out base table.
        by_chance: [groups] whether a group was drawn by chance, not chosen by a model or built by a planner.
        reference_ms: [groups, reference times] ms of fixed lookups beside each record; NaN where it has none.
    """

    shards: ShardFeatures
    group: NDArray[np.int64]
    measured_ms: NDArray[np.float64]
    total_ms: NDArray[np.float64]
    noise: NDArray[np.float64]
    ids: tuple[str, ...]
    batch_size: NDArray[np.int64]
    lookups: NDArray[np.float64]
    machine: tuple[str, ...]
    session: NDArray[np.int64]
    unix_time: NDArray[np.float64]
    held_out: NDArray[np.bool_]
    by_chance: NDArray[np.bool_]
    reference_ms: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def work(self) -> NDArray[np.float64]:
        """[groups, work terms] total work of each group."""
        return segment_sums(self.shards.work, self.group, len(self))

    @property
    def regime(self) -> NDArray[np.int64]:
        """[groups] code path of each group."""
        return self.shards.regime[np.searchsorted(self.group, np.arange(len(self)))]

    def subset(self, keep: NDArray[np.bool_]) -> GroupData:
        """The groups where ``keep`` ([groups]) is true."""
        chosen = np.flatnonzero(keep)
        of_shard = keep[self.group]
        return GroupData(
            ShardFeatures(self.shards.work[of_shard], self.shards.features[of_shard], self.shards.regime[of_shard]),
            (np.cumsum(keep) - 1)[self.group[of_shard]],
            self.measured_ms[keep],
            self.total_ms[keep],
            self.noise[keep],
            tuple(self.ids[index] for index in chosen),
            self.batch_size[keep],
            self.lookups[keep],
            tuple(self.machine[index] for index in chosen),
            self.session[keep],
            self.unix_time[keep],
            self.held_out[keep],
            self.by_chance[keep],
            self.reference_ms[keep],
        )


@dataclass(frozen=True)
class GroupSplit:
    """Training and validation groups share base tables; test groups hold only base tables unseen in both."""

    train: GroupData
    validation: GroupData
    test: GroupData


def spec_features(spec: GroupSpec) -> ShardFeatures:
    """Features of the shards of a measured group, as if its rows lay in the device's memory."""
    return shard_features(spec_works(spec))


def spec_works(spec: GroupSpec) -> list[ShardWork]:
    """What the TBE of a measured group does for each shard."""
    return [
        ShardWork(
            rows=shard.rows,
            dim=shard.dim,
            pooling_factor=shard.pooling_factor,
            num_features=shard.num_features,
            batch_size=spec.batch_size,
            element_bytes=DATA_TYPES[spec.data_type],
            weighted=spec.weighted,
            optimizer=spec.optimizer,
            access=shard.distribution(),
            kernel=spec.kernel,
            pooling=spec.pooling,
        )
        for shard in spec.shards
    ]


def group_data(records: Iterable[dict[str, Any]]) -> GroupData:
    """Builds the arrays from group records."""
    records = list(records)
    parts, membership, held_out = [], [], []
    sessions: dict[tuple[str, int], int] = {}
    for index, record in enumerate(records):
        spec = GroupSpec.from_json(record["spec"])
        features = spec_features(spec)
        held_out.append(is_held_out(spec))
        sessions.setdefault(_session(record), len(sessions))
        parts.append(features)
        membership.append(np.full(len(features.work), index, dtype=np.int64))
    if not parts:
        raise ValueError("no group records: collect some first (torchrec-neuroshard measure compute)")
    totals = [record["total_ms"] for record in records]
    return GroupData(
        ShardFeatures.concatenate(parts),
        np.concatenate(membership),
        np.asarray([[r["forward_ms"]["median"], r["backward_ms"]["median"]] for r in records]),
        np.asarray([t["median"] for t in totals]),
        np.asarray([(t["p90"] - t["p10"]) / t["median"] for t in totals]),
        tuple(record["id"] for record in records),
        np.asarray([record["spec"]["batch_size"] for record in records]),
        np.asarray([record["lookups"] for record in records]),
        tuple(str(record["hardware"]["name"]) for record in records),
        np.asarray([sessions[_session(record)] for record in records]),
        np.asarray([float(record.get("unix_time", 0.0)) for record in records]),
        np.asarray(held_out),
        np.asarray([sampling_of(record) == "random" for record in records]),
        np.stack([reference_of(record) for record in records]),
    )


def sampling_of(record: dict[str, Any]) -> str:
    """How a group was chosen: "random", "active" or "plan". Older records do not say; groups of plans have no base."""
    of_pool = any(shard.get("base") for shard in record["spec"]["shards"])
    return str(record.get("sampling", "random" if of_pool else "plan"))


def _session(record: dict[str, Any]) -> tuple[str, int]:
    return record["hardware"]["name"], record.get("pid", 0)


def load_groups(paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """Group records of some measurement files whose rows lie in the device's memory; of several of one group, the last.

    What nets are trained on: rows in the host's memory have a model of their own (:mod:`.host_link`).
    """
    return [record for record in records_of_kind("group", paths) if not in_host_memory(record)]


def in_host_memory(record: dict[str, Any]) -> bool:
    """Whether a group record's rows lie in the host's memory, with or without a cache on the device."""
    return bool(record["spec"].get("location", "device") != "device")


def records_of_kind(kind: str, paths: Iterable[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """All records of a kind; of several of one spec on one machine, the last.

    Raises:
        RecordError: a file is damaged, or a record cannot be used.
    """
    records: dict[tuple[str, str], dict[str, Any]] = {}
    for path in paths:
        for number, record in enumerate(read_records(path), start=1):
            missing = [name for name in ("kind", "id", "spec", "hardware") if name not in record]
            if missing:
                raise RecordError(f"{path}, record {number}: field {missing[0]!r} is missing; collect again")
            if record["kind"] == kind:
                check_record(path, record)
                records[record["hardware"]["name"], record["id"]] = record
    return list(records.values())


def undisturbed(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records taken while the machine was not disturbed (records without a probe pass)."""
    return [record for record in records if record.get("disturbance", 1.0) <= DISTURBED]


def split_groups(data: GroupData) -> GroupSplit:
    """Splits groups by base table (test) and by record id (validation), the same way each time.

    Raises:
        ValueError: a part would hold no record.
    """
    validating = ~data.held_out & np.asarray([_share_of_id(identity) < _VALIDATION_SHARE for identity in data.ids])
    parts = {"training": ~data.held_out & ~validating, "validation": validating, "held-out": data.held_out}
    if not all(part.any() for part in parts.values()):
        found = ", ".join(f"{part.sum()} {name}" for name, part in parts.items())
        raise ValueError(
            f"training needs at least one group record in each part, found {found}; a hundred sampled records "
            "suffice for that, thousands for a good model (torchrec-neuroshard measure compute)"
        )
    return GroupSplit(*(data.subset(part) for part in parts.values()))


def _share_of_id(identity: str) -> float:
    """A number in [0, 1) that depends on the id alone."""
    return int(hashlib.sha256(identity.encode()).hexdigest()[:8], 16) / 2**32
