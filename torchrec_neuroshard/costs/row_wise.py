"""Row-wise sharding as cost models see it: what a TBE does for a block of a table's rows.

TorchRec cuts a table into equal blocks (:func:`~torchrec_neuroshard.layout.row_blocks`). Every id goes to the rank
whose block holds its row. Each rank produces *all* bags of the global batch at full width, partial sums over its own
rows, which a reduce-scatter adds up: so lookups are divided among the ranks, and bags and output are not. Of an
unpooled table each rank returns the rows that it looked up.
"""

from __future__ import annotations

from dataclasses import replace

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.layout import row_blocks
from torchrec_neuroshard.problem import Table


def row_block_work(table: Table, first: int, last: int, global_batch_size: int, width: int | None = None) -> ShardWork:
    """What a TBE does for rows ``first`` to ``last`` (excluded) of the table.

    Shares and distributions are expectations. Where ids are scattered, which block holds a very hot row is not known:
    the block that does gets more than its share.

    Args:
        table: the table; its ``id_order`` says where its popular rows lie.
        first, last: the rows. An empty block stands as one row that nobody looks up: TorchRec puts it into the TBE all
            the same, and it zero-fills its bags.
        global_batch_size: samples of all ranks together.
        width: columns of the block; None for all.
    """
    if first == last:
        rows, share, access = 1, 0.0, AccessDistribution.zipf(1, 0.0)
    else:
        rows = last - first
        share, access = table.distribution.row_block(first, last, table.num_embeddings, table.id_order)
    return replace(
        ShardWork.whole(table, global_batch_size),
        rows=rows,
        dim=table.embedding_dim if width is None else width,
        pooling_factor=share * table.pooling_factor,
        access=access,
    )


def row_wise_work(table: Table, ranks: int, global_batch_size: int) -> tuple[ShardWork, ...]:
    """[ranks] what each rank's TBE does for a table whose rows are cut among them."""
    blocks = row_blocks(table.num_embeddings, ranks)
    return tuple(row_block_work(table, first, last, global_batch_size) for first, last in blocks)
