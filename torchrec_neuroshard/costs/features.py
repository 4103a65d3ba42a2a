"""What a cost model sees of a shard: additive work terms and a feature vector.

A fused group is described by *sums over its shards* only (sum pooling [Zaheer2017deepsets]), so adding or
removing a shard changes a group's description by one vector.

References:
    [Zaheer2017deepsets] M. Zaheer et al. Deep Sets. NeurIPS 2017.
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.problem import DATA_TYPE_BYTES, Table

FEATURE_SET = "shard-v2"

# Cache sizes at which the share of lookups that hit is computed. They bracket L1, L2 and L3 of CPUs, what their
# TLBs reach, and the L2 of GPUs; they are the same for all hardware, so that features do not depend on it.
CACHE_BYTES: tuple[int, ...] = (32 << 10, 512 << 10, 2 << 20, 8 << 20, 40 << 20, 256 << 20)
_MID_LEVEL = 3  # lookups beyond CACHE_BYTES[_MID_LEVEL - 1] have a work term of their own

OPTIMIZERS: tuple[str, ...] = ("sgd", "rowwise_adagrad", "adagrad", "adam")

KERNELS: tuple[str, ...] = ("fused", "dense")  # optimizer fused into the TBE; a dense gradient, then a step
POOLINGS: tuple[str, ...] = ("sum", "none")  # bags summed to one row; every row looked up returned (sequences)
DATA_TYPES: tuple[str, ...] = tuple(DATA_TYPE_BYTES)

# Code paths of the TBE: all shards of a group share (kernel, pooling, optimizer, data type), and work costs
# differently in each.
REGIMES: tuple[str, ...] = tuple(map("/".join, itertools.product(KERNELS, POOLINGS, OPTIMIZERS, DATA_TYPES)))

# Work terms of a shard, all additive over the shards of a group. "level" terms split the bytes looked up by
# the smallest cache that holds them.
WORK_TERMS: tuple[str, ...] = (
    "features",
    "bags",
    "lookups",
    *(f"bytes_level_{level}" for level in range(len(CACHE_BYTES))),
    "bytes_memory",
    "lookups_beyond_mid_level",
    "lookups_memory",
    "output_bytes",
    "unique_rows",
    "unique_bytes",
    "stateful_lookups",
    "stateful_unique_rows",
    "weighted_lookups",
    "dense_bytes",
)

FEATURES: tuple[str, ...] = (
    "log_rows",
    "log_dim",
    "log_batch",
    "log_bag_length",
    "log_features",
    "log_lookups",
    "log_unique",
    "log_reuse",
    "log_table_bytes",
    "log_touched_bytes",
    *(f"hit_{size >> 10}k" for size in CACHE_BYTES),
    "fp16",
    "weighted",
    "dense",
    "unpooled",
    *(f"optimizer_{name}" for name in OPTIMIZERS),
    "dim_multiple_of_8",
    "dim_multiple_of_16",
    "dim_multiple_of_32",
)


@dataclass(frozen=True)
class ShardWork:
    """One shard as a TBE sees it.

    Attributes:
        rows: rows of the shard.
        dim: columns of the shard.
        pooling_factor: mean ids per sample over all features.
        num_features: bags per sample.
        batch_size: samples of the TBE's batch.
        element_bytes: bytes of a weight.
        weighted: per-sample weights are applied.
        optimizer: one of :data:`OPTIMIZERS`.
        access: distribution of the lookups over the rows.
        kernel: one of :data:`KERNELS`; "dense" for data_parallel tables.
        pooling: one of :data:`POOLINGS`; "none" for sequence embeddings.
    """

    rows: int
    dim: int
    pooling_factor: float
    num_features: int
    batch_size: int
    element_bytes: int
    weighted: bool
    optimizer: str
    access: AccessDistribution
    kernel: str = "fused"
    pooling: str = "sum"

    @classmethod
    def whole(cls, table: Table, batch_size: int) -> ShardWork:
        """A whole table whose optimizer is fused.

        Args:
            table: the table.
            batch_size: samples of the TBE's batch.
        """
        return cls(
            rows=table.num_embeddings,
            dim=table.embedding_dim,
            pooling_factor=table.pooling_factor,
            num_features=table.num_features,
            batch_size=batch_size,
            element_bytes=table.element_bytes,
            weighted=table.weighted,
            optimizer=table.optimizer,
            access=table.distribution,
            pooling="none" if table.unpooled else "sum",
        )

    @property
    def regime(self) -> int:
        """Index of the shard's code path in :data:`REGIMES`."""
        data_type = "fp16" if self.element_bytes == 2 else "fp32"
        return REGIMES.index("/".join((self.kernel, self.pooling, self.optimizer, data_type)))


