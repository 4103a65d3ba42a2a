"""Sharding problems for tests: random ones, and small ones whose optimum enumeration finds."""

from __future__ import annotations

import itertools
from typing import Iterator

import numpy as np

from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.group_net import GroupNet
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    Cluster,
    Pipeline,
    Placement,
    Shard,
    ShardingProblem,
    Table,
    TableOptions,
)
from torchrec_neuroshard.search.feasibility import placement_of
from torchrec_neuroshard.search.splits import whole_tables


def random_problem(
    seed: int,
    tables: int = 12,
    ranks: int = 4,
    fill: float = 0.5,
    min_width: int = 16,
    modules: int = 1,
    pipeline: Pipeline = Pipeline.SPARSE_DIST,
) -> ShardingProblem:
    """Tables of mixed size and skew; their weights take the share ``fill`` of all memory."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(tables):
        rows = int(10 ** rng.uniform(2.5, 6))
        made.append(
            Table(
                f"t{index}",
                rows,
                int(rng.choice([16, 32, 64, 128])),
                float(np.round(2 ** rng.uniform(0, 6), 2)),
                num_features=int(rng.integers(1, 3)),
                access=AccessDistribution.zipf(rows, float(rng.uniform(0, 1.2))),
                module=f"ebc{index % modules}",
            )
        )
    total = sum(4.0 * t.num_embeddings * t.embedding_dim for t in made)
    capacity = np.zeros((ranks, 2))
    capacity[:, 1] = total / fill / ranks
    return ShardingProblem(
        tuple(made),
        tuple(TableOptions((TABLE_WISE, COLUMN_WISE), min_width) for _ in made),
        Cluster(ranks, ranks, "cpu", capacity, pipeline=pipeline),
        256,
        WeightMemory(tuple(made)),
    )


class WeightMemory:
    """Bytes of the weights alone, in host memory."""

    def __init__(self, tables: tuple[Table, ...]) -> None:
        self._tables = tables

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        return 0.0, 4.0 * self._tables[table].num_embeddings * width


def untrained_model(seed: int = 0) -> CostModel:
    """The analytic CPU prior with a random (not zero) residual, so that groups do not add up."""
    import torch

    torch.manual_seed(seed)
    model = CostModel.analytic("generic_cpu")
    net = GroupNet()
    torch.nn.init.normal_(net.head[-1].weight, std=0.05)  # type: ignore[arg-type]
    torch.nn.init.normal_(net.correction.weight, std=0.05)
    model.groups = GroupCostModel(model.groups.prior, (net,))  # type: ignore[attr-defined]
    return model


def whole_table_placements(problem: ShardingProblem) -> Iterator[Placement]:
    """Every way to place unsplit tables, memory aside."""
    ranks = range(problem.cluster.world_size)
    for choice in itertools.product(ranks, repeat=len(problem.tables)):
        yield placement_of(problem, whole_tables(problem), np.asarray(choice))


def shard(table: int, offset: int, width: int, rank: int) -> Shard:
    return Shard(table, offset, width, rank)
