"""Synthetic batches of a workload: each table with its own pooling factor and access skew."""

from __future__ import annotations

import itertools
from typing import Iterator, Sequence

import numpy as np
import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard.access import scatter_ranks
from torchrec_neuroshard.measure.batches import bag_lengths
from torchrec_neuroshard.workload import Workload


def synthesize_features(workload: Workload, batch_size: int, rng: np.random.Generator) -> KeyedJaggedTensor:
    """Draws the ids of ``batch_size`` samples; popular rows lie scattered over each table."""
    keys, values, lengths = [], [], []
    for table, features, pooling in zip(workload.tables, workload.features, workload.feature_pooling):
        for feature, pooling_factor in zip(features, pooling):
            bags = bag_lengths(pooling_factor, batch_size, False, rng)
            keys.append(feature)
            values.append(scatter_ranks(table.distribution.sample(int(bags.sum()), rng), table.num_embeddings))
            lengths.append(bags)
    return KeyedJaggedTensor(
        keys=keys,
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )


def synthesize_batches(
    workload: Workload, batch_size: int, dense_features: int, count: int, rng: np.random.Generator
) -> list[Batch]:
    """Draws ``count`` batches of one rank.

    The label depends on the dense features of its sample, so that there is something to learn.

    Args:
        workload: the tables.
        batch_size: samples of one rank.
        dense_features: columns of the dense input.
        count: number of batches.
        rng: give every rank a generator of its own.
    """
    batches = []
    for _ in range(count):
        dense = rng.standard_normal((batch_size, dense_features), dtype=np.float32)
        labels = (dense.sum(axis=1) + rng.standard_normal(batch_size) > 0).astype(np.float32)
        features = synthesize_features(workload, batch_size, rng)
        batches.append(Batch(torch.from_numpy(dense), features, torch.from_numpy(labels)))
    return batches


def cycle(batches: Sequence[Batch], count: int) -> Iterator[Batch]:
    """Serves ``count`` batches, over and over the given ones: drawing fresh ones would cost more than a step."""
    return itertools.islice(itertools.cycle(batches), count)
