from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parity import AllTypesSharder
from planner_models import ANALYTIC, TwoCollections, bag_collection, bag_config, bag_sharders, cpu_topology
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.types import ParameterConstraints, Perf, ShardingOption, Topology

from torchrec_neuroshard import NeuroShardPerfModel, NeuroShardPlanner, TableStats
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.search import SearchConfig

BATCH = 64
ADAGRAD: dict[str, Any] = {"optimizer": EmbOptimType.EXACT_ADAGRAD}


def mixed() -> tuple[torch.nn.Module, dict[str, ParameterConstraints]]:
    """A model whose tables have to lie in all ways."""
    model = bag_collection(
        bag_config("rows", 30_001, 64, ["r0", "r1"]),
        bag_config("copies", 500, 32),
        bag_config("columns", 20_000, 128),
        bag_config("whole", 9_000, 32),
        bag_config("host_rows", 7_001, 64),
        bag_config("host_columns", 6_000, 128),
    )
    types = {
        "rows": "row_wise",
        "copies": "data_parallel",
        "columns": "column_wise",
        "whole": "table_wise",
        "host_rows": "table_row_wise",
        "host_columns": "table_column_wise",
    }
    limits = {
        name: ParameterConstraints(sharding_types=[kind], min_partition=32, pooling_factors=[9.0])
        for name, kind in types.items()
    }
    limits["rows"].pooling_factors = [12.0, 3.0]
    return model, limits


@pytest.mark.parametrize("pipeline", ["none", "sparse_dist"])
def test_a_plan_is_rated_as_the_planner_predicts_it(pipeline: str) -> None:
    model, limits = mixed()
    topology = Topology(world_size=4, local_world_size=2, compute_device="cpu", ddr_cap=2**32)
    sharders: list[Any] = [AllTypesSharder(fused_params=ADAGRAD)]
    stats = TableStats({"whole": 21.0}, {"rows": AccessDistribution.zipf(30_001, 1.1)})
    shared: dict[str, Any] = {"cost_model": ANALYTIC, "table_stats": stats, "pipeline": pipeline}
    planner = NeuroShardPlanner(topology, BATCH, limits, stats=[], **shared)
    planner.plan(model, sharders)
    assert planner.report is not None
    options = planner.get_selected_options()
    assert {option.sharding_type for option in options} >= {"row_wise", "data_parallel", "column_wise"}
    rated = NeuroShardPerfModel(topology, limits, sharders=sharders, **shared)
    expected = planner.report.cost.total_ms
    assert rated.rate(options) == pytest.approx(expected, rel=1e-9)
    assert rated.rate(options[::-1]) == rated.rate(options)
    assert rated.rate([]) == 0.0
    # Without the sharders' fused params, state is not counted, unless it is said otherwise.
    sgd = NeuroShardPerfModel(topology, limits, **shared).rate(options)
    assert sgd < expected
    named = NeuroShardPerfModel(topology, limits, optimizer="adagrad", **shared).rate(options)
    assert named == pytest.approx(expected, rel=1e-9)


def test_modules_do_not_share_groups() -> None:
    topology = cpu_topology(2)
    planner = NeuroShardPlanner(topology, BATCH, stats=[], cost_model=ANALYTIC)
    planner.plan(TwoCollections(), bag_sharders())
    assert planner.report is not None
    options = planner.get_selected_options()
    rated = NeuroShardPerfModel(topology, cost_model=ANALYTIC)
    assert rated.rate(options) == pytest.approx(planner.report.cost.total_ms, rel=1e-9)
    fused = copy.deepcopy(options)
    for number, option in enumerate(fused):
        option.name, option._module = f"t{number}", ("one", option._module[1])
    assert rated.rate(fused) < rated.rate(options)


def default_plans(
    limits: dict[str, ParameterConstraints], model: torch.nn.Module, rated: NeuroShardPerfModel
) -> tuple[list[ShardingOption], list[ShardingOption]]:
    """What TorchRec's planner picks by its own rating, and by ours."""
    plans = []
    for performance_model in (None, rated):
        planner = EmbeddingShardingPlanner(
            cpu_topology(4), BATCH, constraints=limits, performance_model=performance_model, stats=[]
        )
        planner.plan(model, bag_sharders())
        assert planner._best_plan is not None
        plans.append(planner._best_plan)
    return plans[0], plans[1]


