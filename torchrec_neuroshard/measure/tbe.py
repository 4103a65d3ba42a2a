"""Times one fused group with FBGEMM's table-batched embedding operator (TBE), as TorchRec runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_neuroshard import cuda
from torchrec_neuroshard.costs.host_memory import remembered_lookups
from torchrec_neuroshard.measure.batches import TbeBatch, synthesize_batch
from torchrec_neuroshard.measure.device_batches import DeviceBatches
from torchrec_neuroshard.measure.heap import recycled_blocks
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing, repeat, stopwatch

_OPTIMIZER_TYPES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_SPARSE_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}
_POOLING_MODES = {"sum": PoolingMode.SUM, "none": PoolingMode.NONE}

# Enough distinct batches that no repetition finds its rows in a cache because it ran before; more when
# they are cheap.
_MINIMUM_BATCHES = 4
_CHEAP_LOOKUPS = 400_000
_MOST_FILLING = 24  # batches by which a cache is filled before it is timed
_CUDA_POLICY = RepetitionPolicy(warmup=5, minimum=10, maximum=20, seconds=0.3)


@dataclass(frozen=True)
class GroupTiming:
    """Measured cost of one fused group.

    Attributes:
        forward: ms of the forward pass.
        backward: ms of the backward pass with the optimizer's step.
        total: ms of both.
        lookups: mean number of ids in a batch.
        batches: distinct batches that were rotated.
        host_bound: share of the repetitions in which a GPU may have waited for the host.
    """

    forward: Timing
    backward: Timing
    total: Timing
    lookups: float
    batches: int
    host_bound: float = 0.0


def build_tbe(
    spec: GroupSpec, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen:
    """Builds the group's TBE, with zero weights but on a GPU; a fused one has the optimizer in its backward pass."""
    on_cuda = device.type == "cuda"
    feature_table_map = [index for index, shard in enumerate(spec.shards) for _ in range(shard.num_features)]
    with recycled_blocks():
        if spec.kernel == "dense":
            dense = DenseTableBatchedEmbeddingBagsCodegen(
                [(shard.rows, shard.dim) for shard in spec.shards],
                feature_table_map=feature_table_map,
                weights_precision=_SPARSE_TYPES[spec.data_type],
                use_cpu=not on_cuda,
            )
            dense.init_embedding_weights_uniform(0.0, 0.0)
            return dense.to(device)
        if not on_cuda and spec.location != "device":
            raise ValueError(f"only a CUDA device has rows that are {spec.location}; this one is {device.type}")
        location, compute, further = (
            cuda.tbe_placement(spec.location) if on_cuda else (EmbeddingLocation.HOST, ComputeDevice.CPU, {})
        )
        fused = SplitTableBatchedEmbeddingBagsCodegen(
            [(shard.rows, shard.dim, location, compute) for shard in spec.shards],
            feature_table_map=feature_table_map,
            optimizer=_OPTIMIZER_TYPES[spec.optimizer],
            weights_precision=_SPARSE_TYPES[spec.data_type],
            pooling_mode=_POOLING_MODES[spec.pooling],
            learning_rate=0.01,
            stochastic_rounding=on_cuda,  # FBGEMM's default, which TorchRec leaves; a CPU's kernels have none
            cache_load_factor=spec.load_factor,
            device=device,
            **further,
        )
        if on_cuda and spec.location == "device":  # a GPU that moves zeros draws less power, and clocks higher
            fused.init_embedding_weights_uniform(-0.05, 0.05)
        return fused


