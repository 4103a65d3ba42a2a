"""Plan simulator: what each rank spends in an iteration, and the iteration's time.

Each (module, sharding type) has its own TBE on a rank and its own collectives. Ranks wait for each other at
collectives, so an iteration costs the slowest rank's compute plus the collectives; how forward and backward
combine depends on the training loop (:class:`~torchrec_neuroshard.problem.Pipeline`). The dense part of the
model is the same for every plan and is left out.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.collective_traffic import Traffic
from torchrec_neuroshard.costs.features import ShardWork, shard_features
from torchrec_neuroshard.costs.hardware import hardware_spec
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.offloading import EXTRAS, HostMemory
from torchrec_neuroshard.costs.spread import Background, SpreadPart
from torchrec_neuroshard.problem import FUSED, Pipeline, Placement, ShardingProblem, Spread, Table, TableOptions

_ID_BYTES = 8  # KJT values travel as int64
_FLOATS_PER_ID = _ID_BYTES / 4


@dataclass(frozen=True)
class ShardCost:
    """Predicted cost of one shard alone on a rank, in ms."""

    forward_ms: float
    backward_ms: float
    forward_comms_ms: float
    backward_comms_ms: float
    input_dist_ms: float


@dataclass(frozen=True)
class PlanCost:
    """Predicted cost of a plan.

    Attributes:
        total_ms: sparse part of an iteration, from the input all-to-all to the last rank's update.
        forward_ms: [ranks] TBE forward.
        backward_ms: [ranks] TBE backward with the fused update.
        forward_comms_ms: [ranks] output all-to-alls.
        backward_comms_ms: [ranks] gradient all-to-alls.
        input_dist_ms: [ranks] input all-to-all (overlapped unless the pipeline is "none").
        pipeline: how the parts combine.
    """

    total_ms: float
    forward_ms: NDArray[np.float64]
    backward_ms: NDArray[np.float64]
    forward_comms_ms: NDArray[np.float64]
    backward_comms_ms: NDArray[np.float64]
    input_dist_ms: NDArray[np.float64]
    pipeline: Pipeline

    @property
    def compute_ms(self) -> NDArray[np.float64]:
        """[ranks] forward plus backward of the TBEs."""
        return self.forward_ms + self.backward_ms

    @property
    def bottleneck_rank(self) -> int:
        """The rank with the most compute and communication."""
        return int(np.argmax(self.compute_ms + self.forward_comms_ms + self.backward_comms_ms))

    def to_json(self) -> dict[str, Any]:
        """The ``predicted_ms`` object of the command line's contract."""
        return {
            "total": round(self.total_ms, 4),
            "per_rank": [
                {
                    "forward": round(float(f), 4),
                    "backward": round(float(b), 4),
                    "forward_comms": round(float(fc), 4),
                    "backward_comms": round(float(bc), 4),
                    "input_dist": round(float(i), 4),
                }
                for f, b, fc, bc, i in zip(
                    self.forward_ms,
                    self.backward_ms,
                    self.forward_comms_ms,
                    self.backward_comms_ms,
                    self.input_dist_ms,
                )
            ],
        }


@dataclass(frozen=True)
class PlacementSums:
    """What a placement is made of.

    Attributes:
        z: [ranks, groups, z_dim] sums of the shards' contributions.
        columns: [1, lookups, ranks] output columns.
        ids: [1, lookups, ranks] ids per sample.
    """

    z: NDArray[np.float64]
    columns: NDArray[np.float64]
    ids: NDArray[np.float64]


def kind_work(problem: ShardingProblem, pairs: Iterable[tuple[int, int]]) -> list[ShardWork]:
    """What a TBE does for shards given as (table, width) pairs, on the global batch."""
    return [
        replace(ShardWork.whole(problem.tables[table], problem.global_batch_size), dim=width) for table, width in pairs
    ]


