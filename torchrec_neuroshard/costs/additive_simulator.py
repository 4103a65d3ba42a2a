"""Plans under costs that add up: an iteration costs the slowest rank's sum over its shards.

TorchRec's own planner rates plans like this (``NoopPerfModel``), with communication counted to the shard. A search
under such costs needs no model of ours, and a lower bound of them can be proved
(:mod:`torchrec_neuroshard.search.lower_bound`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, Protocol

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator, ShardCost
from torchrec_neuroshard.costs.spread import SpreadPart
from torchrec_neuroshard.problem import FUSED, Placement, ShardingProblem, Spread

PARTS = ("forward", "backward", "forward_comms", "backward_comms")


class ShardCosts(Protocol):
    """Costs of single shards.

    Where tables may be spread, it has a method ``spread(table, spread)`` too, which returns [blocks, PARTS] ms; where
    they may have other kernels than "fused", ``with_kernels(kernels)``, which takes what
    ``ShardingProblem.with_kernels`` does and returns such costs.
    """

    def __call__(self, shards: list[tuple[int, int]]) -> NDArray[np.float64]:
        """Returns [shards, PARTS] ms of shards given as (table, width)."""
        ...


@dataclass(frozen=True)
class AdditiveObjective:
    """What a search takes instead of a cost model where the costs of shards add up.

    Attributes:
        name: of the costs.
        shard_costs: ms of each shard.
        provenance: where they come from, as on a cost model.
        hardware: what they describe.
    """

    name: str
    shard_costs: ShardCosts
    provenance: str = "analytic"
    hardware: str = "unknown"


class AdditiveSimulator(PlanSimulator):
    """Predicts plans of one problem by adding up shards' costs; the collectives are part of those."""

    def __init__(self, problem: ShardingProblem, objective: AdditiveObjective) -> None:
        self.objective = objective
        self._costs = objective.shard_costs
        if any(table.kernel != FUSED for table in problem.tables):
            with_kernels = getattr(objective.shard_costs, "with_kernels", None)
            if with_kernels is None:
                raise ValueError(f"the costs {objective.name!r} do not tell what tables in host memory cost")
            self._costs = with_kernels(problem.kernels)
        self._start(problem, len(PARTS))

    def _of_problem(self, problem: ShardingProblem) -> AdditiveSimulator:
        return AdditiveSimulator(problem, self.objective)

    @property
    def passes_apart(self) -> bool:
        """Never: a rank's parts are added up before ranks are compared."""
        return False

    @property
    def additive(self) -> bool:
        """Costs add up."""
        return True

    def judge(self) -> None:
        """There is no better judge."""

    def _contributions(self, pairs: list[tuple[int, int]]) -> NDArray[np.float64]:
        return self._costs(pairs)

    @property
    def _added_ms(self) -> slice:
        return slice(0, 2)

    @property
    def _spread_collectives(self) -> None:
        """Theirs are part of the costs."""

    def _made_part(self, table: int, spread: Spread) -> SpreadPart:
        of_blocks = getattr(self._costs, "spread", None)
        if of_blocks is None:
            raise ValueError(f"the costs {self.objective.name!r} do not tell what {spread.kind} tables cost")
        z = np.asarray(of_blocks(table, spread))
        return SpreadPart(z, np.zeros(len(z)), np.zeros(len(z)))

    def group_ms(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """[..., 2] forward and backward ms, communication included, of sums ``z`` [..., PARTS]."""
        return z[..., :2] + z[..., 2:]

    def comms_ms(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """[plans, 2] zeros."""
        return np.zeros((len(columns), 2))

    def input_dist_ms(self, ids: NDArray[np.float64]) -> NDArray[np.float64]:
        """[plans] zeros."""
        return np.zeros(len(ids))

    def cost(self, placement: Placement) -> PlanCost:
        """The placement's cost, with a breakdown by rank."""
        simulator = self.of(placement)
        if simulator is not self:
            return simulator.cost(placement)
        parts = self.group_sums(placement).z.sum(axis=1)
        forward, backward, forward_comms, backward_comms = parts.T.copy()
        total = float(parts.sum(axis=1).max(initial=0.0))
        pipeline = self.problem.cluster.pipeline
        return PlanCost(total, forward, backward, forward_comms, backward_comms, np.zeros(len(parts)), pipeline)

    def shares(self, placement: Placement, cost: PlanCost) -> list[NDArray[np.float64]]:
        """For each table, [shards, 5] the parts of its shards; the input collective costs nothing."""
        result: list[list[NDArray[np.float64]]] = [[] for _ in self.problem.tables]
        shards = sorted(placement.shards, key=lambda s: (s.table, s.offset))
        for shard, parts in zip(shards, self._parts((s.table, s.width) for s in shards)):
            result[shard.table].append(parts)
        for index, spread in enumerate(placement.spreads):
            if spread is not None:
                result[index] += list(self._spread_z(index, spread))
        return [np.pad(np.asarray(parts).reshape(-1, len(PARTS)), ((0, 0), (0, 1))) for parts in result]

    def shard_cost(self, table: int, width: int) -> ShardCost:
        """The parts of one shard."""
        forward, backward, forward_comms, backward_comms = self._parts([(table, width)])[0].tolist()
        return ShardCost(forward, backward, forward_comms, backward_comms, input_dist_ms=0.0)

    def spread_cost(self, table: int, spread: Spread) -> tuple[ShardCost, ...]:
        """[blocks] the parts of the blocks of a spread table."""
        return tuple(
            ShardCost(forward, backward, forward_comms, backward_comms, input_dist_ms=0.0)
            for forward, backward, forward_comms, backward_comms in self._spread_z(table, spread).tolist()
        )

    def _parts(self, shards: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
        """[shards, PARTS] ms of shards given as (table, width)."""
        kinds = self.kinds(shards)
        return self.z[kinds]


Objective = CostModel | AdditiveObjective


def simulate(problem: ShardingProblem, objective: Objective) -> PlanSimulator:
    """The simulator of a problem under a cost model or additive costs."""
    if isinstance(objective, AdditiveObjective):
        return AdditiveSimulator(problem, objective)
    return PlanSimulator(problem, objective)


def single_shard_costs(problem: ShardingProblem, model: CostModel) -> AdditiveObjective:
    """A cost model's compute of each shard alone on a rank, as additive costs: no company effects, no collectives."""
    simulator = PlanSimulator(problem, model)

    def shard_costs(shards: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
        alone = simulator.alone(shards)
        return np.concatenate([alone, np.zeros_like(alone)], axis=1)

    return AdditiveObjective(f"{model.name}, single shards", shard_costs, model.provenance, model.hardware)
