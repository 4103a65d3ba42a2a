"""NeuroShardPerfEstimator: the cost models inside TorchRec's own planners."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from typing import Any, Mapping

import numpy as np
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Perf,
    Shard,
    ShardEstimator,
    ShardingOption,
    Topology,
)

from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.optimizers import optimizer_by_name
from torchrec_neuroshard.adapters.option_tables import OptionTables
from torchrec_neuroshard.adapters.plan_placement import NoMemory
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.adapters.topology import planning_cluster
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.costs.simulator import PlanSimulator, ShardCost
from torchrec_neuroshard.problem import (
    COLUMN_TYPES,
    FUSED,
    TABLE_COLUMN_WISE,
    TABLE_WISE,
    WIDTH_MULTIPLE,
    Pipeline,
    ShardingProblem,
    Spread,
    Table,
    TableOptions,
)

logger = logging.getLogger(__name__)


class NeuroShardPerfEstimator(ShardEstimator):
    """Predicts a shard's forward, backward and communication, alone on its rank, as TorchRec's ``Perf`` in ms.

    TorchRec's planners add costs up, so fusion is lost on them; :class:`NeuroShardPlanner` knows it, and
    :class:`NeuroShardPerfModel` rates their plans with it. All sharding types of the fused kernels (in device or host
    memory) and data-parallel tables are predicted, of EmbeddingBagCollections and EmbeddingCollections. For anything
    else (other kernels, data types and modules) the table's own table-wise prediction is scaled by the ratio that
    TorchRec's formula sees between the two, so that all options stay on one scale; this is said once.

    Args:
        topology: the machines.
        constraints: the user's constraints by table name.
        cost_model: as in :class:`NeuroShardPlanner`.
        table_stats: measured pooling factors and access distributions; they win over the options' input lengths.
        optimizer: sgd, adagrad, adam or rowwise_adagrad, for tables on which nothing is set.
        hardware: name of the hardware (see ``costs.hardware``); None detects it.

    Example::

        enumerator = EmbeddingEnumerator(topology, batch_size, estimator=[
            NeuroShardPerfEstimator(topology), EmbeddingStorageEstimator(topology)])
        planner = EmbeddingShardingPlanner(topology, batch_size, enumerator=enumerator)
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        cost_model: str | os.PathLike[str] | CostModel = "auto",
        table_stats: TableStats | None = None,
        optimizer: str | None = None,
        hardware: str | None = None,
    ) -> None:
        unlimited = np.full((topology.world_size, 2), np.inf)
        self._cluster = planning_cluster(topology, unlimited, hardware, Pipeline.SPARSE_DIST)
        self._read = OptionTables(self._cluster, constraints, table_stats, optimizer_by_name(optimizer or "sgd"))
        self._cost_model = resolve_cost_model(cost_model, self._cluster.device, self._cluster.hardware)
        self._formula = EmbeddingPerfEstimator(topology=topology, constraints=constraints)
        self._scaled: set[str] = set()

    def estimate(
        self,
        sharding_options: list[ShardingOption],
        sharder_data_map: Mapping[str, Any] | None = None,
        sharder_map: Mapping[str, Any] | None = None,
    ) -> None:
        """Sets ``shard.perf`` of every shard.

        Args:
            sharding_options: options with their shards.
            sharder_data_map: sharder data by module type, as TorchRec 1.7 and later pass it, or sharders, which earlier
                versions pass at this place.
            sharder_map: sharders by module type.
        """
        sharders: Mapping[str, Any] = sharder_data_map or sharder_map or {}
        maps = compat.estimate_arguments(sharders)
        for batch_size in sorted({option.batch_size for option in sharding_options}):
            options = [option for option in sharding_options if option.batch_size == batch_size]
            self._estimate(options, batch_size, sharders, maps)

    def _estimate(
        self, options: list[ShardingOption], batch_size: int, sharders: Mapping[str, Any], maps: dict[str, Any]
    ) -> None:
        """Sets the perf of options of one batch size, predicting each distinct shard once."""
        tables: dict[tuple[Any, ...], Table] = {}
        keys = [self._read.key(option) for option in options]
        for key, option in zip(keys, options):
            if key not in tables:
                fused_params = compat.fused_params_of(sharders.get(option.module_type_key))
                tables[key] = self._read.table(option, fused_params)
        simulator = self._simulator(tuple(tables.values()), batch_size)
        position = {key: number for number, key in enumerate(tables)}
        of_option = [position[key] for key in keys]
        simulator.kinds(  # all at once: one pass through the networks
            dict.fromkeys((table, width) for option, table in zip(options, of_option) for width in self._widths(option))
        )
        spread_costs: dict[tuple[int, Spread], tuple[ShardCost, ...]] = {}
        for option, table in zip(options, of_option):
            if not self._read.covers(option):
                self._scale(option, _to_perf(simulator.shard_cost(table, option.tensor.shape[1])), maps)
                continue
            spread = self._placed_spread(option)
            if spread is None:
                costs = tuple(simulator.shard_cost(table, width) for width in self._widths(option))
            else:
                if (table, spread) not in spread_costs:
                    spread_costs[table, spread] = simulator.spread_cost(table, spread)
                costs = spread_costs[table, spread]
            for shard, cost in zip(option.shards, costs):
                shard.perf = _to_perf(cost)

    def _placed_spread(self, option: ShardingOption) -> Spread | None:
        """How an option lies whose shards share collectives; the shards of others are predicted one by one."""
        # TWCW runs the same code as CW, wherever its shards lie.
        return None if option.sharding_type == TABLE_COLUMN_WISE else self._read.spread(option)

    def _widths(self, option: ShardingOption) -> list[int]:
        """Widths of column shards to predict: the option's, or the whole table's when it can only be scaled."""
        if not self._read.covers(option):
            return [int(option.tensor.shape[1])]
        if self._placed_spread(option) is not None:
            return []
        return [int(shard.size[1]) for shard in option.shards]

    def _simulator(self, tables: tuple[Table, ...], batch_size: int) -> PlanSimulator:
        allowed = tuple(
            TableOptions(COLUMN_TYPES, min(table.embedding_dim, WIDTH_MULTIPLE), (table.kernel,)) for table in tables
        )
        problem = ShardingProblem(tables, allowed, self._cluster, batch_size, NoMemory())
        return PlanSimulator(problem, self._cost_model)

    def _scale(self, option: ShardingOption, whole: Perf, maps: dict[str, Any]) -> None:
        """Prices an option nobody measured: the whole table's prediction times TorchRec's ratio of the two."""
        module = type(option.module[1]).__name__
        dtype = str(option.tensor.dtype).removeprefix("torch.")
        kind = f"{option.sharding_type} {dtype} tables of {module} with kernel {option.compute_kernel}"
        if kind not in self._scaled:
            self._scaled.add(kind)
            logger.warning(
                "No measured costs for %s: estimated from the table-wise prediction by the ratio of TorchRec's "
                "formula. Restrict ParameterConstraints to the kernels fused, fused_uvm, fused_uvm_caching and dense "
                "to avoid it.",
                kind,
            )
        reference = copy.deepcopy(option)
        reference.sharding_type, reference.partition_by, reference.compute_kernel = TABLE_WISE, "device", FUSED
        reference.cache_params = None
        reference._is_pooled = True  # predictions are of pooled lookups
        reference.shards = [Shard(size=list(option.tensor.shape), offset=[0, 0])]
        self._formula.estimate([option, reference], **maps)
        base = reference.shards[0].perf
        assert base is not None
        for shard in option.shards:
            assert shard.perf is not None
            shard.perf = Perf(
                **{
                    field.name: _ratio(
                        getattr(shard.perf, field.name), getattr(base, field.name), getattr(whole, field.name)
                    )
                    for field in dataclasses.fields(Perf)
                }
            )


def _to_perf(cost: ShardCost) -> Perf:
    return compat.make_perf(
        cost.forward_ms, cost.forward_comms_ms, cost.backward_ms, cost.backward_comms_ms, cost.input_dist_ms
    )


def _ratio(value: float, base: float, anchor: float) -> float:
    return anchor * value / base if base > 0 else value
