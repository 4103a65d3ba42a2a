"""From a placement to TorchRec's ``ShardingOption`` list and ``ShardingPlan``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import numpy as np
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import Shard as TorchRecShard
from torchrec.distributed.planner.types import ShardingOption, Topology
from torchrec.distributed.types import CacheParams, ShardingPlan

from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.table_constraints import DENSE
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    TABLE_WISE,
    UVM_CACHING,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    Spread,
)

# Constraints that a plan carries over to the kernels, as TorchRec's enumerator does.
_CARRIED = (
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "feature_names",
    "output_dtype",
    "key_value_params",
)


def sharding_option(
    entry: ShardableTable, sharding_type: str, shards: Sequence[Shard], batch_size: int
) -> ShardingOption:
    """TorchRec's description of the column shards of one table, ranks included.

    Args:
        entry: the table.
        sharding_type: table_wise or column_wise.
        shards: its shards in column order.
        batch_size: samples per rank.
    """
    rows = entry.table.num_embeddings
    pieces = [TorchRecShard(size=[rows, shard.width], offset=[0, shard.offset], rank=shard.rank) for shard in shards]
    return _option(entry, sharding_type, pieces, batch_size)


def spread_option(entry: ShardableTable, spread: Spread, batch_size: int, cluster: Cluster) -> ShardingOption:
    """TorchRec's description of a spread table, cut as TorchRec's run time cuts it.

    Args:
        entry: the table.
        spread: how it lies.
        batch_size: samples per rank.
        cluster: the ranks.
    """
    table = entry.table
    blocks = spread.blocks(table.num_embeddings, table.embedding_dim, cluster.world_size, cluster.ranks_per_host)
    pieces = [
        TorchRecShard(size=[block.rows, block.width], offset=[block.first_row, block.offset], rank=block.rank)
        for block in blocks
    ]
    return _option(entry, spread.kind, pieces, batch_size)


def _option(entry: ShardableTable, sharding_type: str, shards: list[TorchRecShard], batch_size: int) -> ShardingOption:
    carried: dict[str, Any] = {}
    if entry.constraints is not None:
        values = {name: getattr(entry.constraints, name, None) for name in _CARRIED}
        carried = {name: value for name, value in values.items() if value is not None}
    if entry.table.kernel == UVM_CACHING:
        carried["cache_params"] = replace(
            carried.get("cache_params") or CacheParams(), load_factor=entry.table.load_factor
        )
    return ShardingOption(
        name=entry.name,
        tensor=entry.parameter,
        module=(entry.module_path, entry.module),
        input_lengths=list(entry.input_lengths),
        batch_size=batch_size,
        compute_kernel=DENSE if sharding_type == DATA_PARALLEL else entry.table.kernel,
        sharding_type=sharding_type,
        partition_by=get_partition_by_type(sharding_type),
        shards=shards,
        is_pooled=not entry.table.unpooled,
        **carried,
    )


def option_of_widths(entry: ShardableTable, widths: Sequence[int], batch_size: int) -> ShardingOption:
    """A table with a shard of each width, to be estimated: TorchRec estimates column shards one by one.

    Args:
        entry: the table.
        widths: columns of each shard; they need not add up to the table's.
        batch_size: samples per rank.
    """
    kind = COLUMN_WISE if COLUMN_WISE in entry.sharding_types else TABLE_WISE
    option = sharding_option(entry, kind, [], batch_size)
    option.shards = [TorchRecShard(size=[entry.table.num_embeddings, width], offset=[0, 0]) for width in widths]
    return option


def one_shard_per_rank(problem: ShardingProblem, placement: Placement) -> Placement:
    """Joins the shards that a table has on one rank, by reordering its columns.

    One wide lookup is never slower than two narrow ones, nor larger. And TorchRec (up to 1.8 at least) slices the
    parameter of a table's shards on one rank as if all were as wide as the first: unequal ones fail at sharding
    time, or overlap the next table.

    Args:
        problem: what was planned.
        placement: any placement; returned as it is when no rank holds two shards of a table.
    """
    pieces: dict[tuple[int, int], int] = {}  # (table, rank) -> width, in the order of the first column
    for shard in sorted(placement.shards, key=lambda shard: (shard.table, shard.offset)):
        pieces[shard.table, shard.rank] = pieces.get((shard.table, shard.rank), 0) + shard.width
    if len(pieces) == len(placement.shards):
        return placement
    offsets = [0] * len(problem.tables)
    counts = [0] * len(problem.tables)
    shards: list[Shard] = []
    for (table, rank), width in pieces.items():
        shards.append(Shard(table, offsets[table], width, rank))
        offsets[table] += width
        counts[table] += 1
    types = problem.spread_as(placement.spreads).sharding_types([count > 1 for count in counts])
    return replace(placement, shards=tuple(shards), sharding_types=types)


def sharding_options(
    tables: Sequence[ShardableTable], placement: Placement, batch_size: int, cluster: Cluster
) -> list[ShardingOption]:
    """One option per table: what TorchRec's planner calls its best plan."""
    shards: list[list[Shard]] = [[] for _ in tables]
    for shard in sorted(placement.shards, key=lambda shard: (shard.table, shard.offset)):
        shards[shard.table].append(shard)
    return [
        sharding_option(entry, kind, pieces, batch_size)
        if spread is None
        else spread_option(entry, spread, batch_size, cluster)
        for entry, kind, pieces, spread in zip(tables, placement.sharding_types, shards, placement.spreads)
    ]


def sharding_plan(
    tables: Sequence[ShardableTable], placement: Placement, topology: Topology, batch_size: int
) -> ShardingPlan:
    """The plan that ``DistributedModelParallel`` takes, for a placement of the tables."""
    cluster = Cluster(
        topology.world_size, topology.local_world_size, topology.compute_device, np.zeros((topology.world_size, 2))
    )
    return to_sharding_plan(sharding_options(tables, placement, batch_size, cluster), topology)
