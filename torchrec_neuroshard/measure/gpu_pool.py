"""The pool that groups measured on a GPU are drawn from: the same base tables, in the sizes that GPUs are given.

A GPU does in a millisecond what takes a CPU's core a hundred, so batches go up to a million samples and tables to tens
of GiB; and it has what a CPU lacks: Adam, and rows that lie in the host's memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from torchrec_neuroshard.measure.pool import BaseTable, augmented, base_tables, row_blocks, sample_dim
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec

# (probability, longest iteration in ms, most GiB on the device): as on a CPU, most records are cheap.
CAPS: tuple[tuple[float, float, float], ...] = (
    (0.70, 3.0, 4.0),
    (0.22, 10.0, 16.0),
    (0.06, 30.0, 32.0),
    (0.02, 60.0, 60.0),
)
_HOST_GIB = 0.4  # of rows and states in the host's memory, which takes a second per GiB to map and zero
_CACHED_ROWS = 5_000_000  # of groups behind a cache, for which FBGEMM makes a Python list with an entry per row
_DENSE_SHARDS = 24  # TorchRec's dense optimizers loop over tables in Python, which a GPU waits for
_BYTES_PER_MS = 1.2e9  # rough, of a GPU of 2 to 5 TB/s, only to keep records within their cap
_LOOKUP_MS, _BAG_MS, _SHARD_MS = 4e-8, 1e-8, 2e-3
_HOST_BYTES_PER_MS = 2e7
_SMALLEST_BATCH = 64
_RANK_LIKE_SHARE = 0.3  # groups as a plan builds them: no extremes
_ROW_BLOCK_SHARE = 0.12
_KINDS = ("pooled", "unpooled", "dense", "managed", "managed_caching")
_KIND_SHARES = (0.72, 0.09, 0.05, 0.05, 0.09)
_OPTIMIZERS, _OPTIMIZER_SHARES = ("sgd", "rowwise_adagrad", "adagrad", "adam"), (0.3, 0.4, 0.12, 0.18)


def sample_gpu_group(seed: int, index: int) -> GroupSpec:
    """The ``index``-th group of the sample with this seed; any prefix of the sequence covers the space.

    As with :func:`torchrec_neuroshard.measure.pool.sample_group` about 15 % of the groups are made of held-out base
    tables only, the others of training tables only.
    """
    rng = np.random.default_rng([seed, index, 1])
    held_out = rng.random() < 0.15
    bases = [base for base in base_tables() if base.held_out == held_out]
    _, iteration_ms, gib = CAPS[int(rng.choice(len(CAPS), p=[share for share, _, _ in CAPS]))]
    kind = str(rng.choice(_KINDS, p=_KIND_SHARES))
    if rng.random() < _RANK_LIKE_SHARE:
        shards = _rank_like(bases, kind, rng)
        batch_size = 2 ** int(rng.integers(12, 18))
    else:
        shards = _anything(bases, kind, rng)
        batch_size = int(2 ** rng.triangular(6, 13, 20))
        if rng.random() < 0.6:
            batch_size = 2 ** int(round(np.log2(batch_size)))
    spec = GroupSpec(
        batch_size=batch_size,
        shards=shards,
        optimizer=str(rng.choice(_OPTIMIZERS, p=_OPTIMIZER_SHARES)),
        data_type="fp16" if rng.random() < 0.25 else "fp32",
        weighted=bool(kind != "unpooled" and rng.random() < 0.14),
        fixed_length=bool(rng.random() < 0.3),
        seed=int(rng.integers(2**31)),
        kernel="dense" if kind == "dense" else "fused",
        pooling="none" if kind == "unpooled" else "sum",
        location=kind if kind.startswith("managed") else "device",
        load_factor=round(float(2 ** rng.uniform(-6, -0.5)), 3) if kind == "managed_caching" else 0.2,
    )
    return _shrink(spec, iteration_ms, gib * 2**30)


def _anything(bases: list[BaseTable], kind: str, rng: np.random.Generator) -> tuple[ShardSpec, ...]:
    count = int(round(2 ** rng.uniform(0, 8)))
    dim = sample_dim(rng) if kind == "unpooled" or rng.random() < 0.3 else None
    zipf = float(rng.uniform(0.0, 1.3)) if rng.random() < 0.25 else None
    scale = float(2 ** rng.normal(0.0, 0.7))
    shards = tuple(
        _with_large_rows(augmented(bases[int(rng.integers(len(bases)))], dim, zipf, scale, rng), rng)
        for _ in range(count)
    )
    return row_blocks(shards, rng) if kind == "pooled" and rng.random() < _ROW_BLOCK_SHARE else shards


def _with_large_rows(shard: ShardSpec, rng: np.random.Generator) -> ShardSpec:
    """Now and then a table of up to 10^8 rows, which a CPU's pool does not have."""
    return replace(shard, rows=int(10 ** rng.uniform(7.0, 8.0))) if rng.random() < 0.04 else shard


