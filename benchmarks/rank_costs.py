"""What each rank of a plan runs, and what its collectives cost at one stated bandwidth.

Shards of one table on different ranks each send the table's ids again, so the input all-to-all is priced too. Row-wise
tables have a reduce-scatter and an all-gather, both around a ring: each rank passes on (R - 1) / R of the global
batch's output, whatever the backend (gloo reduce-scatters by an all-reduce of twice the bytes).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.row_blocks import RowBlock, RowWiseTables
from torchrec_neuroshard.costs.row_wise import row_wise_work
from torchrec_neuroshard.measure.plan_groups import rank_groups
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    EVERYWHERE_TYPES,
    ROW_WISE,
    Cluster,
    Placement,
    ShardingProblem,
    Table,
    TableOptions,
)
from torchrec_neuroshard.workload import Workload

BANDWIDTH_GB_PER_S = 12.5  # per rank and direction, for every collective of every planner

_ID_BYTES, _FLOAT_BYTES = 8, 4


@dataclass(frozen=True)
class RankWork:
    """What the ranks of a plan run.

    Attributes:
        groups: [ranks] fused groups of each rank's column shards, each seeing the batches of all ranks.
        row_wise: fused groups of row-wise tables, of which every rank runs its block and bucketizes its own ids.
        replicated: data_parallel tables as dense groups that every rank runs on its own batch.
        collectives_ms: input, forward and backward collectives at :data:`BANDWIDTH_GB_PER_S`.
    """

    groups: tuple[tuple[GroupSpec, ...], ...]
    row_wise: tuple[RowWiseTables, ...]
    replicated: tuple[GroupSpec, ...]
    collectives_ms: float

    def of_rank(self, rank: int) -> tuple[GroupSpec | RowBlock, ...]:
        """What the TBEs of a rank run on the batches of all ranks."""
        return (*self.groups[rank], *(RowBlock(tables, rank) for tables in self.row_wise))


def rank_work(workload: Workload, placement: Placement, world_size: int, batch_size: int, seed: int = 0) -> RankWork:
    """Works out what is to be measured.

    Args:
        workload: the tables.
        placement: the plan.
        world_size: ranks.
        batch_size: samples per rank.
        seed: of the synthetic batches. Equal groups of different plans get equal batches.

    Raises:
        ValueError: the plan has a sequence table on all ranks, which cannot be measured.
    """
    kept = [index for index, kind in enumerate(placement.sharding_types) if kind not in EVERYWHERE_TYPES]
    position = {table: number for number, table in enumerate(kept)}
    problem = ShardingProblem(
        tables=tuple(workload.tables[index] for index in kept),
        options=tuple(TableOptions(("column_wise",), 4) for _ in kept),
        cluster=Cluster(world_size, world_size, "cpu", np.full((world_size, 2), np.inf)),
        batch_size=batch_size,
        memory=lambda table, width: (0.0, 0.0),
    )
    placed = Placement(
        tuple(replace(shard, table=position[shard.table]) for shard in placement.shards),
        tuple(placement.sharding_types[index] for index in kept),
    )
    groups = tuple(
        tuple(_seeded(group, seed) for group in rank if group.shards) for rank in rank_groups(problem, placed)
    )
    return RankWork(
        groups,
        _row_wise_tables(workload, placement, world_size, batch_size, seed),
        _replicated_groups(workload, placement, batch_size, seed),
        collectives_ms(workload, placement, world_size, batch_size),
    )


def collectives_ms(workload: Workload, placement: Placement, world_size: int, batch_size: int) -> float:
    """Time of a plan's collectives: per sharding type, the bytes of the rank that moves most over the bandwidth.

    Lengths of bags, which travel with the ids, are left out of every type.
    """
    milliseconds_per_byte = 1e3 / (BANDWIDTH_GB_PER_S * 1e9)
    total = 0.0
    for kind in sorted(set(placement.sharding_types) - set(EVERYWHERE_TYPES)):
        columns, ids = np.zeros(world_size), np.zeros(world_size)
        for shard in placement.shards:
            if placement.sharding_types[shard.table] == kind:
                table = workload.tables[shard.table]
                columns[shard.rank] += shard.width * table.num_features
                ids[shard.rank] += table.pooling_factor
        input_bytes = _all_to_all_bytes(ids * batch_size * _ID_BYTES)
        output_bytes = _all_to_all_bytes(columns * batch_size * _FLOAT_BYTES)
        total += (input_bytes + 2 * output_bytes) * milliseconds_per_byte
    total += _row_wise_bytes(workload, placement, world_size, batch_size) * milliseconds_per_byte
    replicated = sum(
        table.num_embeddings * table.embedding_dim * table.element_bytes
        for table, kind in zip(workload.tables, placement.sharding_types)
        if kind == DATA_PARALLEL
    )
    all_reduce_bytes = 2 * replicated * (world_size - 1) / world_size
    return total + all_reduce_bytes * milliseconds_per_byte


def _row_wise_bytes(workload: Workload, placement: Placement, world_size: int, batch_size: int) -> float:
    """Bytes that the busiest rank moves for row-wise tables: ids to their blocks, reduce-scatter, all-gather."""
    ids, columns = np.zeros(world_size), 0.0
    for table, kind in zip(workload.tables, placement.sharding_types):
        if kind == ROW_WISE:
            ids += [work.pooling_factor for work in row_wise_work(table, world_size, batch_size * world_size)]
            columns += table.embedding_dim * table.num_features
    output_bytes = batch_size * columns * _FLOAT_BYTES * (world_size - 1)
    return _all_to_all_bytes(ids * batch_size * _ID_BYTES) + 2 * output_bytes


def _all_to_all_bytes(per_peer: np.ndarray) -> float:
    """Bytes of the busiest rank when rank r exchanges ``per_peer[r]`` bytes with each other rank."""
    outgoing = per_peer * (len(per_peer) - 1)
    incoming = per_peer.sum() - per_peer
    return float(np.maximum(outgoing, incoming).max())


def _row_wise_tables(
    workload: Workload, placement: Placement, world_size: int, batch_size: int, seed: int
) -> tuple[RowWiseTables, ...]:
    members: dict[tuple[str, ...], list[Table]] = {}
    for table, kind in zip(workload.tables, placement.sharding_types):
        if kind == ROW_WISE:
            members.setdefault(table.group_key(kind), []).append(table)
    return tuple(
        RowWiseTables(
            _seeded(_whole_group(members[key], batch_size * world_size), seed),
            tuple(_turn(table) for table in members[key]),
            world_size,
        )
        for key in sorted(members)
    )


def _turn(table: Table) -> int | None:
    """How far a table's scattered rows are turned: by chance, but alike in every plan and round."""
    if table.id_order != "scattered":
        return None
    digest = hashlib.sha256(f"{table.module}/{table.name}".encode()).hexdigest()
    return int(digest[:12], 16) % table.num_embeddings


