"""What tables that are spread over ranks add to each of them, before any shard is placed.

A row-wise table has a block of its rows on every rank: each rank looks up its share of the ids, and still produces all
bags at full width, which a reduce-scatter adds up (an all-gather brings the gradient back). Where rows are cut among
the ranks of a host alone, the reduce-scatter stays within the host, and an all-to-all between hosts follows. A
data-parallel table lies whole on every rank, which looks up its own samples alone; its dense gradient is summed by an
all-reduce. Columns that were put on a rank are served as any column shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.access import SCATTERED
from torchrec_neuroshard.costs.bucketize import bucketize_ms
from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.costs.hardware import hardware_spec
from torchrec_neuroshard.costs.row_wise import row_block_work
from torchrec_neuroshard.layout import Block
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_TYPES,
    ROW_WISE,
    TABLE_ROW_WISE,
    Cluster,
    ShardingProblem,
    Spread,
    Table,
)

# Among how many ranks types cut rows.
_ROW_BLOCKS: dict[str, Callable[[Cluster], int]] = {
    ROW_WISE: lambda cluster: cluster.world_size,
    TABLE_ROW_WISE: lambda cluster: cluster.ranks_per_host,
    GRID_SHARD: lambda cluster: cluster.ranks_per_host,
}


@dataclass(frozen=True)
class SpreadPart:
    """What the blocks of one spread table add to their ranks.

    Attributes:
        z: [blocks, z_dim] contributions to the sums of its group.
        ids: [blocks] ids per sample that travel to each block; none to replicas.
        columns: [blocks] output columns per sample that each block's rank sends by an all-to-all among all ranks. Rows
            that an unpooled table's blocks looked up are sent as they are; sums of pooled ones meet in other
            collectives.
    """

    z: NDArray[np.float64]
    ids: NDArray[np.float64]
    columns: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        problem: ShardingProblem,
        index: int,
        spread: Spread,
        contributions: Callable[[Sequence[ShardWork]], NDArray[np.float64]],
    ) -> SpreadPart:
        """Works out the blocks of a table.

        Args:
            problem: the tables and ranks.
            index: number of the table.
            spread: how it lies.
            contributions: of blocks' work to the sums of a group.
        """
        work, table = spread_work(problem, index, spread), problem.tables[index]
        replicas = spread.kind == DATA_PARALLEL
        outputs = [block.pooling_factor if table.unpooled else float(table.num_features) for block in work]
        travels = not replicas and (table.unpooled or spread.kind not in ROW_TYPES)
        columns = [travels * block.dim * output * table.wire_bytes / 4.0 for block, output in zip(work, outputs)]
        ids = [0.0 if replicas else block.pooling_factor for block in work]
        return cls(contributions(work), np.asarray(ids), np.asarray(columns))


@dataclass(frozen=True)
class Background:
    """What is on the ranks before any shard is placed.

    Attributes:
        sums: [ranks, groups, z_dim] contributions of the spread tables.
        ids: [lookups, ranks] ids per sample that each rank looks up.
        columns: [lookups, ranks] output columns of spread tables that travel by all-to-all, as those of shards do.
        comms_ms: [2] other collectives of the spread tables, forward and backward; sorting ids by blocks of rows, which
            every rank does alike, counts with the forward.
    """

    sums: NDArray[np.float64]
    ids: NDArray[np.float64]
    columns: NDArray[np.float64]
    comms_ms: NDArray[np.float64]

    @classmethod
    def of(
        cls,
        problem: ShardingProblem,
        z_dim: int,
        part_of: Callable[[int, Spread], SpreadPart],
        collectives: CollectiveModel | None,
    ) -> Background:
        """Sums up the spread tables of a problem.

        Args:
            problem: its ``spread`` says which they are.
            z_dim: length of a contribution.
            part_of: what each adds, given with how it lies.
            collectives: price theirs; None where contributions include them.
        """
        ranks = problem.cluster.world_size
        sums = np.zeros((ranks, len(problem.group_keys), z_dim))
        ids = np.zeros((len(problem.lookup_keys), ranks))
        columns = np.zeros_like(ids)
        for table, spread in enumerate(problem.spread):
            if spread is None:
                continue
            part = part_of(table, spread)
            rank = [block.rank for block in problem.blocks(table, spread)]
            np.add.at(sums[:, problem.group_of(table, spread.kind)], rank, part.z)
            lookup = problem.lookup_of(table, spread.kind)
            np.add.at(ids[lookup], rank, part.ids)
            np.add.at(columns[lookup], rank, part.columns)
        comms = np.zeros(2) if collectives is None else _comms_ms(problem, collectives)
        return cls(sums, ids, columns, comms)


def spread_work(problem: ShardingProblem, index: int, spread: Spread) -> tuple[ShardWork, ...]:
    """[blocks] what the TBEs do for the blocks of a spread table."""
    table = problem.tables[index]
    if spread.kind == DATA_PARALLEL:
        work = replace(ShardWork.whole(table, problem.batch_size), kernel="dense")
        return (work,) * problem.cluster.world_size

    def of_block(block: Block) -> ShardWork:
        first, last = block.first_row, block.first_row + block.rows
        if spread.kind in ROW_TYPES:
            return row_block_work(table, first, last, problem.global_batch_size, block.width)
        return replace(ShardWork.whole(table, problem.global_batch_size), dim=block.width)

    blocks = problem.blocks(index, spread)
    if table.id_order == SCATTERED:  # blocks of one size are alike
        alike = {(block.rows, block.width): block for block in blocks}
        known = {size: of_block(block) for size, block in alike.items()}
        return tuple(known[block.rows, block.width] for block in blocks)
    return tuple(of_block(block) for block in blocks)


def _comms_ms(problem: ShardingProblem, collectives: CollectiveModel) -> NDArray[np.float64]:
    """[2] forward and backward collectives, and sorting ids for them; a module's tables of one type share theirs."""
    result = np.zeros(2)
    for module in sorted({table.module for table in problem.tables}):
        of_module = {
            t: spread
            for t, spread in enumerate(problem.spread)
            if spread is not None and problem.tables[t].module == module
        }
        result += _row_wise_ms(problem, collectives, [t for t, spread in of_module.items() if spread.kind == ROW_WISE])
        for kind in (TABLE_ROW_WISE, GRID_SHARD):
            within = {t: spread for t, spread in of_module.items() if spread.kind == kind}
            result += _within_hosts_ms(problem, collectives, within)
        for kind, blocks in _ROW_BLOCKS.items():
            cut = [problem.tables[t] for t, spread in of_module.items() if spread.kind == kind]
            result[0] += _bucketize_ms(problem, cut, blocks(problem.cluster))
        replicas = [problem.tables[t] for t, spread in of_module.items() if spread.kind == DATA_PARALLEL]
        floats = sum(float(table.num_embeddings) * table.embedding_dim for table in replicas)
        if floats:
            shape = (problem.cluster.world_size, problem.cluster.local_world_size)
            result[1] += collectives.all_reduce(np.asarray([floats]), *shape)[0]
    return result