def test_torchrecs_planner_picks_the_better_plan_with_it() -> None:
    generator = np.random.default_rng(0)
    model = bag_collection(
        *(bag_config(f"t{number}", int(rows), 64) for number, rows in enumerate(generator.integers(1_000, 90_000, 8)))
    )
    limits = {
        f"t{number}": ParameterConstraints(
            sharding_types=["table_wise", "column_wise"], min_partition=32, pooling_factors=[float(pooling)]
        )
        for number, pooling in enumerate(generator.integers(1, 60, 8))
    }
    rated = NeuroShardPerfModel(cpu_topology(4), limits, cost_model=ANALYTIC)
    without, with_it = default_plans(limits, model, rated)
    assert rated.rate(with_it) < 0.95 * rated.rate(without)
    planner = NeuroShardPlanner(
        cpu_topology(4), BATCH, limits, stats=[], cost_model=ANALYTIC, search=SearchConfig(seed=0)
    )
    planner.plan(model, bag_sharders())
    assert planner.report is not None and planner.report.cost.total_ms <= rated.rate(with_it) * (1 + 1e-9)


def test_what_cannot_be_simulated_is_added_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    topology = cpu_topology(2)
    model = bag_collection(bag_config("known", 5_000, 64), bag_config("other", 5_000, 64))
    planner = NeuroShardPlanner(topology, BATCH, stats=[], cost_model=ANALYTIC)
    planner.plan(model, bag_sharders())
    known, other = planner.get_selected_options()
    known.shards, other.shards = [known.shards[0]], [other.shards[0]]
    for option, rank in ((known, 0), (other, 1)):
        option.sharding_type, option.shards[0].size, option.shards[0].offset = "table_wise", [5_000, 64], [0, 0]
        option.shards[0].rank = rank
    other.compute_kernel = "key_value"
    rated = NeuroShardPerfModel(topology, cost_model=ANALYTIC, pipeline="none")
    alone = rated.rate([known])
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.perf_model"):
        other.shards[0].perf = Perf(fwd_compute=500.0, fwd_comms=70.0, bwd_compute=0.0, bwd_comms=0.0)
        elsewhere = rated.rate([known, other])
        other.shards[0].rank = 0
        together = rated.rate([known, other])
        only = rated.rate([other])
    assert only == pytest.approx(570.0)
    assert together == pytest.approx(570.0 + alone)  # one rank does both, one after the other
    assert 570.0 < elsewhere < together  # the forward pass waits for the slower rank
    messages = [record.getMessage() for record in caplog.records if record.name == "torchrec_neuroshard.perf_model"]
    assert len(messages) == 1 and "key_value" in messages[0]
    other.shards[0].perf = None
    with pytest.raises(ValueError, match="'other' cannot be simulated"):
        rated.rate([known, other])
    known.shards[0].rank = None
    with pytest.raises(ValueError, match="'known' has a shard without a rank"):
        rated.rate([known])


def test_kernels_in_host_memory_are_rated() -> None:
    topology = Topology(world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=2**33, ddr_cap=2**34)
    model = bag_collection(bag_config("t", 400_000, 64), bag_config("u", 3_000, 64))
    limits = {"t": ParameterConstraints(compute_kernels=["fused_uvm_caching"], pooling_factors=[10.0])}
    planner = NeuroShardPlanner(topology, BATCH, limits, stats=[], cost_model=ANALYTIC)
    planner.plan(model, bag_sharders())
    assert planner.report is not None
    options = planner.get_selected_options()
    rated = NeuroShardPerfModel(topology, limits, cost_model=ANALYTIC)
    cached = rated.rate(options)
    assert cached == pytest.approx(planner.report.cost.total_ms, rel=1e-9)
    device = copy.deepcopy(options)
    for option in device:
        option.compute_kernel, option.cache_params = "fused", None
    assert rated.rate(device) < cached
    assert rated.rate(options) == cached


def test_an_unknown_pipeline_is_an_error() -> None:
    with pytest.raises(ValueError, match="'prefetch'"):
        NeuroShardPerfModel(cpu_topology(2), cost_model=ANALYTIC, pipeline="eager")


def test_a_tower_is_rated_as_the_planner_counts_it() -> None:
    """By TorchRec's formula, as a module that is left to TorchRec's planner."""
    from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
    from torchrec.modules.embedding_tower import EmbeddingTower

    tower = EmbeddingTower(bag_collection(bag_config("tower", 10_000, 64)), torch.nn.Linear(64, 4))
    model_ = torch.nn.ModuleDict({"ours": bag_collection(bag_config("t", 200_000, 64)), "tower": tower})
    sharders: list[Any] = [*bag_sharders(), EmbeddingTowerSharder()]
    topology = Topology(2, "cuda", local_world_size=2)
    settings: dict[str, Any] = {"cost_model": "analytic/h100_sxm", "hardware": "h100_sxm"}
    planner = NeuroShardPlanner(topology, BATCH, stats=[], **settings)
    planner.plan(model_, sharders)
    rated = NeuroShardPerfModel(topology, sharders=sharders, **settings).rate(planner.get_selected_options())
    assert planner.report is not None
    assert rated == pytest.approx(planner.report.cost.total_ms, rel=0.02)