@dataclass(frozen=True)
class ShardFeatures:
    """Arrays over shards.

    Attributes:
        work: [shards, len(WORK_TERMS)] additive work terms, in units (see :func:`shard_features`).
        features: [shards, len(FEATURES)] inputs of the neural models.
        regime: [shards] indices into :data:`REGIMES`.
    """

    work: NDArray[np.float64]
    features: NDArray[np.float64]
    regime: NDArray[np.int64]

    @classmethod
    def concatenate(cls, parts: Sequence[ShardFeatures]) -> ShardFeatures:
        """Stacks the shards of several sets."""
        return cls(
            np.concatenate([part.work for part in parts]),
            np.concatenate([part.features for part in parts]),
            np.concatenate([part.regime for part in parts]),
        )


def shard_features(shards: Iterable[ShardWork]) -> ShardFeatures:
    """Computes work terms and features; counts are in units, bytes in bytes, logarithms to base 2."""
    shards = list(shards)
    if not shards:
        return ShardFeatures(np.zeros((0, len(WORK_TERMS))), np.zeros((0, len(FEATURES))), np.zeros(0, np.int64))
    columns = [_scalars(shard) for shard in shards]
    table = np.asarray([scalars for scalars, _ in columns])
    hits = np.asarray([hit for _, hit in columns])  # [shards, cache sizes], rising
    rows, dim, bags, lookups, unique, element_bytes, weighted, optimizer, batch, num_features, dense, unpooled = table.T

    row_bytes = dim * element_bytes
    looked_up = lookups * row_bytes
    bounds = np.concatenate([np.zeros((len(hits), 1)), np.minimum(hits, 1.0), np.ones((len(hits), 1))], axis=1)
    levels = np.maximum(np.diff(bounds, axis=1), 0.0)
    stateful = (optimizer > 0).astype(np.float64)
    work = np.column_stack(
        [
            num_features,
            bags,
            lookups,
            *(levels * looked_up[:, None]).T,
            lookups * levels[:, _MID_LEVEL:].sum(axis=1),
            lookups * levels[:, -1],
            np.where(unpooled > 0, lookups, bags) * dim * 4.0,
            unique,
            unique * row_bytes,
            lookups * stateful,
            unique * stateful,
            lookups * weighted,
            dense * rows * row_bytes,
        ]
    )
    features = np.column_stack(
        [
            np.log2(rows),
            np.log2(dim),
            np.log2(batch),
            np.log2(lookups / bags + 0.1),
            np.log2(num_features),
            np.log2(lookups + 1.0),
            np.log2(unique + 1.0),
            np.log2((lookups + 1.0) / (unique + 1.0)),
            np.log2(rows * row_bytes),
            np.log2(unique * row_bytes + 1.0),
            hits,
            element_bytes == 2,
            weighted,
            dense,
            unpooled,
            *(optimizer == index for index in range(len(OPTIMIZERS))),
            dim % 8 == 0,
            dim % 16 == 0,
            dim % 32 == 0,
        ]
    )
    regime = np.asarray([shard.regime for shard in shards], dtype=np.int64)
    return ShardFeatures(work, features.astype(np.float64), regime)


def _scalars(shard: ShardWork) -> tuple[tuple[float, ...], list[float]]:
    lookups = shard.batch_size * shard.pooling_factor
    row_bytes = shard.dim * shard.element_bytes
    ends = np.concatenate([[0.0], np.cumsum(shard.access.counts)])
    cumulative = np.concatenate([[0.0], np.cumsum(shard.access.masses)])
    hits = np.interp(np.asarray(CACHE_BYTES) / row_bytes, ends, cumulative).tolist()
    scalars = (
        float(shard.rows),
        float(shard.dim),
        float(shard.batch_size * shard.num_features),
        lookups,
        shard.access.expected_unique(lookups),
        float(shard.element_bytes),
        float(shard.weighted),
        float(OPTIMIZERS.index(shard.optimizer)),
        float(shard.batch_size),
        float(shard.num_features),
        float(shard.kernel == "dense"),
        float(shard.pooling == "none"),
    )
    return scalars, hits


def segment_sums(values: NDArray[np.float64], segment: NDArray[np.int64], segments: int) -> NDArray[np.float64]:
    """Sums rows of ``values`` ([n, columns]) by segment ([n], in [0, segments)), in the order of the rows.

    An order of magnitude faster than ``np.add.at`` for wide rows, and as deterministic on CPU.
    """
    result = torch.zeros(segments, values.shape[1], dtype=torch.float64)
    result.index_add_(0, torch.as_tensor(segment), torch.as_tensor(values))
    return result.numpy()
