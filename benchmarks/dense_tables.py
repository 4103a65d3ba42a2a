"""Times data_parallel tables as TorchRec runs them: dense TBE on the local batch, full gradient, optimizer step.

DDP's copies into and out of its buckets are left out, which favours plans that use data_parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen

from torchrec_neuroshard.measure.batches import synthesize_batch
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.timing import RepetitionPolicy, Timing, WallClockStopwatch, repeat

_BATCHES = 8
_SPARSE_TYPES = {"fp32": SparseType.FP32, "fp16": SparseType.FP16}


@dataclass(frozen=True)
class DenseTiming:
    """Measured cost of replicated tables on one rank, in ms."""

    forward: Timing
    backward: Timing
    optimizer: Timing
    total: Timing


def measure_replicated(spec: GroupSpec, policy: RepetitionPolicy) -> DenseTiming:
    """Measures forward, dense backward and SGD step of replicated tables on the CPU.

    Args:
        spec: the tables, with the batch of one rank.
        policy: how often to repeat.

    Raises:
        ValueError: the optimizer is not SGD, the only one this benchmark knows how to run densely.
    """
    if spec.optimizer != "sgd":
        raise ValueError(f"replicated tables are measured with sgd only, not {spec.optimizer}")
    rng = np.random.default_rng(spec.seed)
    batches = [synthesize_batch(spec, rng) for _ in range(_BATCHES)]
    tbe = DenseTableBatchedEmbeddingBagsCodegen(
        [(shard.rows, shard.dim) for shard in spec.shards],
        feature_table_map=[index for index, shard in enumerate(spec.shards) for _ in range(shard.num_features)],
        weights_precision=_SPARSE_TYPES[spec.data_type],
        use_cpu=True,
    )
    optimizer = torch.optim.SGD(tbe.parameters(), lr=0.01)
    gradient = torch.randn(spec.batch_size, sum(shard.dim * shard.num_features for shard in spec.shards))
    watch = WallClockStopwatch()

    def step(index: int) -> list[float]:
        batch = batches[index % len(batches)]
        optimizer.zero_grad()
        watch.start()
        output = tbe(batch.indices, batch.offsets, batch.per_sample_weights)
        watch.lap()
        output.backward(gradient)
        watch.lap()
        optimizer.step()
        watch.lap()
        return watch.laps_ms()

    laps = np.asarray(repeat(step, policy))
    forward, backward, step_lap = (Timing.of(lap.tolist()) for lap in laps.T)
    return DenseTiming(forward, backward, step_lap, Timing.of(laps.sum(axis=1).tolist()))