def _rank_like(bases: list[BaseTable], kind: str, rng: np.random.Generator) -> tuple[ShardSpec, ...]:
    """A rank's share of a model: few to some dozen tables of usual dims, skewed pooling, columns of some split."""
    model_zipf = float(rng.uniform(0.2, 1.1)) if rng.random() < 0.3 else None
    one_dim = int(rng.choice((64, 128, 256))) if kind == "unpooled" else None
    shards = []
    for _ in range(int(round(2 ** rng.uniform(0, 5.0)))):
        base = bases[int(rng.integers(len(bases)))]
        dim = one_dim or int(rng.choice((32, 64, 128, 192, 256)))
        if one_dim is None and rng.random() < 0.3:
            dim = max(4, 4 * int(round(dim * rng.uniform(0.2, 0.9) / 4)))
        pooling = float(np.clip(4.0 * np.exp(rng.normal(0.0, 1.5)), 0.1, 200.0))
        rows = int(np.clip(base.num_embeddings * 2 ** rng.uniform(-1.0, 3.0), 1e3, 4e7))
        zipf = float(rng.uniform(0.0, 1.2)) if model_zipf is None else model_zipf
        shards.append(ShardSpec(rows, dim, round(pooling, 3), zipf=round(zipf, 3), base=base.id))
    return tuple(shards)


def estimated_gpu_ms(spec: GroupSpec) -> float:
    """A rough forward-plus-backward time, only to keep records within their cap."""
    element = 2.0 if spec.data_type == "fp16" else 4.0
    milliseconds = _SHARD_MS * len(spec.shards)
    if spec.kernel == "dense":
        milliseconds += 5.0 * spec.weight_bytes / _BYTES_PER_MS
    for shard in spec.shards:
        lookups = spec.batch_size * shard.pooling_factor
        outputs = spec.batch_size * shard.num_features if spec.pooling == "sum" else lookups
        moved = 3.0 * lookups * shard.dim * element + 2.0 * outputs * shard.dim * 4.0
        milliseconds += moved / _BYTES_PER_MS + lookups * _LOOKUP_MS + outputs * _BAG_MS
        if spec.location != "device":
            fetched = min(lookups, float(shard.rows)) * (1.0 if spec.location == "managed" else 0.3)
            state = {"adagrad": 4.0, "adam": 8.0}.get(spec.optimizer, 0.0)
            milliseconds += 3.0 * fetched * shard.dim * (element + state) / _HOST_BYTES_PER_MS
    return milliseconds


def _shrink(spec: GroupSpec, iteration_ms: float, device_bytes: float) -> GroupSpec:
    """Drops what exceeds the caps: half of the time in samples, half in shards; then rows of the largest table."""
    if spec.kernel == "dense":
        spec = replace(spec, shards=spec.shards[:_DENSE_SHARDS])
    fewer_shards = spec.seed % 2 == 0
    while estimated_gpu_ms(spec) > iteration_ms:
        if len(spec.shards) > 1 and (fewer_shards or spec.batch_size <= _SMALLEST_BATCH):
            spec = replace(spec, shards=spec.shards[: max(1, int(len(spec.shards) * 0.8))])
        elif spec.batch_size > _SMALLEST_BATCH:
            spec = replace(spec, batch_size=max(_SMALLEST_BATCH, spec.batch_size // 2))
        else:
            break
        fewer_shards = not fewer_shards
    cached_rows = _CACHED_ROWS if spec.location == "managed_caching" else float("inf")
    while (
        spec.device_bytes > device_bytes
        or spec.host_bytes > _HOST_GIB * 2**30
        or sum(shard.rows for shard in spec.shards) > cached_rows
    ):
        largest = max(range(len(spec.shards)), key=lambda i: spec.shards[i].rows * spec.shards[i].dim)
        shards = list(spec.shards)
        shards[largest] = replace(shards[largest], rows=max(10, shards[largest].rows // 2))
        spec = replace(spec, shards=tuple(shards))
    return spec
