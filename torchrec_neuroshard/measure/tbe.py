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

from torchrec_neuroshard.measure.batches import TbeBatch, synthesize_batch
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


@dataclass(frozen=True)
class GroupTiming:
    """Measured cost of one fused group: the two passes and their sum (all :class:`Timing` in ms)."""

    forward: Timing
    backward: Timing
    total: Timing
    lookups: float
    batches: int


def build_tbe(
    spec: GroupSpec, device: torch.device
) -> SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen:
    """Builds the group's TBE with zero weights; a fused one has the optimizer in its backward pass."""
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
        location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
        compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(shard.rows, shard.dim, location, compute) for shard in spec.shards],
            feature_table_map=feature_table_map,
            optimizer=_OPTIMIZER_TYPES[spec.optimizer],
            weights_precision=_SPARSE_TYPES[spec.data_type],
            pooling_mode=_POOLING_MODES[spec.pooling],
            learning_rate=0.01,
            stochastic_rounding=False,
            device=device,
        )


def measure_group(
    spec: GroupSpec,
    device: torch.device,
    policy: RepetitionPolicy | None = None,
    draw: Callable[[np.random.Generator], TbeBatch] | None = None,
) -> GroupTiming:
    """Measures forward and backward-with-update of one fused group, one thread on CPU as torchrun gives.

    Every repetition takes another batch; a few are rotated when fresh ones would cost more than the
    measurement. The backward of a dense group is its full gradient and the optimizer's step (DDP's copies into
    and out of its buckets are not counted).

    Args:
        spec: the group.
        device: where it runs.
        policy: how often it runs.
        draw: makes a batch that fits the group; None draws what the group says.
    """
    policy = policy or RepetitionPolicy()
    rng = np.random.default_rng(spec.seed)
    fresh = int(_CHEAP_LOOKUPS / max(spec.lookups, 1.0))
    count = int(np.clip(fresh, _MINIMUM_BATCHES, policy.warmup + policy.maximum))
    batches = [(synthesize_batch(spec, rng) if draw is None else draw(rng)).to(device) for _ in range(count)]
    tbe = build_tbe(spec, device)
    optimizer = _dense_optimizer(spec, tbe) if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen) else None
    gradients = _Gradients(spec, batches, device)
    watch = stopwatch(device)

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
        return watch.laps_ms()

    laps = np.asarray(repeat(step, policy))
    return GroupTiming(
        forward=Timing.of(laps[:, 0]),
        backward=Timing.of(laps[:, 1]),
        total=Timing.of(laps.sum(axis=1)),
        lookups=float(np.mean([batch.indices.numel() for batch in batches])),
        batches=count,
    )


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
