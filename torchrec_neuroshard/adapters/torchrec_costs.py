"""TorchRec's own estimates as the search's objective: ``cost_model="torchrec"``.

TorchRec rates a plan by the slowest rank's sum over its shards (``NoopPerfModel``). The same sums are minimised here,
with whatever performance estimator the enumerator has.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import Enumerator, Perf, ShardingOption

from torchrec_neuroshard.adapters.compat import estimate, perf_parts
from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.sharding_plan import option_of_widths, spread_option
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective
from torchrec_neuroshard.problem import Cluster, Spread

NAME = "torchrec"


def torchrec_objective(
    tables: Sequence[ShardableTable],
    enumerator: Enumerator,
    sharder_maps: Mapping[str, Any],
    batch_size: int,
    cluster: Cluster,
) -> AdditiveObjective:
    """What a search takes to minimise TorchRec's own rating.

    Args:
        tables: the tables.
        enumerator: its performance estimator is asked.
        sharder_maps: what :func:`compat.sharder_maps` made of the sharders.
        batch_size: samples per rank.
        cluster: the ranks; its hardware is for the report, TorchRec's constants are those of the topology.
    """
    costs = _TorchRecCosts(tables, enumerator, sharder_maps, batch_size, cluster)
    return AdditiveObjective(NAME, costs, "analytic", cluster.hardware)


class _TorchRecCosts:
    """Costs of shards by the enumerator's performance estimators."""

    def __init__(
        self,
        tables: Sequence[ShardableTable],
        enumerator: Enumerator,
        sharder_maps: Mapping[str, Any],
        batch_size: int,
        cluster: Cluster,
    ) -> None:
        self._tables, self._enumerator, self._maps = tables, enumerator, sharder_maps
        self._batch_size, self._cluster = batch_size, cluster

    def with_kernels(self, kernels: tuple[tuple[str, float], ...]) -> _TorchRecCosts:
        """The costs of shards with these kernels."""
        tables = [entry.with_kernel(*kernel) for entry, kernel in zip(self._tables, kernels)]
        return _TorchRecCosts(tables, self._enumerator, self._maps, self._batch_size, self._cluster)

    def __call__(self, shards: list[tuple[int, int]]) -> NDArray[np.float64]:
        widths: dict[int, list[int]] = {}
        for table, width in shards:
            widths.setdefault(table, []).append(width)
        options = [
            option_of_widths(self._tables[table], of_table, self._batch_size) for table, of_table in widths.items()
        ]
        self._estimate(options)
        perfs = {
            (table, int(shard.size[1])): shard.perf for table, option in zip(widths, options) for shard in option.shards
        }
        return np.asarray([_parts(perfs[shard]) for shard in shards])

    def spread(self, table: int, spread: Spread) -> NDArray[np.float64]:
        """[blocks, PARTS] ms of a spread table."""
        option = spread_option(self._tables[table], spread, self._batch_size, self._cluster)
        self._estimate([option])
        return np.asarray([_parts(shard.perf) for shard in option.shards])

    def _estimate(self, options: list[ShardingOption]) -> None:
        estimate(self._enumerator, EmbeddingPerfEstimator, options, self._maps)


def _parts(perf: Perf | None) -> tuple[float, float, float, float]:
    """Forward, backward and their communication, in the order of ``additive_simulator.PARTS``."""
    if perf is None:
        raise ValueError("the enumerator estimates no performance; give one with an EmbeddingPerfEstimator")
    return perf_parts(perf)
