"""NeuroShardPerfModel: TorchRec's own planner, rating whole plans by simulating them."""

from __future__ import annotations

import logging
import os
from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PerfModel, ShardingOption, Topology
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.adapters.names import qualified_name
from torchrec_neuroshard.adapters.optimizers import optimizer_by_name
from torchrec_neuroshard.adapters.option_tables import OptionTables
from torchrec_neuroshard.adapters.plan_placement import NoMemory, option_placement
from torchrec_neuroshard.adapters.table_constraints import SHARDING_TYPES
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.adapters.topology import planning_cluster
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    FUSED_KERNELS,
    WIDTH_MULTIPLE,
    Pipeline,
    ShardingProblem,
    TableOptions,
)

logger = logging.getLogger(__name__)


class NeuroShardPerfModel(PerfModel):
    """Rates plans by what :class:`NeuroShardPlanner` predicts of them: ms per iteration, lower is better.

    Where TorchRec's own model adds up its shards' ``perf``, a plan is simulated: fused groups, the collectives of each
    sharding type, and the ranks' waiting for each other. Options that the simulator does not know (other kernels, data
    types and modules) add their shards' ``perf`` to their ranks; this is said once.

    Args:
        topology: the machines.
        constraints: the user's constraints by table name.
        cost_model: as in :class:`NeuroShardPlanner`.
        table_stats: measured pooling factors and access distributions; they win over the options' input lengths.
        optimizer: sgd, adagrad, adam or rowwise_adagrad, for tables on which nothing is set.
        sharders: whose fused params name the optimizers of their modules.
        pipeline: "none", "sparse_dist" or "prefetch": how the training loop overlaps work.
        hardware: name of the hardware (see ``costs.hardware``); None detects it.

    Raises:
        UnsupportedArgumentError: there is no such pipeline.

    Example::

        planner = EmbeddingShardingPlanner(
            topology, batch_size, performance_model=NeuroShardPerfModel(topology, constraints, sharders=sharders))
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        cost_model: str | os.PathLike[str] | CostModel = "auto",
        table_stats: TableStats | None = None,
        optimizer: str | None = None,
        sharders: Sequence[ModuleSharder[nn.Module]] | None = None,
        pipeline: str | Pipeline = "sparse_dist",
        hardware: str | None = None,
    ) -> None:
        if pipeline not in tuple(Pipeline):
            names = ", ".join(repr(member.value) for member in Pipeline)
            raise UnsupportedArgumentError(f"pipeline must be one of {names}, got {pipeline!r}")
        unlimited = np.full((topology.world_size, 2), np.inf)
        self._cluster = planning_cluster(topology, unlimited, hardware, Pipeline(pipeline))
        self._read = OptionTables(self._cluster, constraints, table_stats, optimizer_by_name(optimizer or "sgd"))
        self._cost_model = resolve_cost_model(cost_model, self._cluster.device, self._cluster.hardware)
        self._sharders = {compat.sharder_key(sharder.module_type): sharder for sharder in sharders or ()}
        self._latest: tuple[tuple[Any, ...], PlanSimulator] | None = None
        self._added: set[str] = set()

    def rate(self, plan: list[ShardingOption]) -> float:
        """Predicted time of the sparse part of an iteration, in ms.

        Args:
            plan: one option for each table, whose shards have ranks.

        Raises:
            ValueError: a shard has no rank.
        """
        if not plan:
            return 0.0
        for option in plan:
            if any(shard.rank is None for shard in option.shards):
                name = qualified_name(option.path, option.name)
                raise ValueError(f"table {name!r} has a shard without a rank: partition a proposal to rate it")
        options = sorted(plan, key=lambda option: option.fqn)  # sums do not depend on the order of the plan
        covered = [option for option in options if self._read.covers(option)]
        simulator = self._simulator(covered, plan[0].batch_size)
        placement = option_placement(covered, self._cluster)
        # Asked here, so that they are kept where spread tables make a simulator of their own.
        simulator.kinds((shard.table, shard.width) for shard in placement.shards)
        cost = simulator.cost(placement)
        if len(covered) == len(options):
            return cost.total_ms
        rank_ms = np.stack([cost.forward_ms, cost.backward_ms], axis=1)
        rank_ms += self._added_ms([option for option in options if not self._read.covers(option)])
        comms = np.asarray([[cost.forward_comms_ms[0], cost.backward_comms_ms[0]]])  # all ranks take part
        return float(simulator.total_ms(rank_ms[None], comms, cost.input_dist_ms[:1])[0])

    def _simulator(self, options: list[ShardingOption], batch_size: int) -> PlanSimulator:
        """The simulator of these options' tables; the one before where they are the same."""
        key = (batch_size, *(self._read.key(option) for option in options))
        if self._latest is None or self._latest[0] != key:
            tables = tuple(
                self._read.table(option, compat.fused_params_of(self._sharders.get(option.module_type_key)))
                for option in options
            )
            allowed = (TableOptions(SHARDING_TYPES, WIDTH_MULTIPLE, FUSED_KERNELS),) * len(tables)
            problem = ShardingProblem(tables, allowed, self._cluster, batch_size, NoMemory())
            self._latest = key, PlanSimulator(problem, self._cost_model)
        return self._latest[1]

    def _added_ms(self, options: list[ShardingOption]) -> NDArray[np.float64]:
        """[ranks, 2] forward and backward ms, communication included, by the ``perf`` of the options' shards."""
        added = np.zeros((self._cluster.world_size, 2))
        for option in options:
            kind = f"{option.sharding_type} tables of {type(option.module[1]).__name__} ({option.compute_kernel})"
            if kind not in self._added:
                self._added.add(kind)
                logger.warning("Cannot simulate %s: what their shards are estimated to take is added.", kind)
            for shard in option.shards:
                if shard.perf is None:
                    name = qualified_name(option.path, option.name)
                    raise ValueError(
                        f"table {name!r} cannot be simulated, and a shard of it has no perf to add: let an estimator "
                        "set it (NeuroShardPerfEstimator, or TorchRec's EmbeddingPerfEstimator)"
                    )
                forward, backward, forward_comms, backward_comms = compat.perf_parts(shard.perf)
                added[shard.rank] += forward + forward_comms, backward + backward_comms
        return added
