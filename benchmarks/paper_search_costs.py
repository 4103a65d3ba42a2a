"""What the paper's search asks of a cost model: fused groups, one call each, and the objective of a plan.

:class:`GroupQueries` asks as the paper's code does: a model call for every query, nothing remembered.
:class:`GroupTable` predicts many groups in one call and remembers them by what they hold. A row of a large matrix
product may differ in its last bits from the same row alone, so the table's costs are close, not equal; where that
could decide something, :meth:`GroupTable.make_exact` replaces them by what a single call says.
"""

from __future__ import annotations

from bisect import insort
from typing import Iterable, Literal, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.features import ShardFeatures, shard_features
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator, kind_work
from torchrec_neuroshard.problem import Placement, ShardingProblem

Objective = Literal["paper", "simulator"]
OBJECTIVES: tuple[Objective, ...] = ("paper", "simulator")

Group = tuple[int, ...]  # kinds of the shards of a fused group, ascending

CLOSE = 5e-5  # relative; predictions in single precision differ by less, however they are batched

_KEY = 1 << 32  # above any number of kinds


class PlanObjective:
    """The objective that plans are ranked by.

    Args:
        problem: the tables and ranks.
        model: the cost model.
        objective: "paper" or "simulator", see :meth:`__call__`.
    """

    def __init__(self, problem: ShardingProblem, model: CostModel, objective: Objective) -> None:
        if objective not in OBJECTIVES:
            raise ValueError(f"the objective is {' or '.join(OBJECTIVES)}, not {objective!r}")
        cluster = problem.cluster
        self.simulator = PlanSimulator(problem, model)
        self._objective = objective
        self._collectives = model.collectives.on_links(cluster.intra_host_gbps, cluster.inter_host_gbps)

    def __call__(
        self, rank_ms: NDArray[np.float64], columns: NDArray[np.float64], ids: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[plans] ms of plans.

        "paper" is the largest over ranks of compute, forward and backward collectives, where a rank enters the
        forward all-to-all when its own forward is done and waits there for the others. "simulator" is what
        :meth:`~torchrec_neuroshard.costs.simulator.PlanSimulator.total_ms` says.

        Args:
            rank_ms: [plans, ranks, 2] forward and backward ms of each rank.
            columns: [plans, lookups, ranks] output columns that each rank owns in each lookup.
            ids: [plans, lookups, ranks] ids per sample that each rank looks up.
        """
        if self._objective == "simulator":
            input_dist = self.simulator.input_dist_ms(ids)
            return self.simulator.total_ms(rank_ms, self.simulator.comms_ms(columns), input_dist)
        result: NDArray[np.float64] = (rank_ms.sum(axis=2) + self._comms_ms(rank_ms[:, :, 0], columns)).max(axis=1)
        return result

    def of(self, placement: Placement) -> float:
        """The objective of one placement, in ms."""
        sums = self.simulator.group_sums(placement)
        rank_ms = self.simulator.group_ms(sums.z).sum(axis=1)
        return float(self(rank_ms[None], sums.columns, sums.ids)[0])

    def _comms_ms(self, forward_ms: NDArray[np.float64], columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """[plans, ranks] from entering each all-to-all to leaving it, of all lookups.

        The late ranks are waited for in the first lookup that a plan uses; they leave it together, and so start the
        next ones together.
        """
        problem = self.simulator.problem
        batch = np.full(len(columns), float(problem.batch_size))
        forward, backward = np.zeros(len(columns), dtype=bool), np.ones(len(columns), dtype=bool)
        result = np.zeros_like(forward_ms)
        waited = np.zeros((len(columns), 1), dtype=bool)
        for lookup in range(columns.shape[1]):
            dims = columns[:, lookup]
            used = dims.sum(axis=1, keepdims=True) > 0
            delays = np.where(waited, 0.0, forward_ms)
            for direction, start in ((forward, delays), (backward, None)):
                ms = self._collectives.per_rank(batch, dims, direction, problem.cluster.local_world_size, start)
                result += np.where(used, ms, 0.0)
            waited |= used
        return result


class GroupQueries:
    """Predicts fused groups, one model call each.

    Args:
        simulator: registers shards; its model is asked.

    Attributes:
        calls: model calls so far.
    """

    def __init__(self, simulator: PlanSimulator) -> None:
        self.calls = 0
        self._simulator = simulator
        self._row: dict[int, int] = {}
        self._features: ShardFeatures | None = None

    def kinds(self, shards: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
        """Indices of (table, width) pairs, whose features are computed once."""
        shards = list(shards)
        kinds = self._simulator.kinds(shards)
        fresh = {kind: pair for kind, pair in zip(kinds.tolist(), shards) if kind not in self._row}
        if fresh:
            for kind in fresh:
                self._row[kind] = len(self._row)
            features = shard_features(kind_work(self._simulator.problem, list(fresh.values())))
            known = [] if self._features is None else [self._features]
            self._features = ShardFeatures.concatenate([*known, features])
        return kinds

    def group_ms(self, group: Sequence[int]) -> NDArray[np.float64]:
        """[2] forward and backward ms of the fused group of these kinds; no call for none."""
        if not group:
            return np.zeros(2)
        assert self._features is not None
        self.calls += 1
        rows = [self._row[kind] for kind in group]
        shards = ShardFeatures(self._features.work[rows], self._features.features[rows], self._features.regime[rows])
        groups = self._simulator.model.groups
        result: NDArray[np.float64] = groups.predict(groups.contributions(shards).sum(axis=0, keepdims=True))[0]
        return result

    def rank_ms(self, groups: Sequence[Sequence[int]]) -> NDArray[np.float64]:
        """[2] forward and backward ms of a rank with these fused groups."""
        result = np.zeros(2)
        for group in groups:
            result = result + self.group_ms(group)
        return result


class GroupTable:
    """Numbers fused groups by what they hold, and predicts each once; number 0 is the empty group.

    Args:
        simulator: registers shards and predicts.
        queries: asked for exact costs.
    """

    def __init__(self, simulator: PlanSimulator, queries: GroupQueries) -> None:
        self._simulator = simulator
        self._queries = queries
        self._groups: list[Group] = [()]
        self._numbers: dict[Group, int] = {(): 0}
        self._larger: dict[int, int] = {}  # key of (number, kind) -> number
        self._z = np.zeros((1024, simulator.z.shape[1]))
        self._ms = np.zeros((1024, 2))
        self._is_exact = np.zeros(1024, dtype=bool)
        self._is_exact[0] = True

    def add(self, numbers: NDArray[np.int64], kinds: NDArray[np.int64]) -> NDArray[np.int64]:
        """[n] numbers of the groups ``numbers`` with one shard more, of ``kinds``."""
        keys, inverse = np.unique(numbers * _KEY + kinds, return_inverse=True)
        known = len(self._groups)
        grown_from: list[int] = []
        added: list[int] = []
        result = np.empty(len(keys), dtype=np.int64)
        for index, key in enumerate(keys.tolist()):
            number = self._larger.get(key)
            if number is None:
                smaller, kind = divmod(key, _KEY)
                members = list(self._groups[smaller])
                insort(members, kind)
                group = tuple(members)
                number = self._numbers.get(group)
                if number is None:
                    number = self._numbers[group] = len(self._groups)
                    self._groups.append(group)
                    grown_from.append(smaller)
                    added.append(kind)
                self._larger[key] = number
            result[index] = number
        if added:
            self._predict(known, np.asarray(grown_from, dtype=np.int64), np.asarray(added, dtype=np.int64))
        return result[inverse]

    def ms(self, numbers: NDArray[np.int64]) -> NDArray[np.float64]:
        """[..., 2] forward and backward ms of groups [...]."""
        return self._ms[numbers]

    def make_exact(self, numbers: NDArray[np.int64]) -> None:
        """Asks for these groups one by one, those that were not yet."""
        for number in np.unique(numbers[~self._is_exact[numbers]]).tolist():
            self._ms[number] = self._queries.group_ms(self._groups[number])
            self._is_exact[number] = True

    def _predict(self, first: int, smaller: NDArray[np.int64], kinds: NDArray[np.int64]) -> None:
        """Predicts groups from number ``first`` on, each made of a ``smaller`` one and a shard, in one call."""
        while len(self._z) < len(self._groups):
            self._z, self._ms = np.concatenate([self._z, self._z]), np.concatenate([self._ms, self._ms])
            self._is_exact = np.concatenate([self._is_exact, np.zeros_like(self._is_exact)])
        last = first + len(kinds)
        self._z[first:last] = self._z[smaller] + self._simulator.z[kinds]
        self._ms[first:last] = self._simulator.group_ms(self._z[first:last])
        self._queries.calls += 1
