"""From TorchRec's plans and sharding options back to a placement, so that any planner's plan can be simulated."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.table_constraints import DENSE, SHARDING_TYPES
from torchrec_neuroshard.problem import (
    DATA_PARALLEL,
    EVERYWHERE_TYPES,
    FUSED,
    PLANNED_KERNELS,
    ROW_TYPES,
    SPREAD_TYPES,
    UVM_CACHING,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    Spread,
    TableOptions,
)

DEFAULT_LOAD_FACTOR = 0.2  # FBGEMM's, where a plan does not say


class UnsimulatedPlanError(ValueError):
    """A plan with a sharding type or kernel that the simulator does not know yet; the message names the table."""


def simulated_problem(
    plan: ShardingPlan, tables: Sequence[ShardableTable], cluster: Cluster, batch_size: int
) -> tuple[ShardingProblem, Placement]:
    """The problem and the placement that stand for a plan in ``PlanSimulator``; memory is not accounted.

    Args:
        plan: a plan of all the tables.
        tables: the tables, as :func:`collect_tables` found them.
        cluster: the ranks.
        batch_size: samples per rank.

    Raises:
        UnsimulatedPlanError: the plan holds another kernel than the fused ones, and dense for data_parallel tables.
    """
    shards: list[Shard] = []
    types: list[str] = []
    spreads: list[Spread | None] = []
    kernels: list[tuple[str, float]] = []
    for index, entry in enumerate(tables):
        sharding: Any = (plan.get_plan_for_module(entry.module_path) or {})[entry.name]
        kind, kernel = sharding.sharding_type, sharding.compute_kernel
        if kind not in SHARDING_TYPES or kernel not in ((DENSE,) if kind == DATA_PARALLEL else PLANNED_KERNELS):
            raise UnsimulatedPlanError(
                f"table {entry.name!r} is {kind} with kernel {kernel}, which the cost models do not cover yet"
            )
        types.append(kind)
        load_factor = (sharding.cache_params and sharding.cache_params.load_factor) or DEFAULT_LOAD_FACTOR
        kernels.append((kernel, load_factor if kernel == UVM_CACHING else 0.0) if kernel != DENSE else (FUSED, 0.0))
        if kind in SPREAD_TYPES:
            spec = sharding.sharding_spec  # None for data_parallel
            pieces = [(shard.shard_sizes[1], rank) for shard, rank in zip(spec.shards, sharding.ranks)] if spec else []
            spreads.append(spread_of(kind, pieces, cluster))
            continue
        spreads.append(None)
        shards += sorted(
            (
                Shard(index, piece.shard_offsets[1], piece.shard_sizes[1], rank)
                for piece, rank in zip(sharding.sharding_spec.shards, sharding.ranks)
            ),
            key=lambda shard: shard.offset,
        )
    options = (TableOptions(SHARDING_TYPES, 1, PLANNED_KERNELS),) * len(tables)
    memory = NoMemory()
    simulated = tuple(entry.with_kernel(*kernel).table for entry, kernel in zip(tables, kernels))
    problem = ShardingProblem(simulated, options, cluster, batch_size, memory)
    return problem, Placement(tuple(shards), tuple(types), tuple(spreads))


def spread_of(kind: str, pieces: Sequence[tuple[int, int]], cluster: Cluster) -> Spread:
    """How a spread table lies.

    Args:
        kind: its sharding type.
        pieces: (columns, rank) of its shards, in TorchRec's order.
        cluster: the ranks.
    """
    if kind in EVERYWHERE_TYPES:
        return Spread(kind)
    if kind in ROW_TYPES:  # the blocks of a piece follow each other
        size = cluster.ranks_per_host
        pieces = [(width, rank // size * size) for width, rank in pieces[::size]]
    return Spread(kind, tuple(pieces))


def option_placement(options: Sequence[ShardingOption], cluster: Cluster) -> Placement:
    """The placement that stands for sharding options with ranks, table by table.

    Args:
        options: one for each table, of types and kernels that the simulator knows.
        cluster: the ranks.
    """
    shards: list[Shard] = []
    spreads: list[Spread | None] = []
    kernels: list[tuple[str, float]] = []
    for table, option in enumerate(options):
        kernels.append(option_kernel(option))
        pieces = [(int(shard.size[1]), int(shard.rank or 0)) for shard in option.shards]
        if option.sharding_type in SPREAD_TYPES:
            spreads.append(spread_of(option.sharding_type, pieces, cluster))
            continue
        spreads.append(None)
        offsets = [int(shard.offset[1]) for shard in option.shards]
        shards += sorted(
            (Shard(table, offset, *piece) for offset, piece in zip(offsets, pieces)), key=lambda shard: shard.offset
        )
    types = tuple(option.sharding_type for option in options)
    return Placement(tuple(shards), types, tuple(spreads), tuple(kernels))


def option_kernel(option: ShardingOption) -> tuple[str, float]:
    """(kernel, load factor) of an option, as a problem's tables have them."""
    if option.compute_kernel == DENSE:
        return FUSED, 0.0
    load_factor = option.cache_load_factor or DEFAULT_LOAD_FACTOR
    return option.compute_kernel, load_factor if option.compute_kernel == UVM_CACHING else 0.0


class NoMemory:
    """Shards that take nothing, so that any plan fits."""

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """Returns zeros."""
        return 0.0, 0.0

    def spread(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[1, 2] zeros, for any number of blocks."""
        return np.zeros((1, 2))
