"""What is measured: the description of one fused group or one collective, without any result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Mapping

from torchrec_neuroshard.access import AccessDistribution

OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad", "adam")
DATA_TYPES = {"fp32": 4, "fp16": 2}  # name -> bytes per element
KERNELS = ("fused", "dense")  # TBE with the optimizer fused in; TBE with a dense gradient, then an optimizer step
POOLINGS = ("sum", "none")  # bags summed to one row; every row looked up returned (sequence embeddings)
COLLECTIVES = ("all_to_all",)

_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": OPTIMIZERS,
    "data_type": tuple(DATA_TYPES),
    "kernel": KERNELS,
    "pooling": POOLINGS,
}


@dataclass(frozen=True)
class ShardSpec:
    """One table shard inside a fused group.

    Attributes:
        rows: rows of the shard.
        dim: columns of the shard, a multiple of 4.
        pooling_factor: mean ids per sample, summed over the shard's features.
        num_features: features that look the shard up; each has one bag per sample.
        zipf: exponent of the access distribution; None for ``access``.
        access: (counts, masses) of a measured distribution; None for ``zipf``.
        base: id of the base table that the shard was augmented from, by which training and held-out
            records are kept apart.
    """

    rows: int
    dim: int
    pooling_factor: float
    num_features: int = 1
    zipf: float | None = None
    access: tuple[tuple[float, ...], tuple[float, ...]] | None = None
    base: str = ""

    def distribution(self) -> AccessDistribution:
        """The access distribution: measured, else Zipf, else the population default."""
        if self.access is not None:
            import numpy as np

            return AccessDistribution(np.asarray(self.access[0]), np.asarray(self.access[1]))
        if self.zipf is not None:
            return AccessDistribution.zipf(self.rows, self.zipf)
        return AccessDistribution.population(self.rows)


@dataclass(frozen=True)
class GroupSpec:
    """One fused group: the shards that one TBE call serves, and the batch it sees.

    Attributes:
        batch_size: samples of the TBE's batch (global batch for table-wise and column-wise shards).
        shards: the shards, in feature order.
        optimizer: one of :data:`OPTIMIZERS`, fused into the backward pass.
        data_type: weight type, a key of :data:`DATA_TYPES`.
        weighted: lookups carry per-sample weights.
        fixed_length: bags have (nearly) equal length instead of Poisson lengths.
        seed: seeds the synthetic batches.
        kernel: one of :data:`KERNELS`; "dense" is what data_parallel tables run, on the batch of one rank.
        pooling: one of :data:`POOLINGS`.
    """

    batch_size: int
    shards: tuple[ShardSpec, ...]
    optimizer: str = "sgd"
    data_type: str = "fp32"
    weighted: bool = False
    fixed_length: bool = False
    seed: int = 0
    kernel: str = "fused"
    pooling: str = "sum"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.pooling == "none" and (len({shard.dim for shard in self.shards}) > 1 or self.kernel == "dense"):
            raise ValueError("FBGEMM returns unpooled rows only from its fused TBE, and only for tables of one dim")
        for shard in self.shards:
            if shard.rows < 1 or shard.dim < 4 or shard.dim % 4 or shard.pooling_factor < 0 or shard.num_features < 1:
                raise ValueError(f"FBGEMM cannot run this shard (dims are multiples of 4): {shard}")

    @property
    def lookups(self) -> float:
        """Expected number of ids in one batch."""
        return self.batch_size * sum(shard.pooling_factor for shard in self.shards)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, without optimizer state."""
        return sum(shard.rows * shard.dim for shard in self.shards) * DATA_TYPES[self.data_type]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        record = asdict(self)
        for name in ("kernel", "pooling"):  # left out at its default, so that ids of older records stand
            if record[name] == _CHOICES[name][0]:
                del record[name]
        record["shards"] = [
            {k: v for k, v in asdict(shard).items() if v is not None and not (k == "num_features" and v == 1)}
            for shard in self.shards
        ]
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> GroupSpec:
        """Reads what :meth:`to_json` wrote."""
        fields = dict(record)
        shards = []
        for shard in fields.pop("shards"):
            access = shard.get("access")
            shards.append(ShardSpec(**{**shard, "access": (tuple(access[0]), tuple(access[1])) if access else None}))
        return cls(shards=tuple(shards), **fields)


@dataclass(frozen=True)
class CollectiveSpec:
    """One collective call over all ranks of a group.

    Attributes:
        name: one of :data:`COLLECTIVES`.
        world_size: number of ranks.
        batch_size_per_rank: samples per rank.
        dims: [ranks] columns of the pooled embeddings that each rank owns (its "dim sum"). In the forward
            all-to-all rank r sends batch_size_per_rank x dims[r] floats to every rank.
        direction: "forward" (scatter batches, gather columns) or "backward" (the reverse).
        start_delays_ms: [ranks] how late each rank enters the call.
        seed: seeds the sampler that made the spec.
    """

    name: str
    world_size: int
    batch_size_per_rank: int
    dims: tuple[int, ...]
    direction: str = "forward"
    start_delays_ms: tuple[float, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise ValueError(f"collective must be one of {COLLECTIVES}, got {self.name!r}")
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"direction must be forward or backward, got {self.direction!r}")
        if len(self.dims) != self.world_size:
            raise ValueError(f"dims needs one entry per rank ({self.world_size}), got {len(self.dims)}")
        if self.start_delays_ms and len(self.start_delays_ms) != self.world_size:
            raise ValueError(f"start_delays_ms needs one entry per rank ({self.world_size}) or none")

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {**asdict(self), "dims": list(self.dims), "start_delays_ms": list(self.start_delays_ms)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> CollectiveSpec:
        """Reads what :meth:`to_json` wrote."""
        return cls(
            **{**record, "dims": tuple(record["dims"]), "start_delays_ms": tuple(record.get("start_delays_ms", ()))}
        )


def spec_id(spec: GroupSpec | CollectiveSpec) -> str:
    """A stable id of what is measured (independent of process and hash seed)."""
    text = json.dumps(spec.to_json(), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
