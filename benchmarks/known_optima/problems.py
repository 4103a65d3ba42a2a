"""Random small sharding problems, half of them with hardly any memory to spare.

Every problem has a placement that fits with the splits of :mod:`.reference`. Where memory is tight, that is by making:
a random placement is drawn, and each rank gets just the memory that its fullest rank takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.known_optima.reference import reference_ways
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    WIDTH_MULTIPLE,
    Cluster,
    Pipeline,
    ShardingProblem,
    Table,
    TableOptions,
)

DIMS = (8, 16, 24, 32, 48, 64, 96, 128)
TIGHT_FILL = (0.90, 0.99)  # share of all ranks' memory that whole tables take
ROOMY_FILL = (0.15, 0.45)
_LOG10_ROWS = (3.0, 6.3)
_LOG2_POOLING = (0.0, 6.0)
_LOG2_BATCH_PER_RANK = (6, 11)
_MAX_FEATURES = 2
_LARGEST_ALPHA = 1.2
_DRAWN = 4000  # random placements, one of which sets the memory of a tight problem
_REDRAWS = 100
_ID_BYTES, _FLOAT_BYTES = 8, 4


@dataclass(frozen=True)
class Family:
    """A family of problems, one for each seed.

    Attributes:
        name: of the family.
        additive: costs of shards add up, so that CP-SAT can prove an optimum; else their company counts.
        tables: least and most tables.
        ranks: least and most ranks.
    """

    name: str
    additive: bool
    tables: tuple[int, int]
    ranks: tuple[int, int]

    def problem(self, seed: int) -> ShardingProblem:
        """The problem of a seed.

        Seeds cycle through what problems differ in besides chance: odd ones have tight memory; of each four pairs, one
        waits for forward and backward apart (no pipeline) and one has two modules; then eight problems allow cuts down
        to the reference's narrowest shard of each table, and eight down to 4 columns.
        """
        rng = np.random.default_rng([seed, *self.name.encode()])
        tables = int(rng.integers(self.tables[0], self.tables[1] + 1))
        ranks = int(rng.integers(self.ranks[0], self.ranks[1] + 1))
        variant = seed // 2 % 4
        return _draw(
            rng,
            tables,
            ranks,
            tight=is_tight(seed),
            modules=2 if variant == 3 else 1,
            pipeline=Pipeline.NONE if variant == 2 else Pipeline.SPARSE_DIST,
            finest=seed // 8 % 2 == 1,
        )


FUSED = Family("fused", additive=False, tables=(3, 6), ranks=(2, 3))  # few enough to enumerate
ADDITIVE = Family("additive", additive=True, tables=(5, 12), ranks=(2, 4))
FAMILIES = (FUSED, ADDITIVE)


def is_tight(seed: int) -> bool:
    """Whether the problem of a seed has tight memory."""
    return seed % 2 == 1


class BufferedMemory:
    """Bytes of a shard in host memory: weights, and buffers of a batch's ids and pooled rows.

    Each shard of a table has all the table's ids, so cutting a table takes memory.
    """

    def __init__(self, tables: tuple[Table, ...], global_batch: int) -> None:
        self._tables, self._batch = tables, global_batch

    def __call__(self, table: int, width: int) -> tuple[float, float]:
        """(0, bytes) of a shard of ``width`` columns."""
        of = self._tables[table]
        columns = of.num_embeddings + self._batch * of.num_features
        return 0.0, float(_FLOAT_BYTES * columns * width + round(_ID_BYTES * self._batch * of.pooling_factor))


def _draw(
    rng: np.random.Generator, tables: int, ranks: int, tight: bool, modules: int, pipeline: Pipeline, finest: bool
) -> ShardingProblem:
    batch = 2 ** int(rng.integers(*_LOG2_BATCH_PER_RANK))
    for _ in range(_REDRAWS):
        made = tuple(_table(rng, index, modules) for index in range(tables))
        memory = BufferedMemory(made, batch * ranks)
        needed = sum(memory(index, table.embedding_dim)[1] for index, table in enumerate(made))
        unlimited = ShardingProblem(
            made,
            tuple(_options(table.embedding_dim, finest) for table in made),
            Cluster(ranks, ranks, "cpu", np.full((ranks, 2), np.inf), pipeline=pipeline),
            batch,
            memory,
        )
        fills = needed / ranks / _fullest_ranks(unlimited, rng)
        fill = float(rng.uniform(*(TIGHT_FILL if tight else ROOMY_FILL)))
        if tight:
            fill = float(fills[np.argmin(np.abs(fills - fill))])
            possible = TIGHT_FILL[0] <= fill <= TIGHT_FILL[1]
        else:
            possible = fill <= fills.max()
        if possible:
            capacity = np.zeros((ranks, 2))
            capacity[:, 1] = np.rint(needed / ranks / fill)
            cluster = Cluster(ranks, ranks, "cpu", capacity, pipeline=pipeline)
            return ShardingProblem(made, unlimited.options, cluster, batch, memory)
    raise RuntimeError(f"no tables were drawn that leave memory {'tight' if tight else 'roomy'}")


def _table(rng: np.random.Generator, index: int, modules: int) -> Table:
    rows = int(10 ** rng.uniform(*_LOG10_ROWS))
    return Table(
        f"t{index}",
        rows,
        int(rng.choice(DIMS)),
        float(np.round(2 ** rng.uniform(*_LOG2_POOLING), 2)),
        num_features=int(rng.integers(1, _MAX_FEATURES + 1)),
        access=AccessDistribution.zipf(rows, float(rng.uniform(0, _LARGEST_ALPHA))),
        module=f"ebc{index % modules}",
    )


def _options(dim: int, finest: bool) -> TableOptions:
    """Cuts down to 4 columns, or to the narrowest shard that the reference knows."""
    quarter = dim // 4
    narrowest = quarter if quarter % WIDTH_MULTIPLE == 0 else dim // 2
    return TableOptions((TABLE_WISE, COLUMN_WISE), WIDTH_MULTIPLE if finest else narrowest)


def _fullest_ranks(problem: ShardingProblem, rng: np.random.Generator) -> NDArray[np.float64]:
    """[drawn] bytes of the fullest rank of random placements with the reference's splits."""
    ranks = problem.cluster.world_size
    used = np.zeros((_DRAWN, ranks))
    plans = np.arange(_DRAWN)
    for table, splits in enumerate(reference_ways(problem)):
        chosen = rng.integers(len(splits), size=_DRAWN)
        order = rng.permuted(np.tile(np.arange(ranks), (_DRAWN, 1)), axis=1)
        for number, widths in enumerate(splits):
            members = plans[chosen == number]
            for piece, width in enumerate(widths):
                used[members, order[members, piece]] += problem.shard_memory(table, width)[1]
    return used.max(axis=1)
