from __future__ import annotations

import logging

import pytest
import torch
from planner_models import ANALYTIC, bag_collection, bag_config, bag_sharders, cpu_topology, plan_json
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_neuroshard import NeuroShardPerfEstimator, TableStats
from torchrec_neuroshard.adapters import compat

BATCH = 128


def tables_and_limits() -> tuple[torch.nn.Module, dict[str, ParameterConstraints]]:
    model = bag_collection(
        bag_config("t", 50_000, 128), bag_config("u", 2_000, 64, ["x", "y"]), bag_config("v", 9_000, 32)
    )
    limits = {
        name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise"], min_partition=32, pooling_factors=factors
        )
        for name, factors in (("t", [20.0]), ("u", [3.0, 5.0]), ("v", [1.0]))
    }
    return model, limits


def enumerate_with(
    estimator: NeuroShardPerfEstimator, limits: dict[str, ParameterConstraints] | None
) -> dict[tuple[str, str], ShardingOption]:
    topology = cpu_topology(4)
    enumerator = EmbeddingEnumerator(
        topology, BATCH, limits, estimator=[estimator, EmbeddingStorageEstimator(topology, limits)]
    )
    options = enumerator.enumerate(tables_and_limits()[0], bag_sharders())
    return {(option.name, option.sharding_type): option for option in options}


def test_predictions_reach_torchrecs_enumerator() -> None:
    limits = tables_and_limits()[1]
    estimator = NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC)
    options = enumerate_with(estimator, limits)
    whole, split = options["t", "table_wise"], options["t", "column_wise"]
    assert len(split.shards) == 4
    for option in options.values():
        for shard in option.shards:
            assert shard.perf is not None
            for part in (shard.perf.fwd_compute, shard.perf.bwd_compute, shard.perf.fwd_comms, shard.perf.bwd_comms):
                assert part > 0
            assert shard.perf.input_dist_comms > 0 and shard.perf.prefetch_compute == 0
    assert whole.shards[0].perf is not None and split.shards[0].perf is not None
    quarter, one = split.shards[0].perf, whole.shards[0].perf
    assert quarter.fwd_compute < one.fwd_compute and quarter.bwd_compute < one.bwd_compute
    assert quarter.fwd_comms < one.fwd_comms
    assert quarter.input_dist_comms == pytest.approx(one.input_dist_comms)  # every shard gets all the ids
    assert 4 * quarter.fwd_compute > one.fwd_compute  # splitting is not free


def test_pooling_and_optimizer_count() -> None:
    limits = tables_and_limits()[1]
    few = enumerate_with(NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC), limits)
    many = enumerate_with(
        NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC, table_stats=TableStats({"v": 60.0})),
        limits,
    )
    stateful = enumerate_with(
        NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC, optimizer="rowwise_adagrad"), limits
    )
    key = ("v", "table_wise")
    perfs = [options[key].shards[0].perf for options in (few, many, stateful)]
    assert all(perf is not None for perf in perfs)
    assert perfs[1].fwd_compute > 2 * perfs[0].fwd_compute  # type: ignore[union-attr]
    assert perfs[2].bwd_compute > perfs[0].bwd_compute  # type: ignore[union-attr]
    assert perfs[2].fwd_compute == perfs[0].fwd_compute  # type: ignore[union-attr]


def test_the_parameters_optimizer_wins() -> None:
    model, limits = tables_and_limits()
    topology = cpu_topology(4)
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC, optimizer="rowwise_adagrad")
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[estimator])
    default = enumerator.enumerate(model, bag_sharders())
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[estimator])
    sgd = enumerator.enumerate(model, bag_sharders())
    assert sgd[0].name == default[0].name
    assert sgd[0].shards[0].perf.bwd_compute < default[0].shards[0].perf.bwd_compute  # type: ignore[union-attr]


def test_other_sharding_types_are_scaled_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    estimator = NeuroShardPerfEstimator(cpu_topology(4), cost_model=ANALYTIC)
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.estimator"):
        options = enumerate_with(estimator, None)
        enumerate_with(estimator, None)
    replicated = options["t", "data_parallel"].shards[0].perf
    assert replicated is not None and replicated.fwd_compute > 0 and replicated.bwd_comms > 0
    ours = [record.getMessage() for record in caplog.records if record.name == "torchrec_neuroshard.estimator"]
    assert len(ours) == 1 and "data_parallel" in ours[0]
    assert options["t", "table_column_wise"].shards[0].perf == options["t", "table_wise"].shards[0].perf


def test_sharders_may_come_under_the_old_keyword() -> None:
    limits = tables_and_limits()[1]
    estimator = NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC)
    sharders = {compat.sharder_key(s.module_type): s for s in bag_sharders()}
    priced = enumerate_with(estimator, limits)["t", "table_wise"]
    scaled = enumerate_with(estimator, None)["t", "data_parallel"]  # for which TorchRec's formula is asked
    for option in (priced, scaled):
        expected, option.shards[0].perf = option.shards[0].perf, None
        estimator.estimate([option], sharder_map=sharders)
        assert option.shards[0].perf == expected


def test_torchrecs_planner_plans_with_it() -> None:
    model, limits = tables_and_limits()
    topology = cpu_topology(2)
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC)
    enumerator = EmbeddingEnumerator(
        topology, BATCH, limits, estimator=[estimator, EmbeddingStorageEstimator(topology, limits)]
    )
    theirs = EmbeddingShardingPlanner(topology, BATCH, enumerator=enumerator, constraints=limits, stats=[])
    plan = plan_json(theirs.plan(model, bag_sharders()))[""]
    assert set(plan) == {"t", "u", "v"}
    assert {rank for entry in plan.values() for rank in entry["ranks"]} == {0, 1}


def test_an_unknown_optimizer_is_an_error() -> None:
    with pytest.raises(ValueError, match="rowwise_adagrad"):
        NeuroShardPerfEstimator(cpu_topology(2), cost_model=ANALYTIC, optimizer="adamw")
