"""From TorchRec's ``ShardingPlan`` back to a placement, so that any planner's plan can be simulated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.adapters.module_tables import KERNELS, ShardableTable
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    SPREAD_TYPES,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    TableOptions,
)

_TABLE_COLUMN_WISE = "table_column_wise"
_WRITTEN_AS = {**{kind: kind for kind in KERNELS}, _TABLE_COLUMN_WISE: COLUMN_WISE}


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
        UnsimulatedPlanError: the plan holds something other than table_wise, column_wise, table_column_wise and
            row_wise with the fused kernel, and data_parallel with the dense one.
    """
    shards: list[Shard] = []
    types: list[str] = []
    simulated = []
    for index, entry in enumerate(tables):
        sharding: Any = (plan.get_plan_for_module(entry.module_path) or {})[entry.name]
        kind, kernel = sharding.sharding_type, sharding.compute_kernel
        if KERNELS.get(_WRITTEN_AS.get(kind, "")) != kernel:
            raise UnsimulatedPlanError(
                f"table {entry.name!r} is {kind} with kernel {kernel}, which the cost models do not cover yet"
            )
        types.append(_WRITTEN_AS[kind])
        # table_column_wise runs column_wise's code, but as a lookup of its own, with its own TBE and collectives.
        module = f"{entry.table.module}/{kind}" if kind == _TABLE_COLUMN_WISE else entry.table.module
        simulated.append(replace(entry.table, module=module))
        if kind in SPREAD_TYPES:
            continue
        pieces = zip(sharding.sharding_spec.shards, sharding.ranks)
        shards += sorted(
            (Shard(index, piece.shard_offsets[1], piece.shard_sizes[1], rank) for piece, rank in pieces),
            key=lambda shard: shard.offset,
        )
    options = (TableOptions(tuple(KERNELS), 1),) * len(tables)
    memory = _NoMemory(cluster.world_size)
    problem = ShardingProblem(tuple(simulated), options, cluster, batch_size, memory)
    return problem, Placement(tuple(shards), tuple(types))


class _NoMemory:
    """Shards that take nothing, so that any plan fits."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        return 0.0, 0.0

    def spread(self, table: int, sharding_type: str) -> NDArray[np.float64]:
        """[ranks, 2] zeros."""
        return np.zeros((self._ranks, 2))