def _bucketize_ms(problem: ShardingProblem, tables: list[Table], blocks: int) -> float:
    """What each rank pays to sort its ids by blocks, for one module's tables of one type."""
    spec = hardware_spec(problem.cluster.hardware, problem.cluster.device)
    ids = problem.batch_size * sum(table.pooling_factor for table in tables)
    bags = problem.batch_size * sum(table.num_features for table in tables)
    return bucketize_ms(spec, ids, bags, blocks)


def _row_wise_ms(problem: ShardingProblem, collectives: CollectiveModel, tables: list[int]) -> NDArray[np.float64]:
    """[2] reduce-scatter and all-gather of one module's row-wise tables."""
    shape = (problem.cluster.world_size, problem.cluster.local_world_size)
    pooled = [problem.tables[t] for t in tables if not problem.tables[t].unpooled]
    if not pooled:
        return np.zeros(2)
    columns = np.asarray([sum(table.embedding_dim * table.outputs for table in pooled)])
    return np.concatenate(
        [
            collectives.reduce_scatter(problem.batch_size, columns, *shape),
            collectives.all_gather(problem.batch_size, columns, *shape),
        ]
    )


def _within_hosts_ms(
    problem: ShardingProblem, collectives: CollectiveModel, tables: dict[int, Spread]
) -> NDArray[np.float64]:
    """[2] collectives of one module's tables whose rows are cut within hosts.

    First ranks of a host meet, on the samples of all hosts; then the ranks of equal number on all hosts.
    """
    cluster = problem.cluster
    per_host, hosts = cluster.ranks_per_host, cluster.hosts
    columns = np.zeros(hosts)
    for table, spread in tables.items():
        for width, rank in spread.pieces:
            columns[rank // per_host] += width * problem.tables[table].outputs
    if not columns.any():
        return np.zeros(2)
    widest = columns.max(keepdims=True)
    within = (problem.batch_size * hosts, widest, per_host, per_host)
    result = np.concatenate([collectives.reduce_scatter(*within), collectives.all_gather(*within)])
    if hosts > 1:
        both = np.repeat(columns[None], 2, axis=0)
        result += collectives.all_to_alls(problem.batch_size, both, np.asarray([False, True]), 1)
    return result
