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
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_neuroshard.access import ID_ORDERS
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.module_tables import DATA_TYPES
from torchrec_neuroshard.adapters.optimizers import optimizer_by_name, optimizer_of
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.adapters.topology import planning_cluster
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.costs.simulator import PlanSimulator, ShardCost
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    FUSED,
    TABLE_WISE,
    WIDTH_MULTIPLE,
    Pipeline,
    ShardingProblem,
    Table,
    TableOptions,
)

logger = logging.getLogger(__name__)

# TWCW runs the same code as CW.
_PRICED_TYPES = (TABLE_WISE, COLUMN_WISE, "table_column_wise")


class NeuroShardPerfEstimator(ShardEstimator):
    """Predicts a shard's forward, backward and communication, alone on its rank, as TorchRec's ``Perf`` in ms.

    TorchRec's planners add costs up, so fusion is lost on them; :class:`NeuroShardPlanner` knows it. Table-wise and
    column-wise shards of the fused kernel are predicted. For anything else (other sharding types and kernels,
    EmbeddingCollection) the table's own table-wise prediction is scaled by the ratio that TorchRec's formula sees
    between the two, so that all options stay on one scale; this is said once.

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
        self._constraints = constraints
        self._table_stats = table_stats
        self._optimizer = optimizer_by_name(optimizer or "sgd")
        unlimited = np.full((topology.world_size, 2), np.inf)
        self._cluster = planning_cluster(topology, unlimited, hardware, Pipeline.SPARSE_DIST)
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
        """Sets the perf of options of one batch size, predicting each distinct (table, width) once."""
        tables: dict[str, Table] = {}
        for option in options:
            if option.fqn not in tables:
                fused_params = compat.fused_params_of(sharders.get(option.module_type_key))
                tables[option.fqn] = self._table(option, fused_params)
        simulator = self._simulator(tuple(tables.values()), batch_size)
        index = {fqn: position for position, fqn in enumerate(tables)}
        wanted = dict.fromkeys((index[option.fqn], width) for option in options for width in self._widths(option))
        simulator.kinds(wanted)  # all at once: one pass through the networks
        perfs = {(table, width): _to_perf(simulator.shard_cost(table, width)) for table, width in wanted}
        for option in options:
            table = index[option.fqn]
            if self._is_priced(option):
                for shard, width in zip(option.shards, self._widths(option)):
                    shard.perf = copy.copy(perfs[table, width])
            else:
                self._scale(option, perfs[table, option.tensor.shape[1]], maps)

    def _widths(self, option: ShardingOption) -> list[int]:
        """Widths to predict for an option: its shards', or the whole table's when it can only be scaled."""
        if self._is_priced(option):
            return [int(shard.size[1]) for shard in option.shards]
        return [int(option.tensor.shape[1])]

    def _is_priced(self, option: ShardingOption) -> bool:
        return (
            option.sharding_type in _PRICED_TYPES
            and option.compute_kernel == FUSED
            and option.is_pooled
            and option.tensor.dtype in DATA_TYPES
        )

    def _simulator(self, tables: tuple[Table, ...], batch_size: int) -> PlanSimulator:
        allowed = tuple(
            TableOptions((TABLE_WISE, COLUMN_WISE), min(table.embedding_dim, WIDTH_MULTIPLE)) for table in tables
        )
        problem = ShardingProblem(tables, allowed, self._cluster, batch_size, _no_memory)
        return PlanSimulator(problem, self._cost_model)

    def _table(self, option: ShardingOption, fused_params: Mapping[str, Any]) -> Table:
        rows, dim = option.tensor.shape
        path, name = option.path, option.name
        features = len(option.input_lengths)
        if isinstance(option.module[1], EmbeddingBagCollection):
            configs = option.module[1].embedding_bag_configs()
            features = next((len(config.feature_names) for config in configs if config.name == name), features)
        poolings = option.num_poolings or self._constraint(name, "num_poolings") or [1.0] * len(option.input_lengths)
        pooling = float(sum(length * count for length, count in zip(option.input_lengths, poolings)))
        if list(option.input_lengths) == [1.0]:  # TorchRec's default, whatever the number of features
            pooling = float(features)
        access, id_order = None, ID_ORDERS[0]
        if self._table_stats is not None:
            measured = self._table_stats.pooling_factor(path, name)
            pooling = pooling if measured is None else measured
            access = self._table_stats.distribution(path, name)
            id_order = self._table_stats.id_order(path, name)
        return Table(
            name=option.fqn,
            num_embeddings=rows,
            embedding_dim=dim,
            pooling_factor=pooling,
            num_features=features,
            weighted=bool(option.is_weighted),
            data_type=DATA_TYPES.get(option.tensor.dtype, "fp32"),
            optimizer=optimizer_of(option.tensor, fused_params, self._optimizer).cost_name,
            access=access,
            module=path,
            id_order=id_order,
        )

    def _constraint(self, table: str, field: str) -> Any:
        constraint = self._constraints.get(table) if self._constraints else None
        return getattr(constraint, field, None)

    def _scale(self, option: ShardingOption, whole: Perf, maps: dict[str, Any]) -> None:
        """Prices an option nobody measured: the whole table's prediction times TorchRec's ratio of the two."""
        kind = f"{option.sharding_type} with kernel {option.compute_kernel}"
        if kind not in self._scaled:
            self._scaled.add(kind)
            logger.warning(
                "No measured costs for %s: estimated from the table-wise prediction by the ratio of TorchRec's "
                "formula. Restrict ParameterConstraints to table_wise and column_wise with the fused kernel to "
                "avoid it.",
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


def _no_memory(table: int, width: int) -> tuple[float, float]:
    return 0.0, 0.0
