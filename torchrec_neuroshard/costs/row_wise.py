"""Row-wise sharding as cost models see it: what the TBE of each rank does for its block of a table's rows.

TorchRec cuts a table over R ranks into blocks of exactly ``ceil(rows / R)`` rows; the last block that has any is
smaller, and those behind it are empty (TorchRec issue 1861: any other cut is silently wrong). Every id goes to the rank
whose block holds its row. Each rank produces *all* bags of the global batch at full width, partial sums over its own
rows, which a reduce-scatter adds up: so lookups are divided among the ranks, and bags and output are not.
"""

from __future__ import annotations

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.problem import Table


def row_blocks(rows: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """[ranks] (first row, row behind the last) of each rank's block; empty blocks are (rows, rows).

    Args:
        rows: rows of the table.
        ranks: ranks that share them; for a ``table_row_wise`` table those of its host.
    """
    if rows < 1 or ranks < 1:
        raise ValueError(f"need at least one row and one rank, got {rows} and {ranks}")
    size = -(-rows // ranks)
    return tuple((min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(ranks))


def row_wise_work(table: Table, ranks: int, global_batch_size: int) -> tuple[ShardWork, ...]:
    """[ranks] what each rank's TBE does for the table.

    Shares and distributions are expectations. Where ids are scattered, which block holds a very hot row is not known:
    the block that does gets more than its share.

    Args:
        table: the table; its ``id_order`` says where its popular rows lie.
        ranks: ranks among which the rows are cut.
        global_batch_size: samples of all ranks together.

    Returns:
        The shards' work. An empty block stands as one row that nobody looks up: TorchRec puts it into the TBE all the
        same, and it zero-fills its bags.
    """
    work = []
    for first, last in row_blocks(table.num_embeddings, ranks):
        if first == last:
            rows, share, access = 1, 0.0, AccessDistribution.zipf(1, 0.0)
        else:
            rows = last - first
            share, access = table.distribution.row_block(first, last, table.num_embeddings, table.id_order)
        work.append(
            ShardWork(
                rows=rows,
                dim=table.embedding_dim,
                pooling_factor=share * table.pooling_factor,
                num_features=table.num_features,
                batch_size=global_batch_size,
                element_bytes=table.element_bytes,
                weighted=table.weighted,
                optimizer=table.optimizer,
                access=access,
            )
        )
    return tuple(work)
