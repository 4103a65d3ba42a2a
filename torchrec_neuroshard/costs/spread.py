"""What tables that lie on all ranks, row-wise or data-parallel, add to each rank.

A row-wise table has a block of its rows on every rank: each rank looks up its share of the ids, and still produces all
bags at full width, which a reduce-scatter adds up (an all-gather brings the gradient back). A data-parallel table lies
whole on every rank, which looks up its own samples alone; its dense gradient is summed by an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.costs.row_wise import row_wise_work
from torchrec_neuroshard.problem import DATA_PARALLEL, ROW_WISE, ShardingProblem

# [ranks, z_dim] of a table, given as (table, sharding type).
Contributions = Callable[[int, str], NDArray[np.float64]]


@dataclass(frozen=True)
class Background:
    """What is on the ranks before any shard is placed.

    Attributes:
        sums: [ranks, groups, z_dim] contributions of the spread tables.
        ids: [lookups, ranks] ids per sample that each rank looks up.
        comms_ms: [2] collectives of the spread tables, forward and backward.
    """

    sums: NDArray[np.float64]
    ids: NDArray[np.float64]
    comms_ms: NDArray[np.float64]

    @classmethod
    def of(
        cls, problem: ShardingProblem, z_dim: int, contributions: Contributions, collectives: CollectiveModel | None
    ) -> Background:
        """Sums up the spread tables of a problem.

        Args:
            problem: its ``spread`` says which they are.
            z_dim: length of a contribution.
            contributions: of a table to each rank's sums.
            collectives: price theirs; None where contributions include them.
        """
        ranks = problem.cluster.world_size
        sums = np.zeros((ranks, len(problem.group_keys), z_dim))
        ids = np.zeros((len(problem.lookup_keys), ranks))
        for table, kind in enumerate(problem.spread):
            if kind:
                sums[:, problem.group_of(table, kind)] += contributions(table, kind)
                if kind == ROW_WISE:
                    ids[problem.lookup_of(table, kind)] += [
                        work.pooling_factor for work in spread_work(problem, table, kind)
                    ]
        comms = np.zeros(2) if collectives is None else _comms_ms(problem, collectives)
        return cls(sums, ids, comms)


def spread_work(problem: ShardingProblem, index: int, kind: str) -> tuple[ShardWork, ...]:
    """[ranks] what each rank's TBE does for a table that lies on all ranks."""
    table, ranks = problem.tables[index], problem.cluster.world_size
    if kind == ROW_WISE:
        return row_wise_work(table, ranks, problem.global_batch_size)
    work = ShardWork(
        rows=table.num_embeddings,
        dim=table.embedding_dim,
        pooling_factor=table.pooling_factor,
        num_features=table.num_features,
        batch_size=problem.batch_size,
        element_bytes=table.element_bytes,
        weighted=table.weighted,
        optimizer=table.optimizer,
        access=table.distribution,
        kernel="dense",
    )
    return (work,) * ranks


def _comms_ms(problem: ShardingProblem, collectives: CollectiveModel) -> NDArray[np.float64]:
    """[2] forward and backward collectives; each module's row-wise tables, and its replicas, share theirs."""
    cluster = problem.cluster
    shape = (cluster.world_size, cluster.local_world_size)
    result = np.zeros(2)
    for module in sorted({table.module for table in problem.tables}):
        of_module = [t for t, table in enumerate(problem.tables) if table.module == module and problem.is_spread(t)]
        columns = floats = 0.0
        for t in of_module:
            table = problem.tables[t]
            if problem.spread[t] == ROW_WISE:
                columns += table.embedding_dim * table.num_features
            elif problem.spread[t] == DATA_PARALLEL:
                floats += float(table.num_embeddings) * table.embedding_dim
        if columns:
            amount = np.asarray([columns])
            result[0] += collectives.reduce_scatter(problem.batch_size, amount, *shape)[0]
            result[1] += collectives.all_gather(problem.batch_size, amount, *shape)[0]
        if floats:
            result[1] += collectives.all_reduce(np.asarray([floats]), *shape)[0]
    return result
