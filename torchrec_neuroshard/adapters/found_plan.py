"""A plan as the search left it, with what is predicted of it, on its way to TorchRec's form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.plan_estimates import set_estimates
from torchrec_neuroshard.adapters.sharding_plan import one_shard_per_rank, sharding_options
from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.plan_uncertainty import PlanUncertainty, plan_uncertainty
from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import Placement, ShardingProblem
from torchrec_neuroshard.search import SearchResult


@dataclass(frozen=True)
class FoundPlan:
    """What was found.

    Attributes:
        tables: the tables, with the plan's kernels.
        problem: what was solved, with the plan's kernels.
        placement: the plan.
        simulator: of the problem, with nothing spread.
        cost: the plan's prediction.
        uncertainty: how sure it is; None where the cost model cannot say.
        lower_bound_ms: what every plan costs at least, where that was proved.
    """

    tables: tuple[ShardableTable, ...]
    problem: ShardingProblem
    placement: Placement
    simulator: PlanSimulator
    cost: PlanCost
    uncertainty: PlanUncertainty | None
    lower_bound_ms: float | None

    @classmethod
    def of(
        cls, tables: Sequence[ShardableTable], problem: ShardingProblem, result: SearchResult, objective: Objective
    ) -> FoundPlan:
        """Predicts what a search found.

        Args:
            tables: the model's tables.
            problem: what was solved.
            result: its solution.
            objective: what was minimised.
        """
        placement = one_shard_per_rank(problem, result.placement)
        if placement.kernels:
            tables = [entry.with_kernel(*kernel) for entry, kernel in zip(tables, placement.kernels)]
        simulator = result.simulator
        if simulator is None:
            kernels = placement.kernels
            simulator = simulate(problem.with_kernels(kernels) if kernels else problem, objective)
        problem = simulator.problem
        uncertainty = plan_uncertainty(problem, placement, objective) if isinstance(objective, CostModel) else None
        cost = simulator.cost(placement)
        return cls(tuple(tables), problem, placement, simulator, cost, uncertainty, result.lower_bound_ms)

    def options(self, batch_size: int) -> list[ShardingOption]:
        """One option per table, with ranks and estimates: what TorchRec's planner calls its best plan.

        Args:
            batch_size: samples per rank.
        """
        options = sharding_options(self.tables, self.placement, batch_size, self.problem.cluster)
        set_estimates(options, self.placement, self.simulator, self.cost)
        return options

    def memory_bytes(self) -> NDArray[np.float64]:
        """[ranks, 2] bytes of HBM and DDR that the shards take."""
        used = np.zeros((self.problem.cluster.world_size, 2))
        for table, spread in enumerate(self.placement.spreads):
            if spread is not None:
                used += self.problem.spread_memory(table, spread)
        for shard in self.placement.shards:
            used[shard.rank] += self.problem.shard_memory(shard.table, shard.width)
        return used
