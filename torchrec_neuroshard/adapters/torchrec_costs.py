"""TorchRec's own estimates as the search's objective: ``cost_model="torchrec"``.

TorchRec rates a plan by the slowest rank's sum over its shards (``NoopPerfModel``). The same sums are minimised here,
with whatever performance estimator the enumerator has.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator
from torchrec.distributed.planner.types import Enumerator, Perf

from torchrec_neuroshard.adapters.compat import estimators_of, populate_estimates
from torchrec_neuroshard.adapters.module_tables import ShardableTable
from torchrec_neuroshard.adapters.sharding_plan import option_of_widths
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective

NAME = "torchrec"


def torchrec_objective(
    tables: Sequence[ShardableTable],
    enumerator: Enumerator,
    sharder_maps: Mapping[str, Any],
    batch_size: int,
    hardware: str,
) -> AdditiveObjective:
    """What a search takes to minimise TorchRec's own rating.

    Args:
        tables: the tables.
        enumerator: its performance estimator is asked.
        sharder_maps: what :func:`compat.sharder_maps` made of the sharders.
        batch_size: samples per rank.
        hardware: for the report; TorchRec's constants are those of the topology.
    """
    estimators = estimators_of(enumerator, EmbeddingPerfEstimator)

    def shard_costs(shards: list[tuple[int, int]]) -> NDArray[np.float64]:
        widths: dict[int, list[int]] = {}
        for table, width in shards:
            widths.setdefault(table, []).append(width)
        options = [option_of_widths(tables[table], of_table, batch_size) for table, of_table in widths.items()]
        if estimators:
            for estimator in estimators:
                estimator.estimate(options, **sharder_maps)
        else:
            populate_estimates(enumerator, options, sharder_maps)
        perfs = {
            (table, int(shard.size[1])): shard.perf for table, option in zip(widths, options) for shard in option.shards
        }
        return np.asarray([_parts(perfs[shard]) for shard in shards])

    return AdditiveObjective(NAME, shard_costs, "analytic", hardware)


def _parts(perf: Perf | None) -> tuple[float, float, float, float]:
    """Forward, backward and their communication, in the order of ``additive_simulator.PARTS``."""
    if perf is None:
        raise ValueError("the enumerator estimates no performance; give one with an EmbeddingPerfEstimator")
    backward = perf.bwd_compute + getattr(perf, "prefetch_compute", 0.0)
    return perf.fwd_compute, backward, perf.fwd_comms, perf.bwd_comms
