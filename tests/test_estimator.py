from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from parity import AllTypesSharder
from planner_models import ANALYTIC, bag_collection, bag_config, bag_sharders, cpu_topology, plan_json
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardingOption, Topology
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_neuroshard import CostModel, NeuroShardPerfEstimator, TableStats
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.plan_placement import NoMemory
from torchrec_neuroshard.adapters.table_constraints import SHARDING_TYPES
from torchrec_neuroshard.adapters.topology import planning_cluster
from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import (
    Pipeline,
    Placement,
    Shard,
    ShardingProblem,
    Spread,
    Table,
    TableOptions,
)

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


def simulated(topology: Topology, tables: tuple[Table, ...]) -> PlanSimulator:
    """The simulator of tables as the options describe them, with the spread ones as the only ones."""
    cluster = planning_cluster(topology, np.full((topology.world_size, 2), np.inf), None, Pipeline.SPARSE_DIST)
    options = (TableOptions(SHARDING_TYPES, 4, tuple({table.kernel for table in tables})),) * len(tables)
    return PlanSimulator(
        ShardingProblem(tables, options, cluster, BATCH, NoMemory()), CostModel.analytic("generic_cpu")
    )


def parts(perf: Perf | None) -> list[float]:
    assert perf is not None
    return [perf.fwd_compute, perf.bwd_compute, perf.fwd_comms, perf.bwd_comms, perf.input_dist_comms]


def parts_by_rank(cost: PlanCost) -> list[list[float]]:
    columns = (cost.forward_ms, cost.backward_ms, cost.forward_comms_ms, cost.backward_comms_ms, cost.input_dist_ms)
    return np.stack(columns, axis=1).tolist()


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel", "table_row_wise", "grid_shard"])
def test_spread_tables_cost_what_the_simulator_says_of_them_alone(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    topology = Topology(world_size=4, local_world_size=2, compute_device="cuda", hbm_cap=2**34, ddr_cap=2**34)
    model = bag_collection(bag_config("t", 50_001, 128, ["x", "y"]))
    limits = {"t": ParameterConstraints(sharding_types=[kind], min_partition=64, pooling_factors=[20.0, 3.0])}
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC)
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[estimator])
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.estimator"):
        options = enumerator.enumerate(model, bag_sharders())
    assert not [record for record in caplog.records if record.name == "torchrec_neuroshard.estimator"]
    kernels = {option.compute_kernel for option in options}
    assert kernels >= ({"dense"} if kind == "data_parallel" else {"fused", "fused_uvm", "fused_uvm_caching"})
    for option in options:
        if option.compute_kernel not in ("dense", "fused", "fused_uvm", "fused_uvm_caching"):
            continue
        kernel = "fused" if option.compute_kernel == "dense" else option.compute_kernel
        load_factor = 0.2 if kernel == "fused_uvm_caching" else 0.0
        table = Table("t", 50_001, 128, 23.0, 2, kernel=kernel, load_factor=load_factor)
        pieces = {"table_row_wise": ((128, 0),), "grid_shard": ((64, 0), (64, 2))}.get(kind, ())
        spread = Spread(kind, pieces)
        simulator = simulated(topology, (table,))
        expected = parts_by_rank(simulator.cost(Placement((), (kind,), (spread,))))
        blocks = simulator.problem.blocks(0, spread)
        assert len(option.shards) == len(blocks) and sum(map(sum, expected)) > 0
        for shard, block in zip(option.shards, blocks):  # no two blocks share a rank
            assert parts(shard.perf) == pytest.approx(expected[block.rank], rel=1e-9)


def test_unpooled_tables_are_predicted(caplog: pytest.LogCaptureFixture) -> None:
    topology = cpu_topology(2)
    config = EmbeddingConfig(name="t", num_embeddings=5_000, embedding_dim=64, feature_names=["x"])
    model = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    limits = {"t": ParameterConstraints(pooling_factors=[7.0])}
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC)
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[estimator])
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.estimator"):
        options = enumerator.enumerate(model, [EmbeddingCollectionSharder()])
    assert not [record for record in caplog.records if record.name == "torchrec_neuroshard.estimator"]
    perfs = {option.sharding_type: option.shards[0].perf for option in options}
    assert {"data_parallel", "row_wise", "table_wise"} <= set(perfs)
    simulator = simulated(topology, (Table("t", 5_000, 64, 7.0, 1, unpooled=True),))
    whole = simulator.cost(Placement((Shard(0, 0, 64, 1),), ("table_wise",)))
    assert parts(perfs["table_wise"]) == pytest.approx(parts_by_rank(whole)[1], rel=1e-9)
    rows = simulator.cost(Placement((), ("row_wise",)))
    assert parts(perfs["row_wise"]) == pytest.approx(parts_by_rank(rows)[0], rel=1e-9)