class PlanSimulator:
    """Predicts plans of one problem with one cost model.

    Shards are registered once as *kinds*, (table, width) pairs, whose contributions to group sums, widths
    and memory are kept in arrays indexed by kind. Tables that the problem spreads over all ranks are there before any
    shard (:class:`~torchrec_neuroshard.costs.spread.Background`).
    """

    def __init__(self, problem: ShardingProblem, model: CostModel) -> None:
        self.model = model
        cluster = problem.cluster
        self._collectives = model.collectives.on_links(cluster.intra_host_gbps, cluster.inter_host_gbps)
        self._host_memory: HostMemory | None = None
        if problem.occupied_ms is not None or any(table.kernel != FUSED for table in problem.tables):
            self._host_memory = HostMemory(model.as_measured(hardware_spec(cluster.hardware, cluster.device)))
        self._start(problem, model.groups.z_dim + (EXTRAS if self._host_memory else 0))

    def _start(self, problem: ShardingProblem, z_dim: int) -> None:
        """Sets up without any kinds."""
        self.problem = problem
        self._kinds: dict[tuple[int, int], int] = {}
        self._spread: dict[tuple[int, Spread], SpreadPart] = {}
        self._background: Background | None = None
        self.z = np.zeros((0, z_dim))  # [kinds, z_dim]
        self.widths = np.zeros(0, dtype=np.int64)  # [kinds]
        self.memory = np.zeros((0, 2))  # [kinds, 2] bytes of HBM and DDR
        self.columns = np.zeros(0)  # [kinds] output columns of a sample: width x bags, or x ids where unpooled
        self.ids = np.zeros(0)  # [kinds] ids per sample
        self.alone_ms = np.zeros((0, 2))  # [kinds, 2] forward and backward when alone on a rank

    def spread_as(self, spread: tuple[Spread | None, ...]) -> PlanSimulator:
        """A simulator of the same problem with these tables spread; what is known of kinds goes with it.

        Args:
            spread: [tables] as ``ShardingProblem.spread_as`` takes it; of the problem without any spread.
        """
        if tuple(spread) == self.problem.spread or not any((*spread, *self.problem.spread)):
            return self
        if any(self.problem.spread):
            raise ValueError("spread the tables of the problem itself, not of one that has some spread already")
        other = copy.copy(self)
        other._kinds, other._background = dict(self._kinds), None
        other.problem = self.problem.spread_as(spread)
        return other

    def with_options(self, options: tuple[TableOptions, ...]) -> PlanSimulator:
        """A simulator of the same tables that may be cut otherwise; what is known of kinds goes with it.

        Args:
            options: [tables] as ``ShardingProblem`` has them.
        """
        other = copy.copy(self)
        other._kinds, other._background = dict(self._kinds), None
        other.problem = replace(self.problem, options=options)
        return other

    @property
    def background(self) -> Background:
        """What the tables that lie on all ranks put there."""
        if self._background is None:
            self._background = Background.of(self.problem, self.z.shape[1], self._spread_part, self._spread_collectives)
            if self.problem.occupied_ms is not None:  # in the first group's sums, where it adds to any other cost
                self._background.sums[:, 0, self._added_ms] += self.problem.occupied_ms
        return self._background

    @property
    def _added_ms(self) -> slice:
        """Where sums have forward and backward ms that are added as they are."""
        return slice(-EXTRAS, -EXTRAS + 2)

    @property
    def _spread_collectives(self) -> CollectiveModel | None:
        return self._collectives

    def _spread_z(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[blocks, z_dim] contributions of a spread table."""
        return self._spread_part(table, spread).z

    def _spread_part(self, table: int, spread: Spread) -> SpreadPart:
        """What a spread table adds to its ranks, remembered."""
        if (table, spread) not in self._spread:
            self._spread[table, spread] = self._made_part(table, spread)
        return self._spread[table, spread]

    def _made_part(self, table: int, spread: Spread) -> SpreadPart:
        of = self.problem.tables[table]
        return SpreadPart.of(self.problem, table, spread, lambda works: self._of_works([of] * len(works), works))

    def _of_works(self, tables: Sequence[Table], works: Sequence[ShardWork]) -> NDArray[np.float64]:
        """[shards, z_dim] contributions of shards of these tables."""
        z = self.model.groups.contributions(shard_features(works))
        if self._host_memory is None:
            return z
        return np.concatenate([z, self._host_memory.contributions(tables, works)], axis=1)

    def kinds(self, shards: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
        """Indices of (table, width) pairs, registering new ones in the order given."""
        shards = list(shards)
        fresh = [pair for pair in dict.fromkeys(shards) if pair not in self._kinds]
        if fresh:
            self._register(fresh)
        return np.asarray([self._kinds[pair] for pair in shards], dtype=np.int64)

    def alone(self, shards: Iterable[tuple[int, int]]) -> NDArray[np.float64]:
        """[shards, 2] forward and backward ms of shards, given as (table, width), each alone on a rank."""
        kinds = self.kinds(shards)
        return self.alone_ms[kinds]

    @property
    def passes_apart(self) -> bool:
        """Whether ranks wait for each other after the forward and after the backward pass, not once for both."""
        return self.problem.cluster.pipeline is Pipeline.NONE

    @property
    def additive(self) -> bool:
        """Whether a rank costs the sum of its shards alone."""
        return False

    def judge(self) -> PlanSimulator | None:
        """A slower and more accurate simulator of the same problem, where the model has one."""
        if self.model.ensemble is None:
            return None
        return PlanSimulator(self.problem, self.model.by_ensemble())

    def _contributions(self, pairs: list[tuple[int, int]]) -> NDArray[np.float64]:
        """[pairs, z_dim] what shards, given as (table, width), add to the sum of their group."""
        return self._of_works([self.problem.tables[table] for table, _ in pairs], kind_work(self.problem, pairs))

    def _register(self, pairs: list[tuple[int, int]]) -> None:
        for pair in pairs:
            self._kinds[pair] = len(self._kinds)
        self.problem.prefetch_memory(pairs)
        z = self._contributions(pairs)
        tables = [self.problem.tables[t] for t, _ in pairs]
        self.z = np.concatenate([self.z, z])
        self.widths = np.concatenate([self.widths, [width for _, width in pairs]])
        self.memory = np.concatenate([self.memory, [self.problem.shard_memory(*pair) for pair in pairs]])
        self.columns = np.concatenate(
            [self.columns, [width * table.outputs for table, (_, width) in zip(tables, pairs)]]
        )
        self.ids = np.concatenate([self.ids, [table.pooling_factor for table in tables]])
        self.alone_ms = np.concatenate([self.alone_ms, self.group_ms(z)])

    def group_ms(self, z: NDArray[np.float64]) -> NDArray[np.float64]:
        """Forward and backward ms, [..., 2], of fused groups with sums ``z`` [..., z_dim]."""
        of_model = z[..., : self.model.groups.z_dim]
        flat = self.model.groups.predict(of_model.reshape(-1, of_model.shape[-1]))
        result = flat.reshape(*z.shape[:-1], 2)
        if self._host_memory is not None:
            result = result + self._host_memory.group_ms(z[..., -EXTRAS:])
        return result

    def compute_objective(self, rank_ms: NDArray[np.float64]) -> NDArray[np.float64]:
        """[...] the compute part of an iteration from [..., ranks, 2] forward and backward ms."""
        if self.passes_apart:
            return rank_ms.max(axis=-2).sum(axis=-1)
        return rank_ms.sum(axis=-1).max(axis=-1)

    def comms_ms(self, columns: NDArray[np.float64]) -> NDArray[np.float64]:
        """Forward and backward collectives of plans, [plans, 2] ms.

        Args:
            columns: [plans, lookups, ranks] output columns that each rank owns in each lookup.
        """
        plans, lookups, ranks = columns.shape
        calls = np.repeat(columns.reshape(plans * lookups, ranks), 2, axis=0)  # forward and backward of each
        backward = np.tile([False, True], plans * lookups)
        local = self.problem.cluster.local_world_size
        ms = self._collectives.all_to_alls(self.problem.batch_size, calls, backward, local)
        return ms.reshape(plans, lookups, 2).sum(axis=1) + self.background.comms_ms

    def input_dist_ms(self, ids: NDArray[np.float64]) -> NDArray[np.float64]:
        """[plans] ms of the input all-to-alls, by the collective prior.

        Args:
            ids: [plans, lookups, ranks] ids per sample that each rank looks up.
        """
        plans, lookups, ranks = ids.shape
        result = np.zeros(plans * lookups)
        used = np.flatnonzero(ids.reshape(-1, ranks).any(axis=1))
        if used.size:
            batch = np.full(used.size, float(self.problem.batch_size))
            floats = ids.reshape(-1, ranks)[used] * _FLOATS_PER_ID
            traffic = Traffic.pooled(batch, floats, self.problem.cluster.local_world_size).reversed()
            result[used] = self._collectives.prior.all_to_all(traffic)
        return result.reshape(plans, lookups).sum(axis=1)

    def total_ms(
        self, rank_ms: NDArray[np.float64], comms_ms: NDArray[np.float64], input_dist_ms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[plans] time of the sparse part of an iteration.

        Args:
            rank_ms: [plans, ranks, 2] forward and backward of each rank.
            comms_ms: [plans, 2] forward and backward collectives.
            input_dist_ms: [plans] input collectives.
        """
        return self.joined_ms(self.compute_objective(rank_ms), comms_ms.sum(axis=1), input_dist_ms)

    def joined_ms(
        self, compute_ms: NDArray[np.float64], comms_ms: NDArray[np.float64], input_dist_ms: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """[plans] time of the sparse part from [plans] times of the slowest rank's compute and of the collectives."""
        if self.problem.cluster.pipeline is Pipeline.NONE:
            exposed = input_dist_ms
        else:  # the next batch's ids travel while this batch computes
            exposed = np.maximum(0.0, input_dist_ms - compute_ms)
        return compute_ms + comms_ms + exposed

    def group_sums(self, placement: Placement) -> PlacementSums:
        """Sums over the shards of each group and lookup, in an order that does not depend on how a plan was found."""
        problem = self.problem
        shards = sorted(placement.shards, key=lambda s: (s.table, s.offset))
        kinds = self.kinds((s.table, s.width) for s in shards)
        sums = self.background.sums.copy()
        columns = self.background.columns[None].copy()
        ids = self.background.ids[None].copy()
        for shard, kind in zip(shards, kinds):
            sharding_type = placement.sharding_types[shard.table]
            sums[shard.rank, problem.group_of(shard.table, sharding_type)] += self.z[kind]
            lookup = problem.lookup_of(shard.table, sharding_type)
            columns[0, lookup, shard.rank] += self.columns[kind]
            ids[0, lookup, shard.rank] += self.ids[kind]
        return PlacementSums(sums, columns, ids)

    def of(self, placement: Placement) -> PlanSimulator:
        """The simulator with those tables spread that the placement has spread, and its kernels."""
        return self.with_kernels(placement.kernels).spread_as(placement.spreads)

    def with_kernels(self, kernels: tuple[tuple[str, float], ...]) -> PlanSimulator:
        """A simulator of the same problem with these kernels, as ``ShardingProblem.with_kernels`` takes them."""
        problem = self.problem.with_kernels(kernels)
        return self if problem is self.problem else self._of_problem(problem)

    def _of_problem(self, problem: ShardingProblem) -> PlanSimulator:
        return PlanSimulator(problem, self.model)

    def cost(self, placement: Placement) -> PlanCost:
        """Predicts a placement, with a breakdown by rank."""
        simulator = self.of(placement)
        if simulator is not self:
            return simulator.cost(placement)
        problem, ranks = self.problem, self.problem.cluster.world_size
        of = self.group_sums(placement)
        rank_ms = self.group_ms(of.z).sum(axis=1)
        comms, input_dist = self.comms_ms(of.columns), self.input_dist_ms(of.ids)
        return PlanCost(
            float(self.total_ms(rank_ms[None], comms, input_dist)[0]),
            rank_ms[:, 0],
            rank_ms[:, 1],
            np.full(ranks, comms[0, 0]),
            np.full(ranks, comms[0, 1]),
            np.full(ranks, input_dist[0]),
            problem.cluster.pipeline,
        )

    def shares(self, placement: Placement, cost: PlanCost) -> list[NDArray[np.float64]]:
        """For each table, [shards, 5] ms of its shards by offset (of its blocks, where it is spread).

        Columns are forward, backward, their communication, and the input collective, as parts of what is predicted for
        the rank: compute is shared out by what shards cost alone, collectives by columns and by ids.
        """
        simulator = self.of(placement)
        rank, table, amount = simulator._amounts(placement)
        of_rank = np.stack(
            [cost.forward_ms, cost.backward_ms, cost.forward_comms_ms, cost.backward_comms_ms, cost.input_dist_ms], 1
        )
        total = np.zeros_like(of_rank)
        np.add.at(total, rank, amount)
        parts = amount * (of_rank / np.where(total > 0, total, 1.0))[rank]
        return [parts[table == index] for index in range(len(self.problem.tables))]

    def _amounts(self, placement: Placement) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """[shards] rank and table, and [shards, 5] what each would cost alone, its columns (twice) and its ids."""
        shards = sorted(placement.shards, key=lambda s: (s.table, s.offset))
        kinds = self.kinds((s.table, s.width) for s in shards)
        columns, ids = self.columns[kinds, None], self.ids[kinds, None]
        parts = [np.concatenate([self.alone_ms[kinds], columns, columns, ids], axis=1)]
        rank, table = [s.rank for s in shards], [s.table for s in shards]
        for index, spread in enumerate(self.problem.spread):
            if spread is not None:
                blocks = self.problem.blocks(index, spread)
                part = self._spread_part(index, spread)
                each = part.columns
                if not each.any():  # collectives of all blocks together
                    outputs = self.problem.tables[index].outputs
                    each = np.asarray([block.width * outputs / len(blocks) for block in blocks])
                travel = np.stack([each, each, part.ids], axis=1)
                parts.append(np.concatenate([self.group_ms(part.z), travel], axis=1))
                rank += [block.rank for block in blocks]
                table += [index] * len(blocks)
        return np.asarray(rank, dtype=np.int64), np.asarray(table, dtype=np.int64), np.concatenate(parts)

    def shard_cost(self, table: int, width: int) -> ShardCost:
        """Predicts one shard alone: its TBE alone on a rank, its share of traffic against idle peers."""
        kind = self.kinds([(table, width)])[0]
        ranks = self.problem.cluster.world_size
        columns, ids = np.zeros((1, 1, ranks)), np.zeros((1, 1, ranks))
        columns[0, 0, 0], ids[0, 0, 0] = self.columns[kind], self.ids[kind]
        comms = self.comms_ms(columns)[0]
        forward, backward = self.alone_ms[kind]
        return ShardCost(
            float(forward), float(backward), float(comms[0]), float(comms[1]), float(self.input_dist_ms(ids)[0])
        )

    def spread_cost(self, table: int, spread: Spread) -> tuple[ShardCost, ...]:
        """Predicts the blocks of a spread table that is alone on its ranks.

        Args:
            table: number of the table.
            spread: how it lies, whatever the problem says.

        Returns:
            [blocks] each block alone on its rank, which waits for the collectives of all of them.
        """
        part = self._spread_part(table, spread)
        alone = copy.copy(self)
        alone.problem = replace(
            self.problem,
            tables=(self.problem.tables[table],),
            options=(self.problem.options[table],),
            spread=(spread,),
            _memory_cache={},
        )
        alone._spread, alone._background = {(0, spread): part}, None
        forward_comms, backward_comms = alone.comms_ms(alone.background.columns[None])[0].tolist()
        input_dist = float(alone.input_dist_ms(alone.background.ids[None])[0])
        return tuple(
            ShardCost(forward, backward, forward_comms, backward_comms, input_dist)
            for forward, backward in alone.group_ms(part.z).tolist()
        )