def _replicated_groups(workload: Workload, placement: Placement, batch_size: int, seed: int) -> tuple[GroupSpec, ...]:
    members: dict[tuple[str, bool], list[Table]] = {}
    for table, kind in zip(workload.tables, placement.sharding_types):
        if kind == DATA_PARALLEL:
            members.setdefault((table.data_type, table.weighted), []).append(table)
    groups = (_whole_group(members[key], batch_size, "dense") for key in sorted(members))
    return tuple(_seeded(group, seed) for group in groups)


def _whole_group(tables: list[Table], batch_size: int, kernel: str = "fused") -> GroupSpec:
    """Whole tables, alike in all that one TBE needs them to be alike in, on a batch.

    Raises:
        ValueError: a table is unpooled.
    """
    shards = []
    for table in tables:
        if table.unpooled:
            raise ValueError(f"{table.name}: sequence tables are measured as column shards only, not on all ranks")
        access = table.access
        shards.append(
            ShardSpec(
                table.num_embeddings,
                table.embedding_dim,
                table.pooling_factor,
                table.num_features,
                access=None if access is None else (tuple(access.counts.tolist()), tuple(access.masses.tolist())),
            )
        )
    first = tables[0]
    return GroupSpec(batch_size, tuple(shards), first.optimizer, first.data_type, first.weighted, kernel=kernel)


def _seeded(group: GroupSpec, seed: int) -> GroupSpec:
    """The group with a seed that depends on its content and on ``seed`` only."""
    text = json.dumps([replace(group, seed=0).to_json(), seed], sort_keys=True)
    return replace(group, seed=int(hashlib.sha256(text.encode()).hexdigest()[:8], 16) % 2**31)
