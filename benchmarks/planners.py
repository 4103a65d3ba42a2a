"""The planners that are compared, by name."""

from __future__ import annotations

from typing import Any

from benchmarks.plan_records import PlannedResult
from torchrec_neuroshard.workload import Workload

TORCHREC_FORMS = ("torchrec", "torchrec_restricted", "torchrec_restricted_mp16")
# Beside these where row_wise is offered too: whether its planner gains by more types depends on the workload.
MORE_TORCHREC_FORMS = ("torchrec_mp16", "torchrec_columns_mp16")
ALL_TORCHREC_FORMS = (*TORCHREC_FORMS, *MORE_TORCHREC_FORMS)
OURS = ("neuroshard", "neuroshard_no_zipf")
ABLATIONS = ("neuroshard_prior", "neuroshard_additive")
PLANNERS = (*ALL_TORCHREC_FORMS, *OURS, *ABLATIONS)

# What all planners are given: TorchRec's sharders, or such that offer row_wise on a CPU too (benchmarks.all_types).
SHARDERS = ("default", "all")
COMPARED = {"default": (*TORCHREC_FORMS, *OURS), "all": (*ALL_TORCHREC_FORMS, *OURS)}


def planner_inputs(
    planner: str,
    world_size: int,
    batch_size: int,
    timeout_seconds: int | None = None,
    cost_model: str = "auto",
    sharders: str = "default",
) -> dict[str, Any]:
    """Everything that a planner's plan depends on, the workload's tables apart, as JSON.

    Args:
        planner: one of :data:`PLANNERS`.
        world_size: ranks.
        batch_size: samples per rank.
        timeout_seconds: limit of TorchRec's search; ours needs none and is given none.
        cost_model: what our planner is given; TorchRec has no use for it.
        sharders: one of :data:`SHARDERS`.
    """
    if planner in ALL_TORCHREC_FORMS:
        from benchmarks.torchrec_planners import torchrec_inputs

        return torchrec_inputs(planner, world_size, batch_size, timeout_seconds, sharders)
    from benchmarks.neuroshard_planners import neuroshard_inputs

    return neuroshard_inputs(planner, world_size, batch_size, cost_model, sharders)


def plan(
    planner: str,
    workload: Workload,
    world_size: int,
    batch_size: int,
    timeout_seconds: int | None = None,
    cost_model: str = "auto",
    sharders: str = "default",
) -> PlannedResult:
    """Plans a workload with the named planner; arguments as of :func:`planner_inputs`.

    Raises:
        ValueError: there is no planner of that name.
    """
    if planner not in PLANNERS:
        raise ValueError(f"no planner is called {planner!r}; there are {', '.join(PLANNERS)}")
    if planner in ALL_TORCHREC_FORMS:
        from benchmarks.torchrec_planners import plan_with_torchrec

        return plan_with_torchrec(planner, workload, world_size, batch_size, timeout_seconds, sharders)
    from benchmarks.neuroshard_planners import plan_with_neuroshard

    return plan_with_neuroshard(planner, workload, world_size, batch_size, cost_model, sharders)
