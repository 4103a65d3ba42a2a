"""The pool that measured groups are drawn from: public base tables, augmented.

NeuroShard augments a fixed pool of production tables and tests on the same pool; here base tables are split
into training and held-out ones *before* augmentation, so that held-out error is error on unseen tables.

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868, section 3.1 (input generation).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Sequence

import numpy as np

from torchrec_neuroshard.measure.collective_pool import sample_collective as sample_collective  # older name
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec

_SYNTHETIC_BASES = 400
_HELD_OUT_SHARE = 0.2  # of the base tables
_COMMON_DIMS = (4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_DIM_WEIGHTS = (0.04, 0.07, 0.14, 0.17, 0.19, 0.09, 0.15, 0.03, 0.06, 0.02, 0.02, 0.01, 0.01)


@dataclass(frozen=True)
class BaseTable:
    """A table before augmentation (see ``base_tables.json`` for the public ones)."""

    id: str
    num_embeddings: int
    pooling_factor: float

    @property
    def held_out(self) -> bool:
        """Whether only evaluation may see this table; decided by its id alone, for good."""
        return int(hashlib.sha256(self.id.encode()).hexdigest()[:8], 16) / 2**32 < _HELD_OUT_SHARE


@dataclass(frozen=True)
class WorkCap:
    """Upper bounds of one record, by which the sampler shrinks a group."""

    iteration_ms: float
    weight_bytes: int


# (probability, cap): most records are cheap; the rest test extrapolation to heavier groups.
WORK_CAPS: tuple[tuple[float, WorkCap], ...] = (
    (0.75, WorkCap(40.0, 300 << 20)),
    (0.20, WorkCap(120.0, 1 << 30)),
    (0.04, WorkCap(400.0, 2 << 30)),
    (0.01, WorkCap(400.0, 6 << 30)),
)

RANK_LIKE_CAP = WorkCap(60.0, 1 << 30)
_RANK_LIKE_SHARE = 0.25
_ROW_BLOCK_SHARE = 0.12  # of the other groups: row-wise shards, whose bags hold few ids or none
_DENSE_ROUNDS = 4.0  # dense kernel: gradient zeroed and written, weights read and written


@cache
def base_tables() -> tuple[BaseTable, ...]:
    """Public tables, and synthetic ones that fill the gaps between them (log-uniform rows and pooling)."""
    public = json.loads((Path(__file__).parent / "base_tables.json").read_text())["tables"]
    bases = [BaseTable(t["id"], int(t["num_embeddings"]), float(t["pooling_factor"])) for t in public]
    rng = np.random.default_rng(20261130)
    for index in range(_SYNTHETIC_BASES):
        rows = int(10 ** rng.uniform(2.0, 7.0))
        pooling = float(np.round(10 ** rng.uniform(0.0, 2.3), 2)) if rng.random() < 0.8 else 1.0
        bases.append(BaseTable(f"synthetic/{index}", rows, pooling))
    return tuple(bases)


def sample_group(seed: int, index: int) -> GroupSpec:
    """The ``index``-th group of the sample with this seed; any prefix of the sequence covers the space.

    About 15 % of the groups are made of held-out base tables only, the others of training tables only. A quarter
    look like one rank's share of a recommendation model (:func:`_rank_like`); the others cover the whole space.
    """
    rng = np.random.default_rng([seed, index])
    held_out = rng.random() < 0.15
    bases = [base for base in base_tables() if base.held_out == held_out]
    if rng.random() < _RANK_LIKE_SHARE:
        return _rank_like(bases, rng)
    cap = WORK_CAPS[int(rng.choice(len(WORK_CAPS), p=[share for share, _ in WORK_CAPS]))][1]
    batch_size = int(2 ** rng.triangular(6, 11, 16))
    if rng.random() < 0.6:
        batch_size = 2 ** int(round(np.log2(batch_size)))
    kind = str(rng.choice(("pooled", "unpooled", "dense"), p=(0.84, 0.09, 0.07)))
    count = int(round(2 ** rng.uniform(0, 8)))
    common_dim = sample_dim(rng) if kind == "unpooled" or rng.random() < 0.3 else None
    common_zipf = float(rng.uniform(0.0, 1.3)) if rng.random() < 0.25 else None
    pooling_scale = float(2 ** rng.normal(0.0, 0.7))
    shards = tuple(augmented(bases[int(rng.integers(len(bases)))], common_dim, common_zipf, pooling_scale, rng)
                   for _ in range(count))  # fmt: skip
    if kind == "pooled" and rng.random() < _ROW_BLOCK_SHARE:
        shards = row_blocks(shards, rng)
    spec = GroupSpec(
        batch_size=batch_size,
        shards=shards,
        optimizer=str(rng.choice(("sgd", "rowwise_adagrad", "adagrad"), p=(0.45, 0.35, 0.2))),
        data_type="fp16" if rng.random() < 0.14 else "fp32",
        weighted=bool(kind != "unpooled" and rng.random() < 0.14),
        fixed_length=bool(rng.random() < 0.3),
        seed=int(rng.integers(2**31)),
        kernel="dense" if kind == "dense" else "fused",
        pooling="none" if kind == "unpooled" else "sum",
    )
    # Half of the heavy groups give up batch for more shards, half the reverse.
    return _shrink(spec, cap, batch_floor=512 if rng.random() < 0.5 else 1 << 20)


def row_blocks(shards: tuple[ShardSpec, ...], rng: np.random.Generator) -> tuple[ShardSpec, ...]:
    """One rank's row-wise shards of some tables: a block of the rows and its share of the ids, for every bag.

    With popular rows scattered, a block's share is about its part of the rows; where ids are sorted by frequency
    it is anything from next to nothing to most.
    """
    blocks = int(2 ** rng.integers(1, 8))
    skew = float(rng.choice((0.0, 1.0)))
    return tuple(
        replace(
            shard,
            rows=max(10, shard.rows // blocks),
            pooling_factor=round(shard.pooling_factor * min(1.0, float(np.exp(skew * rng.normal())) / blocks), 4),
        )
        for shard in shards
    )


def _rank_like(bases: Sequence[BaseTable], rng: np.random.Generator) -> GroupSpec:
    """A group as a plan builds it: few to some dozen tables, skewed pooling, columns of some tables split."""
    shards = []
    model_zipf = float(rng.uniform(0.2, 1.1)) if rng.random() < 0.3 else None
    for _ in range(int(round(2 ** rng.uniform(0, 4.6)))):
        base = bases[int(rng.integers(len(bases)))]
        dim = int(rng.choice((16, 32, 64, 96, 128)))
        if rng.random() < 0.3:
            dim = max(4, 4 * int(round(dim * rng.uniform(0.2, 0.9) / 4)))
        pooling = float(np.clip(5.0 * np.exp(rng.normal(0.0, 1.5)), 0.1, 200.0))
        rows = float(np.clip(base.num_embeddings * 2 ** rng.uniform(-2.0, 2.0), 1e3, 3e6))
        zipf = float(rng.uniform(0.0, 1.2)) if model_zipf is None else model_zipf
        shards.append(ShardSpec(int(rows), dim, round(pooling, 3), zipf=round(zipf, 3), base=base.id))
    spec = GroupSpec(
        batch_size=int(2 ** rng.integers(9, 14)),
        shards=tuple(shards),
        optimizer="sgd" if rng.random() < 0.7 else "rowwise_adagrad",
        seed=int(rng.integers(2**31)),
    )
    return _shrink(spec, RANK_LIKE_CAP, batch_floor=512 if rng.random() < 0.3 else 1 << 20)


def is_held_out(spec: GroupSpec) -> bool:
    """Whether a group holds any held-out base table."""
    held_out = _held_out_ids()
    return any(shard.base in held_out for shard in spec.shards)


def estimated_iteration_ms(spec: GroupSpec) -> float:
    """A rough forward-plus-backward time on one CPU core, only to keep records within their cap."""
    nanoseconds = 5e5
    if spec.kernel == "dense":
        nanoseconds += _DENSE_ROUNDS * spec.weight_bytes / 4.0
    for shard in spec.shards:
        per_column = 4.0 if shard.rows * shard.dim * 4 > 32 << 20 else 1.2
        nanoseconds += spec.batch_size * shard.pooling_factor * (50 + per_column * shard.dim)
        outputs = shard.num_features if spec.pooling == "sum" else 3.0 * shard.pooling_factor
        nanoseconds += spec.batch_size * outputs * (40 + shard.dim)
    return nanoseconds / 1e6


@cache
def _held_out_ids() -> frozenset[str]:
    return frozenset(base.id for base in base_tables() if base.held_out)


def sample_dim(rng: np.random.Generator) -> int:
    """A width: mostly one of the usual ones, now and then any multiple of 4 up to 256."""
    if rng.random() < 0.2:
        return 4 * int(round(2 ** rng.uniform(0, 6)))
    return int(rng.choice(_COMMON_DIMS, p=np.asarray(_DIM_WEIGHTS)))


def augmented(
    base: BaseTable, dim: int | None, zipf: float | None, pooling_scale: float, rng: np.random.Generator
) -> ShardSpec:
    """A table made of a base table by chance.

    Args:
        base: the base table.
        dim: its width; None for any.
        zipf: exponent of its access distribution; None for any.
        pooling_scale: factor of the base's pooling factor, beside a factor of its own.
        rng: source of chance.
    """
    rows = base.num_embeddings * 2 ** rng.uniform(-2.0, 2.0)
    if rows > 3e7:  # beyond what one record may hold: anywhere in the upper decades instead of a pile at the cap
        rows = 10 ** rng.uniform(5.0, 7.4)
    pooling = 1.0
    if base.pooling_factor != 1.0 or rng.random() < 0.4:
        pooling = float(np.clip(base.pooling_factor * pooling_scale * 2 ** rng.normal(0.0, 0.6), 0.1, 200.0))
    if zipf is None:
        zipf = 0.0 if rng.random() < 0.15 else float(rng.uniform(0.0, 1.3))
    return ShardSpec(
        rows=max(10, int(rows)),
        dim=dim if dim is not None else sample_dim(rng),
        pooling_factor=round(pooling, 3),
        num_features=1 if rng.random() < 0.93 else int(rng.integers(2, 4)),
        zipf=round(zipf, 3),
        base=base.id,
    )


def _shrink(spec: GroupSpec, cap: WorkCap, batch_floor: int) -> GroupSpec:
    """Shrinks the batch (down to batch_floor), then drops shards, then rows, until the group fits its cap."""
    while spec.batch_size >= 2 * batch_floor and estimated_iteration_ms(spec) > cap.iteration_ms:
        spec = replace(spec, batch_size=spec.batch_size // 2)
    weight_bytes = cap.weight_bytes // 4 if spec.kernel == "dense" else cap.weight_bytes
    while spec.kernel == "dense" and len(spec.shards) > 1 and spec.weight_bytes > weight_bytes:
        spec = replace(spec, shards=spec.shards[: max(1, int(len(spec.shards) * 0.85))])
    while len(spec.shards) > 1 and estimated_iteration_ms(spec) > cap.iteration_ms:
        keep = max(1, int(len(spec.shards) * 0.85))
        spec = replace(spec, shards=spec.shards[:keep])
    while spec.batch_size > 64 and estimated_iteration_ms(spec) > cap.iteration_ms:
        spec = replace(spec, batch_size=max(64, spec.batch_size // 2))
    while spec.weight_bytes > weight_bytes:
        largest = max(range(len(spec.shards)), key=lambda i: spec.shards[i].rows * spec.shards[i].dim)
        shards = list(spec.shards)
        shards[largest] = replace(shards[largest], rows=max(10, shards[largest].rows // 2))
        spec = replace(spec, shards=tuple(shards))
    return spec
