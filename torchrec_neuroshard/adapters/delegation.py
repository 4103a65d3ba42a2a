"""Modules whose tables TorchRec's own planner places, before ours are placed around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner.planners import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import Enumerator, ParameterConstraints, PlannerError, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.adapters.compat import error_type, perf_parts, sharder_key
from torchrec_neuroshard.adapters.module_kinds import delegation_reason
from torchrec_neuroshard.adapters.module_tables import shardable_tables


@dataclass(frozen=True)
class Delegated:
    """What TorchRec's planner made of the modules that are left to it.

    Attributes:
        modules: module path -> (kind, number of tables, why it was delegated).
        plan: their part of the plan.
        options: their sharding options, with ranks and TorchRec's estimates.
        memory_bytes: [ranks, 2] HBM and DDR that they take.
        rank_ms: [ranks, 2] forward and backward, communication included, by TorchRec's formula.
    """

    modules: Mapping[str, tuple[str, int, str]]
    plan: ShardingPlan
    options: list[ShardingOption]
    memory_bytes: NDArray[np.float64]
    rank_ms: NDArray[np.float64]

    @property
    def sentences(self) -> list[str]:
        """What was delegated, and why."""
        return [
            f"TorchRec's planner placed the {tables} table(s) of module {path or '(root)'!r} ({kind}): {reason}. Their "
            "memory and TorchRec's estimate of their time count on each rank."
            for path, (kind, tables, reason) in self.modules.items()
        ]


def delegated_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> dict[str, tuple[str, int, str]]:
    """Module path -> (kind, number of tables, reason) of the modules that are left to TorchRec's planner."""
    result: dict[str, tuple[str, int, str]] = {}
    for path, child, _, _, _ in shardable_tables(module, sharders):
        reason = delegation_reason(child)
        if reason is not None:
            tables = result[path][1] if path in result else 0
            result[path] = type(child).__name__, tables + 1, reason
    return result


def delegate(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    topology: Topology,
    batch_size: int,
    constraints: dict[str, ParameterConstraints] | None,
    enumerator: Enumerator | None,
    timeout_seconds: float | None,
) -> Delegated:
    """Lets TorchRec's planner place the modules that are left to it.

    Args:
        module: the model.
        sharders: of all its modules.
        topology: with what the storage reservation leaves.
        batch_size: samples per rank.
        constraints: the user's constraints by table name.
        enumerator: the user's own; None takes TorchRec's.
        timeout_seconds: limit of TorchRec's search.

    Raises:
        PlannerError: TorchRec's planner finds no plan.
    """
    modules = delegated_modules(module, sharders)
    memory, rank_ms = np.zeros((topology.world_size, 2)), np.zeros((topology.world_size, 2))
    if not modules:
        return Delegated(modules, ShardingPlan({}), [], memory, rank_ms)
    keys = {sharder_key(type(module.get_submodule(path))) for path in modules}
    theirs = [sharder for sharder in sharders if sharder_key(sharder.module_type) in keys]
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(0.0),
        constraints=constraints,
        stats=[],
        timeout_seconds=None if timeout_seconds is None else max(1, int(timeout_seconds)),
    )
    try:
        plan = planner.plan(module, theirs)
    except PlannerError:
        raise
    except Exception as error:
        named = ", ".join(f"{path or '(root)'} ({kind})" for path, (kind, _, _) in modules.items())
        raise PlannerError(
            f"TorchRec's planner, which plans {named}, failed with {type(error).__name__}: {error}", error_type("OTHER")
        ) from error
    options = list(planner._best_plan or [])
    for option in options:
        for rank, shard in enumerate(option.shards):
            rank = rank if shard.rank is None else shard.rank
            memory[rank] += _memory(shard)
            rank_ms[rank] += _rank_ms(shard)
    return Delegated(modules, plan, options, memory, rank_ms)


def _memory(shard: Any) -> tuple[float, float]:
    return float(shard.storage.hbm), float(shard.storage.ddr)


def _rank_ms(shard: Any) -> tuple[float, float]:
    forward, backward, forward_comms, backward_comms = perf_parts(shard.perf)
    return forward + forward_comms, backward + backward_comms
