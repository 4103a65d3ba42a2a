"""Times one fused group with FBGEMM's table-batched embedding operator (TBE), as TorchRec runs it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from torchrec_neuroshard.measure.batches import synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing, repeat, stopwatch

_OPTIMIZER_TYPES = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}
_SPARSE_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}

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


def build_tbe(spec: GroupSpec, device: torch.device) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Builds the group's TBE with zero weights and the optimizer fused into its backward pass."""
    on_cuda = device.type == "cuda"
    location = EmbeddingLocation.DEVICE if on_cuda else EmbeddingLocation.HOST
    compute = ComputeDevice.CUDA if on_cuda else ComputeDevice.CPU
    feature_table_map = [index for index, shard in enumerate(spec.shards) for _ in range(shard.num_features)]
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(shard.rows, shard.dim, location, compute) for shard in spec.shards],
        feature_table_map=feature_table_map,
        optimizer=_OPTIMIZER_TYPES[spec.optimizer],
        weights_precision=_SPARSE_TYPES[spec.data_type],
        pooling_mode=PoolingMode.SUM,
        learning_rate=0.01,
        stochastic_rounding=False,
        device=device,
    )


def measure_group(spec: GroupSpec, device: torch.device, policy: RepetitionPolicy | None = None) -> GroupTiming:
    """Measures forward and backward-with-update of one fused group, one thread on CPU as torchrun gives.

    Every repetition takes another batch; a few are rotated when fresh ones would cost more than the
    measurement.
    """
    policy = policy or RepetitionPolicy()
    rng = np.random.default_rng(spec.seed)
    fresh = int(_CHEAP_LOOKUPS / max(spec.lookups, 1.0))
    count = int(np.clip(fresh, _MINIMUM_BATCHES, policy.warmup + policy.maximum))
    batches = [synthesize_batch(spec, rng).to(device) for _ in range(count)]
    tbe = build_tbe(spec, device)
    columns = sum(shard.dim * shard.num_features for shard in spec.shards)
    gradient = torch.randn(spec.batch_size, columns, device=device)
    watch = stopwatch(device)

    def step(index: int) -> list[float]:
        batch = batches[index % count]
        watch.start()
        output = tbe(batch.indices, batch.offsets, batch.per_sample_weights)
        watch.lap()
        output.backward(gradient)
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
