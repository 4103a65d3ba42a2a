"""Sharding tasks as NeuroShard draws them: random tables of a fixed pool, random dims, a limit on their total size.

The paper draws from Meta's 856 published tables. Of those only aggregates could be had here (the files of single tables
lie in Git LFS), so tables come from this package's pool of public and synthetic ones
(:func:`torchrec_neuroshard.measure.pool.base_tables`), rows and pooling factors as they are.

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868, section 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.measure.pool import base_tables
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    WIDTH_MULTIPLE,
    Cluster,
    ShardingProblem,
    Table,
    TableOptions,
)

GLOBAL_BATCH_SIZE = 65_536
DIMS = (4, 8, 16, 32, 64, 128)
RANK_BYTES = 4 << 30


@dataclass(frozen=True)
class TaskLimits:
    """What the tasks of one number of ranks look like.

    Attributes:
        fewest_tables: least number of tables.
        most_tables: largest number of tables.
        total_bytes: bytes that the weights of all tables take at most.
    """

    fewest_tables: int
    most_tables: int
    total_bytes: int


LIMITS: dict[int, TaskLimits] = {4: TaskLimits(10, 59, 15 << 30), 8: TaskLimits(20, 120, 30 << 30)}


@dataclass(frozen=True)
class WeightBytes:
    """Memory of a shard: its weights, in host memory.

    Attributes:
        column_bytes: [tables] bytes of one column of each table.
    """

    column_bytes: tuple[float, ...]

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """(HBM, DDR) bytes of a shard of ``width`` columns."""
        return 0.0, self.column_bytes[table] * width


def paper_task(world_size: int, index: int) -> ShardingProblem:
    """The ``index``-th task on 4 or 8 ranks.

    Args:
        world_size: ranks, a key of :data:`LIMITS`.
        index: of the task, from 0.

    Raises:
        ValueError: there are no tasks for so many ranks, or the index is negative.
    """
    if world_size not in LIMITS:
        raise ValueError(f"tasks are for {' or '.join(map(str, LIMITS))} ranks, not {world_size}")
    if index < 0:
        raise ValueError(f"tasks are counted from 0, got {index}")
    limits = LIMITS[world_size]
    # RandomState, unlike Generator, promises the same stream in every version of NumPy.
    rng = np.random.RandomState([world_size, index])
    count = int(rng.randint(limits.fewest_tables, limits.most_tables + 1))
    return weights_only_problem(_draw_tables(count, limits.total_bytes, rng), world_size, float(RANK_BYTES))


def weights_only_problem(tables: tuple[Table, ...], world_size: int, rank_bytes: float) -> ShardingProblem:
    """Tables on CPU ranks of one host, where memory holds weights alone and any column split is allowed.

    Args:
        tables: the tables.
        world_size: ranks, which share :data:`GLOBAL_BATCH_SIZE` samples.
        rank_bytes: bytes of weights that a rank holds.
    """
    capacity = np.zeros((world_size, 2))
    capacity[:, 1] = rank_bytes
    links = HARDWARE["generic_cpu"]
    return ShardingProblem(
        tables=tables,
        options=tuple(TableOptions((TABLE_WISE, COLUMN_WISE), WIDTH_MULTIPLE) for _ in tables),
        cluster=Cluster(
            world_size,
            world_size,
            "cpu",
            capacity,
            intra_host_gbps=links.intra_host_gbps,
            inter_host_gbps=links.inter_host_gbps,
        ),
        batch_size=GLOBAL_BATCH_SIZE // world_size,
        memory=WeightBytes(tuple(float(table.num_embeddings * table.element_bytes) for table in tables)),
    )


def _draw_tables(count: int, total_bytes: int, rng: np.random.RandomState) -> tuple[Table, ...]:
    """Draws all tables anew until their weights take at most ``total_bytes``."""
    pool = base_tables()
    rows = np.asarray([base.num_embeddings for base in pool], dtype=np.int64)
    while True:
        chosen = rng.randint(len(pool), size=count)
        dims = np.asarray(DIMS)[rng.randint(len(DIMS), size=count)]
        if 4 * int((rows[chosen] * dims).sum()) <= total_bytes:
            break
    return tuple(
        Table(f"t{number}", pool[base].num_embeddings, int(dim), pool[base].pooling_factor)
        for number, (base, dim) in enumerate(zip(chosen.tolist(), dims.tolist()))
    )
