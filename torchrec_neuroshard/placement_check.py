"""An independent check of placements, for tests and for plans that come from elsewhere."""

from __future__ import annotations

import numpy as np

from torchrec_neuroshard.layout import (
    DATA_PARALLEL,
    ROW_TYPES,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Placement,
    Spread,
)
from torchrec_neuroshard.problem import WIDTH_MULTIPLE, ShardingProblem


def check_placement(problem: ShardingProblem, placement: Placement) -> list[str]:
    """Independent check of a placement; returns what is wrong with it (empty when nothing is).

    Each element of each table lies on exactly one rank, or the table on all, widths and types are allowed, memory
    suffices.
    """
    problem = problem.with_kernels(placement.kernels)
    faults: list[str] = [
        f"{table.name}: kernel {table.kernel} is not allowed"
        for table, option, kind in zip(problem.tables, problem.options, placement.sharding_types)
        if table.kernel not in option.kernels and kind != DATA_PARALLEL  # replicas have none of these
    ]
    used = np.zeros((problem.cluster.world_size, 2))
    columns: dict[int, int] = dict.fromkeys(range(len(problem.tables)), 0)
    pieces: dict[int, int] = dict.fromkeys(columns, 0)
    for shard in sorted(placement.shards, key=lambda s: (s.table, s.offset)):
        name = problem.tables[shard.table].name
        if shard.offset != columns[shard.table]:
            faults.append(f"{name}: shard at column {shard.offset}, expected {columns[shard.table]}")
        if not 0 <= shard.rank < problem.cluster.world_size:
            faults.append(f"{name}: rank {shard.rank} does not exist")
            continue
        if shard.width < problem.tables[shard.table].embedding_dim and (
            shard.width % WIDTH_MULTIPLE or shard.width < problem.options[shard.table].min_width
        ):
            faults.append(f"{name}: width {shard.width} is not allowed")
        columns[shard.table] = shard.offset + shard.width
        pieces[shard.table] += 1
        used[shard.rank] += problem.shard_memory(shard.table, shard.width)
    for index, table in enumerate(problem.tables):
        kind, spread = placement.sharding_types[index], placement.spreads[index]
        expected = 0 if spread else table.embedding_dim
        if columns[index] != expected:
            faults.append(f"{table.name}: {columns[index]} of {expected} columns are placed")
        if spread:
            used += problem.spread_memory(index, spread)
            faults += [f"{table.name}: {fault}" for fault in _spread_faults(problem, index, spread)]
        if (spread.kind if spread else kind) != kind:
            faults.append(f"{table.name}: written as {kind}, but lies {spread}")
        if kind not in problem.options[index].sharding_types:
            faults.append(f"{table.name}: sharding type {kind} is not allowed")
        if kind == TABLE_WISE and pieces[index] > 1:
            faults.append(f"{table.name}: table_wise with {pieces[index]} shards")
    for rank in np.flatnonzero((used > problem.cluster.capacity * (1 + 1e-12)).any(axis=1)):
        faults.append(f"rank {rank}: {used[rank]} bytes used of {problem.cluster.capacity[rank]}")
    return faults


def _spread_faults(problem: ShardingProblem, index: int, spread: Spread) -> list[str]:
    """What is wrong with the blocks of a spread table."""
    table, cluster = problem.tables[index], problem.cluster
    blocks = problem.blocks(index, spread)
    if not all(0 <= block.rank < cluster.world_size for block in blocks):
        return [f"lies on ranks that do not exist: {spread}"]
    elements = float(table.num_embeddings) * table.embedding_dim
    copies = cluster.world_size if spread.kind == DATA_PARALLEL else 1
    faults = []
    if sum(float(block.rows) * block.width for block in blocks) != copies * elements:
        faults.append("its blocks do not make up the table")
    size = cluster.ranks_per_host
    if spread.kind in ROW_TYPES and any(rank % size or rank // size >= cluster.hosts for _, rank in spread.pieces):
        faults.append(f"not all first ranks of full hosts: {spread}")
    hosts = {block.rank // size for block in blocks}
    if spread.kind in (TABLE_ROW_WISE, TABLE_COLUMN_WISE) and len(hosts) > 1:
        faults.append(f"{spread.kind} on several hosts: {sorted(hosts)}")
    return faults
