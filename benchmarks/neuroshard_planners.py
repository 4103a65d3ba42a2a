"""NeuroShardPlanner as the benchmark runs it, and what is left of it when parts of its cost model are taken away."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from functools import cache
from pathlib import Path
from typing import Any

import torchrec_neuroshard
from benchmarks.all_types import NAMED_KERNELS, NAMED_TYPES, chosen_sharders
from benchmarks.plan_records import PlannedResult, placement_of
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S
from benchmarks.torchrec_planners import DDR_BYTES_PER_RANK, stated_bandwidths, topology
from torchrec_neuroshard import CostModel, NeuroShardPlanner
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, table_stats
from torchrec_neuroshard.costs.additive import AdditiveGroupModel
from torchrec_neuroshard.costs.collective_model import CollectiveModel
from torchrec_neuroshard.costs.collective_prior import CollectivePrior, CollectivePriors
from torchrec_neuroshard.costs.collective_traffic import COLLECTIVES
from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.hardware import detect_hardware
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.workload import Workload

# Name -> (which group costs the search sees, whether it is told the access distributions).
VARIANTS: dict[str, tuple[str, bool]] = {
    "neuroshard": ("set nets", True),
    "neuroshard_no_zipf": ("set nets", False),
    "neuroshard_prior": ("fitted prior alone", True),
    "neuroshard_additive": ("sum of the nets' single-shard predictions", True),
}


# What our planner is told of the types when all are offered; one that nobody named would not be replicated.
NAMED: dict[str, dict[str, Any]] = {
    "default": {},
    "all": {"sharding_types": list(NAMED_TYPES), "compute_kernels": list(NAMED_KERNELS)},
}


def neuroshard_inputs(
    planner: str, world_size: int, batch_size: int, cost_model: str, sharders: str = "default"
) -> dict[str, Any]:
    """All inputs of one variant, as JSON; they include the code and the weights, so that a change makes new plans."""
    costs, knows_access = VARIANTS[planner]
    model = _base_model(cost_model)
    inputs = {
        "planner": f"torchrec_neuroshard NeuroShardPlanner, code {code_fingerprint()}",
        "cost_model": {
            "name": model.name,
            "provenance": model.provenance,
            "weights": _model_fingerprint(cost_model),
            "group_costs": costs,
            **({} if sharders == "default" else {"collective_costs": f"bytes at {BANDWIDTH_GB_PER_S:g} GB/s"}),
        },
        "constraints": {"pooling_factors": "true", **NAMED[sharders]},
        "table_stats": "true pooling factors and Zipf exponents" if knows_access else None,
        "pipeline": "sparse_dist",
        "column_split": "auto",
        "batch_size_per_rank": batch_size,
        "topology": {
            "world_size": world_size,
            "local_world_size": world_size,
            "compute_device": "cpu",
            "ddr_gib_per_rank": DDR_BYTES_PER_RANK >> 30,
            **({} if sharders == "default" else {"bandwidths": stated_bandwidths(True)}),
        },
        "seed": 0,
        "timeout_seconds": None,
    }
    return inputs if sharders == "default" else {**inputs, "sharders": sharders}


def plan_with_neuroshard(
    planner: str,
    workload: Workload,
    world_size: int,
    batch_size: int,
    cost_model: str,
    sharders: str = "default",
) -> PlannedResult:
    """Plans with one of :data:`VARIANTS`.

    Args:
        planner: key of :data:`VARIANTS`.
        workload: the tables.
        world_size: ranks.
        batch_size: samples per rank.
        cost_model: "auto", a shipped name or a path.
        sharders: one of :data:`benchmarks.planners.SHARDERS`.
    """
    knows_access = VARIANTS[planner][1]
    planner_object = NeuroShardPlanner(
        topology=topology(world_size, bandwidth=sharders == "all"),
        batch_size=batch_size,
        constraints=parameter_constraints(workload, **NAMED[sharders]),
        debug=False,
        cost_model=variant_model(planner, cost_model, sharders),
        table_stats=table_stats(workload) if knows_access else None,
    )
    module, offered = embedding_model(workload), chosen_sharders(sharders)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    plan = planner_object.plan(module, offered)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    report = planner_object.report
    assert report is not None
    predicted = max(rank["forward"] + rank["backward"] for rank in report.to_json()["predicted_ms"]["per_rank"])
    inputs = neuroshard_inputs(planner, world_size, batch_size, cost_model, sharders)
    return PlannedResult(placement_of(plan, workload), seconds, cpu_seconds, predicted, inputs)


def variant_model(planner: str, cost_model: str, sharders: str = "default") -> CostModel:
    """The cost model that a variant's search sees.

    Where all sharding types are chosen from, its collectives take what the comparison prices them at: those of the
    shipped models were measured on ranks that share a few cores, where moving bytes costs far more.
    """
    model = _base_model(cost_model)
    if sharders == "all":
        model = dataclasses.replace(model, collectives=priced_collectives())
    if planner == "neuroshard_additive":
        return dataclasses.replace(model, groups=AdditiveGroupModel(model.groups), ensemble=None)
    if planner == "neuroshard_prior" and isinstance(model.groups, GroupCostModel):
        return dataclasses.replace(model, groups=GroupCostModel(model.groups.prior), ensemble=None)
    return model


def priced_collectives() -> CollectiveModel:
    """Collectives as :func:`benchmarks.rank_costs.collectives_ms` prices them: bytes over one bandwidth, in a ring."""
    milliseconds_per_byte = 1e3 / (BANDWIDTH_GB_PER_S * 1e9)
    prior = CollectivePrior(0.0, 0.0, milliseconds_per_byte, milliseconds_per_byte, 0.0)
    # gloo, which reduce-scatters by an all-reduce, would move twice the bytes
    return CollectiveModel(CollectivePriors((prior,) * len(COLLECTIVES), "nccl", shared=False))


@cache
def _base_model(cost_model: str) -> CostModel:
    return resolve_cost_model(cost_model, "cpu", detect_hardware("cpu"))


@cache
def _model_fingerprint(cost_model: str) -> str:
    model = _base_model(cost_model)
    digest = hashlib.sha256(json.dumps(model.card, sort_keys=True, default=str).encode())
    if isinstance(model.groups, GroupCostModel):
        digest.update(json.dumps(model.groups.prior.to_json(), sort_keys=True).encode())
        for net in (*model.groups.nets, *(model.ensemble.nets if model.ensemble is not None else ())):
            for name, tensor in sorted(net.state_dict().items()):
                digest.update(name.encode() + tensor.numpy().tobytes())
    if model.collectives.net is not None:
        for name, tensor in sorted(model.collectives.net.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()[:16]


@cache
def code_fingerprint() -> str:
    """A hash of the code that a plan depends on."""
    root = Path(torchrec_neuroshard.__file__).parent
    files = [root / name for name in ("access.py", "layout.py", "problem.py", "workload.py", "planner.py")]
    for room in ("adapters", "costs", "search"):
        files += sorted((root / room).glob("*.py"))
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:12]
