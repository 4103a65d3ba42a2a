"""Turns a placement into the fused groups that each rank runs, so that a plan can be measured.

TorchRec serves all shards of a rank that agree in (module, sharding type, data type, weightedness, optimizer)
with one TBE call; see :attr:`torchrec_neuroshard.problem.ShardingProblem.group_keys`.
"""

from __future__ import annotations

from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.problem import Placement, Shard, ShardingProblem, Table

# Types whose shards are whole columns, fused into a TBE that sees the batches of all ranks.
_COLUMN_TYPES = ("table_wise", "column_wise", "table_column_wise")


def rank_groups(problem: ShardingProblem, placement: Placement, seed: int = 0) -> list[list[GroupSpec]]:
    """Returns, for each rank, one spec per fused group, in a fixed order; a rank without shards has none.

    Args:
        problem: the tables, with their access distributions where known, and the batch size per rank.
        placement: where their columns lie; two shards of one table on one rank are two tables of its TBE.
        seed: seeds the synthetic batches; every group gets a seed of its own.

    Raises:
        ValueError: a table is written as a type whose shards are not whole columns (row-wise and its
            relatives, data_parallel): their cost is not that of a TBE call on the global batch.
    """
    for table, kind in zip(problem.tables, placement.sharding_types):
        if kind not in _COLUMN_TYPES:
            raise ValueError(f"table {table.name} is {kind}: only groups of {', '.join(_COLUMN_TYPES)} can be measured")
    members: list[dict[tuple[str, ...], list[Shard]]] = [{} for _ in range(problem.cluster.world_size)]
    for shard in sorted(placement.shards, key=lambda shard: (shard.table, shard.offset)):
        key = problem.tables[shard.table].group_key(placement.sharding_types[shard.table])
        members[shard.rank].setdefault(key, []).append(shard)
    return [
        [
            _group_spec(problem, groups[key], seed + rank + problem.cluster.world_size * number)
            for number, key in enumerate(sorted(groups))
        ]
        for rank, groups in enumerate(members)
    ]


def _group_spec(problem: ShardingProblem, shards: list[Shard], seed: int) -> GroupSpec:
    first = problem.tables[shards[0].table]
    return GroupSpec(
        batch_size=problem.global_batch_size,
        shards=tuple(_shard_spec(problem.tables[shard.table], shard.width) for shard in shards),
        optimizer=first.optimizer,
        data_type=first.data_type,
        weighted=first.weighted,
        pooling="none" if first.unpooled else "sum",
        seed=seed,
    )


def _shard_spec(table: Table, width: int) -> ShardSpec:
    access = None
    if table.access is not None:
        access = (tuple(table.access.counts.tolist()), tuple(table.access.masses.tolist()))
    return ShardSpec(
        rows=table.num_embeddings,
        dim=width,
        pooling_factor=table.pooling_factor,
        num_features=table.num_features,
        access=access,
    )
