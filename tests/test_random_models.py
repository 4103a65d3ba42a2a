"""500 random models, constraints and topologies: each gets a plan that holds, or an error that does."""

from __future__ import annotations

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError

from tests.random_models import RandomCase, faults_of, random_case
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.search import SearchConfig

CASES, BATCHES = 500, 10
RESERVED = 0.1


def planner_of(case: RandomCase) -> NeuroShardPlanner:
    device = case.topology.compute_device
    hardware = "h100_sxm" if device == "cuda" else "generic_cpu"
    return NeuroShardPlanner(
        case.topology,
        case.batch_size,
        case.constraints,
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        stats=[],
        cost_model=f"analytic/{hardware}",
        hardware=hardware,
        search=SearchConfig(levels=1, repack_rounds=5),
    )


@pytest.mark.parametrize("batch", range(BATCHES))
def test_every_random_model_gets_a_plan_that_holds_or_an_error_that_does(batch: int) -> None:
    planned = 0
    for seed in range(batch * CASES // BATCHES, (batch + 1) * CASES // BATCHES):
        case = random_case(seed)
        planner = planner_of(case)
        try:
            plan = planner.plan(case.model, case.sharders)  # TorchRec's validators run in it
        except PlannerError as error:
            kind = error.error_type.name
            assert kind in ("INSUFFICIENT_STORAGE", "STRICT_CONSTRAINTS"), f"seed {seed}: {error}"
            if kind == "INSUFFICIENT_STORAGE":
                assert "GiB" in str(error) and not fits_torchrec(case), f"seed {seed}: TorchRec has a plan; {error}"
            continue
        planned += 1
        assert planner.report is not None
        faults = faults_of(case, plan, planner.get_selected_options(), planner.report.cluster.capacity)
        assert not faults, f"seed {seed}: {faults}"
    assert planned > CASES // BATCHES // 3


def fits_torchrec(case: RandomCase) -> bool:
    """Whether TorchRec's planner finds a plan, where it counts the same memory as ours."""
    kernels = [constraint.compute_kernels for constraint in case.constraints.values()]
    if case.optimizer != EmbOptimType.EXACT_SGD or any(kernels):
        return False  # TorchRec overlooks the optimizers of fused_params, and the width of cache slots
    planner = EmbeddingShardingPlanner(
        case.topology,
        case.batch_size,
        constraints=case.constraints,
        storage_reservation=FixedPercentageStorageReservation(RESERVED),
        stats=[],
        timeout_seconds=5,
    )
    try:
        planner.plan(case.model, case.sharders)
    except (PlannerError, RuntimeError):
        return False
    return True


def test_the_check_finds_what_is_wrong() -> None:
    """A check that lets anything pass would prove nothing."""
    case = next(c for c in map(random_case, range(100)) if plain(c))
    planner = planner_of(case)
    plan = planner.plan(case.model, case.sharders)
    options = planner.get_selected_options()
    assert planner.report is not None
    capacity = planner.report.cluster.capacity
    assert faults_of(case, plan, options, capacity) == []
    assert any("of" in fault for fault in faults_of(case, plan, options, capacity * 0.0))
    path, name = next(iter(case.tables))
    sharding = plan.plan[path][name]  # type: ignore[index]
    first = sharding.sharding_spec.shards[0]
    for change, words in (
        (lambda: setattr(first, "shard_sizes", [first.shard_sizes[0], first.shard_sizes[1] - 4]), "do not make up"),
        (lambda: sharding.ranks.__setitem__(0, case.topology.world_size), "ranks"),
        (lambda: plan.plan.pop(path), "tables planned"),
    ):
        change()
        assert any(words in fault for fault in faults_of(case, plan, options, capacity)), words


def plain(case: RandomCase) -> bool:
    """A case without constraints, on several ranks, which is sure to be planned."""
    return not case.constraints and case.topology.world_size > 1 and case.topology.compute_device == "cuda"