def test_what_nobody_measured_is_scaled_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=2**34, ddr_cap=2**34)
    model = bag_collection(bag_config("known", 5_000, 64), bag_config("other", 5_000, 64))
    types = ["table_wise", "row_wise"]
    limits = {
        "known": ParameterConstraints(sharding_types=types, compute_kernels=["fused"]),
        "other": ParameterConstraints(sharding_types=types, compute_kernels=["key_value"]),
    }
    sharders: list[Any] = bag_sharders()
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC)
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.estimator"):
        for _ in range(2):
            enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[estimator])
            options = enumerator.enumerate(model, sharders)
    ours = [record.getMessage() for record in caplog.records if record.name == "torchrec_neuroshard.estimator"]
    assert len(ours) == 2 and all("with kernel key_value" in message for message in ours)
    perf = {(option.name, option.sharding_type): option.shards[0].perf for option in options}
    enumerator = EmbeddingEnumerator(topology, BATCH, limits, estimator=[EmbeddingPerfEstimator(topology, limits)])
    by_formula = enumerator.enumerate(model, sharders)
    theirs = {(option.name, option.sharding_type): option.shards[0].perf for option in by_formula}
    for part in ("fwd_compute", "bwd_compute"):
        ratio = getattr(perf["other", "row_wise"], part) / getattr(perf["other", "table_wise"], part)
        expected = getattr(theirs["other", "row_wise"], part) / getattr(theirs["other", "table_wise"], part)
        assert ratio == pytest.approx(expected)
        ratio = getattr(perf["known", "row_wise"], part) / getattr(perf["known", "table_wise"], part)
        assert ratio != pytest.approx(expected)  # what is predicted owes nothing to the formula


def test_sharders_may_come_under_the_old_keyword() -> None:
    limits = tables_and_limits()[1]
    estimator = NeuroShardPerfEstimator(cpu_topology(4), limits, cost_model=ANALYTIC)
    sharders = {compat.sharder_key(s.module_type): s for s in bag_sharders()}
    priced = enumerate_with(estimator, limits)["t", "table_wise"]
    scaled = copy.deepcopy(priced)
    scaled._tensor = torch.empty(50_000, 128, dtype=torch.bfloat16, device="meta")  # TorchRec's formula is asked
    estimator.estimate([scaled], **compat.estimate_arguments(sharders))
    for option in (priced, scaled):
        expected, option.shards[0].perf = option.shards[0].perf, None
        estimator.estimate([option], sharder_map=sharders)
        assert option.shards[0].perf == expected


def test_torchrecs_planner_plans_all_types_with_it(caplog: pytest.LogCaptureFixture) -> None:
    model, limits = tables_and_limits()
    topology = cpu_topology(2)
    kinds = {"t": "row_wise", "u": "column_wise", "v": "data_parallel"}
    for name, kind in kinds.items():
        limits[name].sharding_types = [kind]
    estimator = NeuroShardPerfEstimator(topology, limits, cost_model=ANALYTIC)
    enumerator = EmbeddingEnumerator(
        topology, BATCH, limits, estimator=[estimator, EmbeddingStorageEstimator(topology, limits)]
    )
    theirs = EmbeddingShardingPlanner(topology, BATCH, enumerator=enumerator, constraints=limits, stats=[])
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.estimator"):
        plan = plan_json(theirs.plan(model, [AllTypesSharder()]))[""]
    assert {name: entry["type"] for name, entry in plan.items()} == kinds
    assert plan["t"]["ranks"] == plan["v"]["ranks"] == [0, 1]
    assert not [record for record in caplog.records if record.name == "torchrec_neuroshard.estimator"]


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
