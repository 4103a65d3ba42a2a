"""What is measured: the description of one fused group or one collective, without any result."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Mapping

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import KERNELS, OPTIMIZERS, POOLINGS
from torchrec_neuroshard.problem import DATA_TYPE_BYTES, UVM, UVM_CACHING

DATA_TYPES = DATA_TYPE_BYTES
COLLECTIVES = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")

# Where a fused TBE's rows lie, in FBGEMM's terms: in the device's memory, in the host's (what TorchRec calls the kernel
# fused_uvm), or in the host's behind a cache on the device (fused_uvm_caching). The host's own rows are "device" to it.
LOCATIONS = ("device", "managed", "managed_caching")
_LOAD_FACTOR = 0.2  # TorchRec's default

_CHOICES: dict[str, tuple[str, ...]] = {
    "optimizer": OPTIMIZERS,
    "data_type": tuple(DATA_TYPES),
    "kernel": KERNELS,
    "pooling": POOLINGS,
    "location": LOCATIONS,
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
        location: one of :data:`LOCATIONS`; only CUDA devices have rows elsewhere than in their memory.
        load_factor: of "managed_caching": share of the rows that the cache holds.
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
    location: str = "device"
    load_factor: float = _LOAD_FACTOR

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {self.batch_size}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        if self.pooling == "none" and (len({shard.dim for shard in self.shards}) > 1 or self.kernel == "dense"):
            raise ValueError("FBGEMM returns unpooled rows only from its fused TBE, and only for tables of one dim")
        if self.location != "device" and self.kernel == "dense":
            raise ValueError(f"a dense TBE's rows lie in the device's memory, not {self.location}")
        if not 0 < self.load_factor <= 1:
            raise ValueError(f"load_factor must be above 0 and at most 1, got {self.load_factor}")
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

    @property
    def compute_kernel(self) -> str:
        """The group's kernel as TorchRec names it."""
        names = {"device": self.kernel, "managed": UVM, "managed_caching": UVM_CACHING}
        return names[self.location]

    @property
    def device_bytes(self) -> float:
        """Bytes of weights and optimizer state that lie in the device's memory; states are fp32.

        Row-wise Adagrad keeps 4 bytes a row, on the device wherever the rows lie. A dense kernel has a gradient of the
        weights' size beside them.
        """
        if self.location == "device":
            return float(self.weight_bytes * (2 if self.kernel == "dense" else 1) + self.state_bytes)
        state = float(self.state_bytes) if self.optimizer == "rowwise_adagrad" else 0.0
        if self.location == "managed":
            return state
        rows = sum(shard.rows for shard in self.shards)
        widest = max(
            (shard.dim for shard in self.shards), default=0
        )  # slots of a cache are as wide as its widest table
        return state + self.load_factor * rows * widest * DATA_TYPES[self.data_type]

    @property
    def host_bytes(self) -> float:
        """Bytes of weights and optimizer state that lie in the host's memory, mapped for a GPU."""
        if self.location == "device":
            return 0.0
        return float(self.weight_bytes + (0 if self.optimizer == "rowwise_adagrad" else self.state_bytes))

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        elements = sum(shard.rows * shard.dim for shard in self.shards)
        rows = sum(shard.rows for shard in self.shards)
        return {"sgd": 0, "rowwise_adagrad": 4 * rows, "adagrad": 4 * elements, "adam": 8 * elements}[self.optimizer]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        record = asdict(self)
        if record["location"] != "managed_caching":
            del record["load_factor"]
        for name in ("kernel", "pooling", "location"):  # left out at its default, so that ids of older records stand
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
    """One collective call over all ranks of a group, in floats of 4 bytes.

    =============== ===================================== =====================================================
    name            TorchRec calls it for                 what moves
    =============== ===================================== =====================================================
    all_to_all      pooled embeddings of table- and       forward: rank r sends batch_size_per_rank x dims[r]
                    column-wise shards                    floats to every rank; backward: the reverse
    reduce_scatter  row-wise shards, forward              every rank holds partial sums of the global batch,
                                                          [world_size x batch_size_per_rank, dims[0]], and gets
                                                          the sums of its own batch_size_per_rank samples
    all_gather      row-wise shards, backward             every rank gives the gradient of its own samples,
                                                          [batch_size_per_rank, dims[0]], and gets everybody's
    all_reduce      gradients of data_parallel tables     every rank holds a flat buffer of dims[0] floats
    =============== ===================================== =====================================================

    Attributes:
        name: one of :data:`COLLECTIVES`.
        world_size: number of ranks.
        batch_size_per_rank: samples per rank; 1 for an all-reduce, whose buffer has no samples.
        dims: all_to_all: [ranks] columns of the pooled embeddings that each rank owns (its "dim sum"). Others:
            [1], the columns of all row-wise tables together, or the floats of an all-reduce's buffer.
        direction: of an all-to-all: "forward" (scatter batches, gather columns) or "backward" (the reverse). The
            others have one direction each, which their name tells, and leave this at "forward".
        start_delays_ms: [ranks] how late each rank enters the call; empty when all enter together.
        seed: seeds the sampler that made the spec.
        local_world_size: ranks per host; 0 when all ranks are on one host.
        link_gbps: Gbit/s of each host's link to the others, in each direction; None when unknown or on one host.
    """

    name: str
    world_size: int
    batch_size_per_rank: int
    dims: tuple[int, ...]
    direction: str = "forward"
    start_delays_ms: tuple[float, ...] = ()
    seed: int = 0
    local_world_size: int = 0
    link_gbps: float | None = None

    def __post_init__(self) -> None:
        if self.name not in COLLECTIVES:
            raise ValueError(f"collective must be one of {COLLECTIVES}, got {self.name!r}")
        if self.world_size < 1:
            raise ValueError(f"world_size must be positive, got {self.world_size}")
        if self.batch_size_per_rank < 1:
            raise ValueError(f"batch_size_per_rank must be positive, got {self.batch_size_per_rank}")
        self._check_shape()
        if self.start_delays_ms and len(self.start_delays_ms) != self.world_size:
            raise ValueError(f"start_delays_ms needs one entry per rank ({self.world_size}) or none")
        if any(delay < 0 for delay in self.start_delays_ms):
            raise ValueError(f"start_delays_ms must not be negative, got {self.start_delays_ms}")
        if self.local_world_size < 0 or self.world_size % (self.local_world_size or self.world_size):
            raise ValueError(
                f"local_world_size must divide world_size ({self.world_size}), or be 0 for one host; "
                f"got {self.local_world_size}"
            )
        if self.local_world_size == self.world_size:  # one way to say "one host", so that ids agree
            object.__setattr__(self, "local_world_size", 0)
        if self.link_gbps is not None and (self.hosts == 1 or not 0 < self.link_gbps < float("inf")):
            raise ValueError(
                f"link_gbps is the positive speed of the link between hosts, or None on one host; got {self.link_gbps} "
                f"with {self.hosts} host(s)"
            )

    def _check_shape(self) -> None:
        if self.direction not in ("forward", "backward"):
            raise ValueError(f"direction must be forward or backward, got {self.direction!r}")
        if self.name != "all_to_all" and self.direction != "forward":
            raise ValueError(f"only an all_to_all has a direction; leave {self.name} at 'forward'")
        if self.name == "all_to_all" and len(self.dims) != self.world_size:
            raise ValueError(f"dims needs one entry per rank ({self.world_size}), got {len(self.dims)}")
        if self.name != "all_to_all" and len(self.dims) != 1:
            what = "the floats of the buffer" if self.name == "all_reduce" else "the columns of all tables together"
            raise ValueError(f"dims of {self.name} has one entry, {what}; got {len(self.dims)}")
        if self.name == "all_reduce" and self.batch_size_per_rank != 1:
            raise ValueError(f"batch_size_per_rank of all_reduce must be 1, got {self.batch_size_per_rank}")
        if any(dim < 0 for dim in self.dims):
            raise ValueError(f"dims must not be negative, got {self.dims}")

    @property
    def ranks_per_host(self) -> int:
        """Ranks that share a host; the ranks of a host are consecutive."""
        return self.local_world_size or self.world_size

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.world_size // self.ranks_per_host

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        record = {**asdict(self), "dims": list(self.dims), "start_delays_ms": list(self.start_delays_ms)}
        for name in ("local_world_size", "link_gbps"):  # left out on one host, so that ids of older records stand
            if not record[name]:
                del record[name]
        return record

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
