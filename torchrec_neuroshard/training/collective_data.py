"""Measured collectives as training data."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.collective_traffic import COLLECTIVES, Calls, Traffic, waits
from torchrec_neuroshard.measure.specs import CollectiveSpec
from torchrec_neuroshard.training.dataset import records_of_kind

HELD_OUT_RANKS = frozenset({5, 8})
_LEAST_RANK_COUNTS = 3  # other numbers of ranks, from which a model can tell how costs grow with ranks
_TEST_SHARE = 0.15
_LEAST_TRANSFER_MS = 0.1

Record = dict[str, Any]


@dataclass(frozen=True)
class CollectiveData:
    """Collectives over equally many ranks and hosts, of any kinds.

    Attributes:
        kind: [calls] index in :data:`COLLECTIVES`.
        batch_size: [calls] samples per rank; 1 for an all-reduce.
        dims: [calls, ranks] columns each rank owns in an all-to-all; of the others what their spec's only entry says.
        backward: [calls] direction of an all-to-all.
        delays_ms: [calls, ranks] start delays.
        measured_ms: [calls, ranks] median time from own start to own end.
        link_gbps: [calls] Gbit/s of each host's link; nan when unknown or on one host.
        local_world_size: ranks per host.
        backend: "gloo" or "nccl".
        cores: fewest cores that all ranks of a call shared, as its record tells; 0 when none does.
        positions: [calls] places of the records in the sequence that the data were made of.
    """

    kind: NDArray[np.int64]
    batch_size: NDArray[np.float64]
    dims: NDArray[np.float64]
    backward: NDArray[np.bool_]
    delays_ms: NDArray[np.float64]
    measured_ms: NDArray[np.float64]
    link_gbps: NDArray[np.float64]
    local_world_size: int
    backend: str
    cores: int
    positions: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.batch_size)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.dims.shape[1]

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.ranks // self.local_world_size

    @cached_property
    def calls(self) -> Calls:
        """What a model is asked for."""
        traffic = Traffic.of(self.kind, self.batch_size, self.dims, self.backward, self.local_world_size, self.backend)
        link_ms_per_byte = 8e-6 / self.link_gbps * self.local_world_size
        return Calls(self.kind, self.backward, traffic, waits(self.delays_ms), link_ms_per_byte)

    @property
    def transfer_ms(self) -> NDArray[np.float64]:
        """[calls, ranks] measured time without the wait, at least a tenth of a millisecond."""
        return np.maximum(self.measured_ms - self.calls.wait_ms, _LEAST_TRANSFER_MS)

    @property
    def kind_names(self) -> list[str]:
        """[calls] collective, and direction of an all-to-all."""
        return [
            f"{COLLECTIVES[kind]} {'backward' if backward else 'forward'}" if kind == 0 else COLLECTIVES[kind]
            for kind, backward in zip(self.kind.tolist(), self.backward.tolist())
        ]


def load_collectives(paths: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """All collective records of some measurement files; of several of one call, the last."""
    return records_of_kind("collective", paths)


def collective_data(records: Iterable[Record]) -> list[CollectiveData]:
    """Arrays of records, by number of ranks, then by ranks per host, falling, then by backend."""
    groups: dict[tuple[int, int, str], list[tuple[int, CollectiveSpec, Record]]] = {}
    for position, record in enumerate(records):
        spec = CollectiveSpec.from_json(record["spec"])
        layout = (spec.world_size, -spec.ranks_per_host, _backend(record))
        groups.setdefault(layout, []).append((position, spec, record))
    result = []
    for (ranks, per_host, backend), calls in sorted(groups.items()):
        specs = [spec for _, spec, _ in calls]
        cores = [int(record["pinned_cores"]) for _, _, record in calls if record.get("pinned_cores")]
        result.append(
            CollectiveData(
                np.asarray([COLLECTIVES.index(s.name) for s in specs]),
                np.asarray([float(s.batch_size_per_rank) for s in specs]),
                np.asarray([s.dims if len(s.dims) == ranks else s.dims * ranks for s in specs], dtype=np.float64),
                np.asarray([s.direction == "backward" for s in specs]),
                np.asarray([s.start_delays_ms or (0.0,) * ranks for s in specs]),
                np.asarray([[timing["median"] for timing in record["rank_ms"]] for _, _, record in calls]),
                np.asarray([s.link_gbps if s.link_gbps is not None else np.nan for s in specs]),
                -per_host,
                backend,
                min(cores, default=0),
                np.asarray([position for position, _, _ in calls]),
            )
        )
    return result


def _backend(record: Record) -> str:
    """The backend that a record names, or what its device says."""
    return str(record.get("backend") or ("nccl" if record.get("device") == "cuda" else "gloo"))


def held_out_ranks(records: Iterable[Record]) -> frozenset[int]:
    """Numbers of ranks that only evaluation sees: :data:`HELD_OUT_RANKS`, where others suffice to learn from."""
    found = {int(record["spec"]["world_size"]) for record in records}
    return HELD_OUT_RANKS & found if len(found - HELD_OUT_RANKS) >= _LEAST_RANK_COUNTS else frozenset()


def is_test_collective(record: Record, ranks_held_out: Collection[int] = ()) -> bool:
    """Whether only evaluation sees this record: 15 %, decided by its id, and all of some numbers of ranks."""
    if record["spec"]["world_size"] in ranks_held_out:
        return True
    return int(hashlib.sha256(record["id"].encode()).hexdigest()[:8], 16) / 2**32 < _TEST_SHARE


@dataclass(frozen=True)
class CollectiveSplit:
    """What a model learns from, and what it is tested on.

    Attributes:
        train: records to learn from.
        same_ranks: unseen calls over numbers of ranks that training sees.
        unseen_ranks: calls over numbers of ranks that training does not see; empty when none are held out.
        ranks_held_out: those numbers.
    """

    train: list[Record]
    same_ranks: list[Record]
    unseen_ranks: list[Record]
    ranks_held_out: frozenset[int]


def split_collectives(records: Iterable[Record]) -> CollectiveSplit:
    """Splits records by number of ranks and by id, the same way each time."""
    records = list(records)
    held_out = held_out_ranks(records)
    rest = [record for record in records if record["spec"]["world_size"] not in held_out]
    return CollectiveSplit(
        [record for record in rest if not is_test_collective(record)],
        [record for record in rest if is_test_collective(record)],
        [record for record in records if record["spec"]["world_size"] in held_out],
        held_out,
    )


def collective_counts(records: Iterable[Record]) -> dict[str, dict[str, int]]:
    """How many records there are by kind, by ranks and by hosts x ranks per host, for a model's card."""
    specs = [CollectiveSpec.from_json(record["spec"]) for record in records]
    return {
        "by_kind": dict(sorted(Counter(spec.name for spec in specs).items())),
        "by_ranks": dict(Counter(f"{n}_ranks" for n in sorted(spec.world_size for spec in specs))),
        "by_layout": dict(sorted(Counter(layout_name(s.hosts, s.ranks_per_host) for s in specs).items())),
    }


def layout_name(hosts: int, ranks_per_host: int) -> str:
    """Hosts x ranks of each, such as "2x4"."""
    return f"{hosts}x{ranks_per_host}"


def oversubscription(records: Iterable[Record]) -> dict[str, float]:
    """How far ranks outnumbered the cores they ran on.

    Hosts that one machine emulates share its cores, and records do not tell them from others, so the ranks of all
    hosts are counted together.

    Returns:
        "records" whose ranks outnumbered their cores, "of" records that name cores, "most_ranks_per_core".
    """
    pairs = [(r["spec"]["world_size"], r["pinned_cores"]) for r in records if r.get("pinned_cores")]
    ratios = [ranks / cores for ranks, cores in pairs]
    return {
        "records": sum(ratio > 1 for ratio in ratios),
        "of": len(ratios),
        "most_ranks_per_core": round(max(ratios, default=0.0), 2),
    }
