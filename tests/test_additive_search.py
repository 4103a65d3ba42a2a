"""Costs that add up: the search, its proved bounds, and TorchRec's own estimates as the objective."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import ParameterConstraints

from benchmarks.known_optima.cp_sat import cp_sat_optimum
from benchmarks.known_optima.problems import ADDITIVE
from tests.planner_models import TwoCollections, bag_collection, bag_config, bag_sharders, cpu_topology
from tests.problems import random_problem, untrained_model
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.costs.additive_simulator import AdditiveObjective, simulate, single_shard_costs
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import Placement, Shard
from torchrec_neuroshard.search import SearchConfig, find_placement
from torchrec_neuroshard.search.lower_bound import _dual_feasible_functions, lower_bound_ms


def test_costs_add_up_and_include_communication() -> None:
    problem = random_problem(0, tables=3, ranks=2)
    parts = np.asarray([[1.0, 2.0, 0.25, 0.5], [3.0, 4.0, 0.5, 0.25], [5.0, 6.0, 0.125, 0.125]])
    objective = AdditiveObjective("given", lambda shards: parts[[table for table, _ in shards]])
    dims = [table.embedding_dim for table in problem.tables]
    placement = Placement(
        tuple(Shard(t, 0, dim, rank) for t, (dim, rank) in enumerate(zip(dims, (0, 0, 1)))), ("table_wise",) * 3
    )
    cost = simulate(problem, objective).cost(placement)
    assert cost.forward_ms.tolist() == [4.0, 5.0]
    assert cost.backward_comms_ms.tolist() == [0.75, 0.125]
    assert cost.total_ms == max(parts[:2].sum(), parts[2].sum())
    assert cost.bottleneck_rank == 0
    shares = simulate(problem, objective).shares(placement, cost)
    assert np.concatenate(shares)[:, :4] == pytest.approx(parts)


@pytest.mark.parametrize("seed", range(6))
def test_search_under_additive_costs_reaches_what_is_proved(seed: int) -> None:
    problem = random_problem(seed, tables=30, ranks=4, fill=0.4)
    objective = single_shard_costs(problem, untrained_model(seed))
    found = find_placement(problem, objective)
    assert check_placement(problem, found.placement) == []
    bound = lower_bound_ms(simulate(problem, objective))
    assert bound * (1 - 1e-9) <= found.cost.total_ms <= bound * 1.03


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_below_the_exact_optimum(seed: int) -> None:
    problem = ADDITIVE.problem(seed)
    objective = single_shard_costs(problem, untrained_model(seed))
    optimum = cp_sat_optimum(problem, objective, unit=4, limit=20)
    assert optimum.placement is not None
    assert 0 < lower_bound_ms(simulate(problem, objective)) <= optimum.total_ms * (1 + 1e-6)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_dual_feasible_functions_keep_what_fits_within_one(sizes: list[float]) -> None:
    """The defining property, on any set of sizes that fits in one bin."""
    array = np.asarray(sizes)
    array = array / max(1.0, array.sum())
    for function in _dual_feasible_functions():
        assert function(array).sum() <= 1 + 1e-6


def test_no_bound_is_claimed_for_nets() -> None:
    with pytest.raises(ValueError, match="add up"):
        lower_bound_ms(PlanSimulator(random_problem(0), untrained_model()))


def torchrec_rating(planner: NeuroShardPlanner | EmbeddingShardingPlanner, world_size: int) -> float:
    """TorchRec's own rating of the planner's last plan, estimated afresh."""
    topology = cpu_topology(world_size)
    enumerator = EmbeddingEnumerator(topology, batch_size=64, constraints=planner._constraints)
    options = planner._best_plan
    assert options
    compat.populate_estimates(enumerator, options, compat.sharder_maps(bag_sharders()))
    return float(NoopPerfModel(topology).rate(options))


def test_torchrecs_estimates_are_rated_as_torchrec_does() -> None:
    model = bag_collection(*(bag_config(f"t{i}", 1000 * (i + 1), 64 + 64 * (i % 3)) for i in range(9)))
    constraints = {f"t{i}": ParameterConstraints(pooling_factors=[float(1 + 7 * i % 5)]) for i in range(9)}
    ours = NeuroShardPlanner(cpu_topology(3), batch_size=64, constraints=constraints, cost_model="torchrec")
    ours.plan(model, bag_sharders())
    assert ours.report is not None
    assert ours.report.cost_model["name"] == "torchrec"
    assert ours.report.uncertainty is None
    predicted = ours.report.cost.total_ms
    on_shards = [shard.perf.total for option in ours._best_plan or [] for shard in option.shards]
    assert torchrec_rating(ours, 3) == pytest.approx(predicted)
    assert sum(on_shards) >= predicted

    restricted = {
        name: ParameterConstraints(
            pooling_factors=constraint.pooling_factors,
            sharding_types=["table_wise", "column_wise"],
            compute_kernels=["fused"],
        )
        for name, constraint in constraints.items()
    }
    theirs = EmbeddingShardingPlanner(cpu_topology(3), batch_size=64, constraints=restricted, debug=False)
    theirs.plan(model, bag_sharders())
    assert predicted <= torchrec_rating(theirs, 3) * (1 + 1e-9)


def test_shards_carry_our_predictions_for_torchrecs_stats() -> None:
    planner = NeuroShardPlanner(cpu_topology(2), batch_size=16, cost_model="analytic/generic_cpu")
    planner.plan(TwoCollections(), bag_sharders())
    report = planner.report
    assert report is not None and planner._best_plan
    compute, comms = np.zeros(2), np.zeros(2)
    for option in planner._best_plan:
        for shard in option.shards:
            compute[shard.rank] += shard.perf.fwd_compute + shard.perf.bwd_compute
            comms[shard.rank] += shard.perf.fwd_comms
            assert shard.storage.ddr > 0
    assert compute == pytest.approx(report.cost.compute_ms)
    assert comms == pytest.approx(report.cost.forward_comms_ms)


def test_timeout_covers_all_of_planning() -> None:
    """However short, there is a plan; with more time it is no worse."""
    torch.set_num_threads(1)
    model = bag_collection(*(bag_config(f"t{i}", 500 + 100 * i, 64) for i in range(80)))
    totals = []
    for seconds in (0.001, 3.0):
        planner = NeuroShardPlanner(
            cpu_topology(8), batch_size=64, cost_model="analytic/generic_cpu", timeout_seconds=seconds
        )
        planner.plan(model, bag_sharders())
        assert planner.report is not None
        totals.append(planner.report.cost.total_ms)
    assert totals[1] <= totals[0]


def test_search_without_repacking_is_never_better() -> None:
    for seed in range(3):
        problem = random_problem(seed, tables=20, ranks=4, fill=0.9)
        objective = single_shard_costs(problem, untrained_model(seed))
        without = find_placement(problem, objective, SearchConfig(repack_rounds=0))
        assert find_placement(problem, objective).cost.total_ms <= without.cost.total_ms