def measure_group(
    spec: GroupSpec,
    device: torch.device,
    policy: RepetitionPolicy | None = None,
    draw: Callable[[np.random.Generator], TbeBatch] | None = None,
) -> GroupTiming:
    """Measures forward and backward-with-update of one fused group, one thread on CPU as torchrun gives.

    Every repetition takes another batch; a few are rotated when fresh ones would cost more than the
    measurement. The backward of a dense group is its full gradient and the optimizer's step (DDP's copies into
    and out of its buckets are not counted); on a GPU that step waits for Python, table by table, as in TorchRec.

    Args:
        spec: the group.
        device: where it runs.
        policy: how often it runs; None for the device's usual one.
        draw: makes a batch that fits the group; None draws what the group says, on the device.

    Raises:
        ValueError: the group's rows lie where this device has none.
    """
    policy = policy or default_policy(device)
    count = _distinct_batches(spec, policy)
    rng = np.random.default_rng(spec.seed)
    next_batch = _batches(spec, device) if draw is None else lambda: draw(rng).to(device)
    tbe = build_tbe(spec, device)
    _fill_cache(spec, tbe, next_batch)
    batches = [next_batch() for _ in range(count)]
    optimizer = _dense_optimizer(spec, tbe) if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen) else None
    gradients = _Gradients(spec, batches, device)
    watch = stopwatch(device)
    host_bound: list[bool] = []

    def step(index: int) -> list[float]:
        batch = batches[index % count]
        gradient = gradients.of(batch)
        if optimizer is not None:
            optimizer.zero_grad()
        watch.start()
        output = tbe(batch.indices, batch.offsets, batch.per_sample_weights)
        watch.lap()
        output.backward(gradient)
        if optimizer is not None:
            optimizer.step()
        watch.lap()
        laps_ms = watch.laps_ms()
        host_bound.append(watch.host_bound())
        return laps_ms

    laps = np.asarray(repeat(step, policy))
    return GroupTiming(
        forward=Timing.of(laps[:, 0]),
        backward=Timing.of(laps[:, 1]),
        total=Timing.of(laps.sum(axis=1)),
        lookups=float(np.mean([batch.indices.numel() for batch in batches])),
        batches=count,
        host_bound=float(np.mean(host_bound[policy.warmup :])),
    )


def default_policy(device: torch.device) -> RepetitionPolicy:
    """How often a group runs when nobody says: GPUs are quick, and need some runs to reach their clocks."""
    return _CUDA_POLICY if device.type == "cuda" else RepetitionPolicy()


def _batches(spec: GroupSpec, device: torch.device) -> Callable[[], TbeBatch]:
    """Draws a group's batches, on a GPU by its own generator."""
    if device.type == "cuda":
        return DeviceBatches(spec, device).draw
    rng = np.random.default_rng(spec.seed)
    return lambda: synthesize_batch(spec, rng).to(device)


def _distinct_batches(spec: GroupSpec, policy: RepetitionPolicy) -> int:
    """Batches to rotate. A cache would soon hold all rows of a few, so there every repetition has its own."""
    most = policy.warmup + policy.maximum
    if spec.location == "managed_caching":
        return most
    return int(np.clip(int(_CHEAP_LOOKUPS / max(spec.lookups, 1.0)), _MINIMUM_BATCHES, most))


def _fill_cache(
    spec: GroupSpec,
    tbe: SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen,
    next_batch: Callable[[], TbeBatch],
) -> None:
    """Looks rows up until a cache in front of host memory holds what it will hold for good, or nearly so."""
    if spec.location != "managed_caching" or spec.lookups <= 0:
        return
    needed = 0.0  # batches
    for shard in spec.shards:
        lookups = spec.batch_size * shard.pooling_factor
        if lookups > 0:
            access = shard.distribution()
            needed = max(needed, remembered_lookups(access, spec.load_factor * shard.rows) / lookups)
    with torch.no_grad():
        for _ in range(int(min(np.ceil(needed), _MOST_FILLING))):
            batch = next_batch()
            tbe(batch.indices, batch.offsets, batch.per_sample_weights)


class _Gradients:
    """Gradients of a group's output: one row per bag, or one per id when lookups are not pooled."""

    def __init__(self, spec: GroupSpec, batches: list[TbeBatch], device: torch.device) -> None:
        self._pooled = spec.pooling != "none"
        rows, columns = spec.batch_size, sum(shard.dim * shard.num_features for shard in spec.shards)
        if not self._pooled:
            rows, columns = max(batch.indices.numel() for batch in batches), spec.shards[0].dim
        self._gradient = torch.randn(rows, columns, device=device)

    def of(self, batch: TbeBatch) -> torch.Tensor:
        """The gradient of one batch's output."""
        return self._gradient if self._pooled else self._gradient[: batch.indices.numel()]


def _dense_optimizer(spec: GroupSpec, tbe: DenseTableBatchedEmbeddingBagsCodegen) -> torch.optim.Optimizer:
    """What TorchRec runs on data_parallel tables: torch's optimizers or its own, one parameter per table."""
    from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    optimizers: dict[str, type[torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "adagrad": torch.optim.Adagrad,
        "adam": torch.optim.Adam,
        "rowwise_adagrad": RowWiseAdagrad,
    }
    ends = np.cumsum([0, *(shard.rows * shard.dim for shard in spec.shards)]).tolist()
    tables = [
        TableBatchedEmbeddingSlice(tbe.weights, begin, end, shard.rows, shard.dim)
        for shard, begin, end in zip(spec.shards, ends, ends[1:])
    ]
    return optimizers[spec.optimizer](tables, lr=0.01)  # type: ignore[call-arg]
