"""``plan``: plans the tables of a workload file with our planner or TorchRec's, and predicts what the plan costs."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import Any, Iterator

import numpy as np
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import DDR_CAP
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.adapters import compat, workload_model
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.plan_placement import UnsimulatedPlanError, simulated_problem
from torchrec_neuroshard.adapters.topology import DetectedMachine, planning_cluster
from torchrec_neuroshard.adapters.torchrec_costs import NAME as TORCHREC_COSTS
from torchrec_neuroshard.adapters.torchrec_costs import torchrec_objective
from torchrec_neuroshard.cli.errors import CliError
from torchrec_neuroshard.cli.plan_output import PlanOutput, print_tables
from torchrec_neuroshard.costs.additive_simulator import Objective, simulate
from torchrec_neuroshard.costs.hardware import HARDWARE, detect_hardware, gpu_preset, hardware_spec
from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.planner import NeuroShardPlanner
from torchrec_neuroshard.problem import COLUMN_WISE, TABLE_WISE, Pipeline
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.workload import Workload, WorkloadError

_GIB = 1024**3
_DEFAULT_RANKS_PER_HOST = 8
_INFEASIBLE = ("INSUFFICIENT_STORAGE", "STRICT_CONSTRAINTS", "PARTITION")


@dataclass(frozen=True)
class Request:
    """What is to be planned, with every default filled in.

    Attributes:
        workload: the tables.
        batch_size: samples per rank.
        machine: the ranks, their memory and their hardware.
        cost_model: predicts the plan, whoever makes it; "torchrec" for TorchRec's own estimates.
        pipeline: how the training loop overlaps work.
    """

    workload: Workload
    batch_size: int
    machine: DetectedMachine
    cost_model: CostModel | str
    pipeline: Pipeline


def run(options: argparse.Namespace) -> int:
    """Plans as the options say and prints the plan; returns 0, or 3 when no plan is feasible.

    Raises:
        CliError: an option, a field of the workload file or the cost model cannot be used.
    """
    logging.basicConfig(format="%(message)s", level=logging.WARNING, force=True)  # importing TorchRec set another
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    try:
        with _stdout_to_stderr():
            output = _plan(read_request(options), options)
    except (WorkloadError, CostModelError) as error:
        raise CliError(str(error)) from error
    except PlannerError as error:
        if error.error_type.name not in _INFEASIBLE:
            raise CliError(str(error)) from error
        print(f"No feasible plan ({error.error_type.name}): {error}", file=sys.stderr)
        if options.json:
            print(json.dumps({"schema": 1, "error": error.error_type.name, "message": str(error)}))
        return 3
    if options.json:
        print(json.dumps(output.to_json()))
    else:
        print_tables(output)
    return 0


def read_request(options: argparse.Namespace) -> Request:
    """Reads the workload file, checks the options against it and fills in the defaults."""
    workload = Workload.load(options.workload)
    world_size = options.world_size
    batch_size = _batch_size_per_rank(options, workload)
    local = options.local_world_size
    if local is None:
        local = max(d for d in range(1, min(world_size, _DEFAULT_RANKS_PER_HOST) + 1) if world_size % d == 0)
    elif world_size % local:
        raise CliError(f"--local-world-size {local} must divide --world-size {world_size}: hosts are alike")
    hardware = options.hardware or detect_hardware(options.device)
    if hardware not in HARDWARE and hardware not in shipped_models() and HARDWARE[gpu_preset(hardware)].has_data_sheet:
        hardware = gpu_preset(hardware)  # a GPU's name as records have it, such as nvidia_h200
    if hardware not in HARDWARE and hardware not in shipped_models():
        known = ", ".join(sorted({*HARDWARE, *shipped_models()}))
        raise CliError(f"--hardware {hardware!r} is unknown; known are: {known}")
    if hardware in HARDWARE and HARDWARE[hardware].device != options.device:
        raise CliError(f"--hardware {hardware} is for --device {HARDWARE[hardware].device}, not {options.device}")
    if hardware not in HARDWARE:
        device = CostModel.load(hardware).card["hardware"]["device"]
        if device != options.device:
            raise CliError(f"--hardware {hardware} is for --device {device}, not {options.device}")
    spec = hardware_spec(hardware, options.device)
    hbm_gib = options.hbm_gb if options.hbm_gb is not None else spec.memory_gib
    machine = DetectedMachine(
        world_size=world_size,
        local_world_size=local,
        device=options.device,
        hbm_bytes=int(hbm_gib * _GIB) if options.device == "cuda" else 0,
        ddr_bytes=int(options.ddr_gb * _GIB) if options.ddr_gb is not None else DDR_CAP,
        hardware=hardware,
    )
    hbm = f"{machine.hbm_bytes / _GIB:g} GiB of HBM and " if options.device == "cuda" else ""
    print(
        f"Planning for {world_size} {options.device} ranks, {local} per host, with {hbm}"
        f"{machine.ddr_bytes / _GIB:g} GiB of host memory each; hardware {hardware}; {batch_size} samples per rank",
        file=sys.stderr,
    )
    if options.bound and (options.cost_model != TORCHREC_COSTS or options.planner != "neuroshard"):
        raise CliError(
            "--bound needs costs that add up and our search: give --cost-model torchrec and --planner neuroshard"
        )
    cost_model = options.cost_model
    if cost_model != TORCHREC_COSTS:
        cost_model = resolve_cost_model(cost_model, options.device, hardware)
    return Request(workload, batch_size, machine, cost_model, Pipeline(options.pipeline))


def _batch_size_per_rank(options: argparse.Namespace, workload: Workload) -> int:
    world_size = options.world_size
    batch_size = options.batch_size
    source = "--batch-size"
    if batch_size is None:
        batch_size, source = workload.batch_size, f"{options.workload}: field 'batch_size'"
    if batch_size is None:
        raise CliError(
            f"{options.workload}: field 'batch_size' is null or missing; give the samples per iteration over all ranks "
            "with --batch-size"
        )
    if batch_size % world_size:
        nearest = max(1, round(batch_size / world_size)) * world_size
        raise CliError(
            f"{source} is {batch_size} samples over all ranks, which {world_size} ranks cannot share evenly; "
            f"the nearest value that they can is {nearest}"
        )
    return batch_size // world_size


def _plan(request: Request, options: argparse.Namespace) -> PlanOutput:
    model = workload_model.embedding_model(request.workload)
    topology = request.machine.topology()
    restricted = options.planner == "torchrec-restricted"
    constraints = workload_model.parameter_constraints(
        request.workload,
        sharding_types=[TABLE_WISE, COLUMN_WISE] if restricted else None,
        compute_kernels=["fused"] if restricted else None,
    )
    planner = _planner(request, options, topology, constraints)
    begun = time.perf_counter()
    plan = planner.plan(model, workload_model.sharders())
    seconds = time.perf_counter() - begun
    predicted, remark = _predict(request, plan, model, topology, constraints)
    report = planner.report if isinstance(planner, NeuroShardPlanner) else None
    return PlanOutput(
        planner=options.planner,
        plan_seconds=seconds,
        workload=request.workload,
        machine=request.machine,
        batch_size=request.batch_size * request.machine.world_size,
        pipeline=request.pipeline.value,
        cost_model=_provenance(request.cost_model),
        plan=plan,
        memory_bytes=_memory(planner._best_plan or [], request.machine.world_size),
        predicted_ms=predicted,
        remark=remark,
        uncertainty=report.uncertainty if report is not None else None,
        lower_bound_ms=report.lower_bound_ms if report is not None else None,
        notes=report.notes if report is not None else (),
    )


def _planner(
    request: Request,
    options: argparse.Namespace,
    topology: Topology,
    constraints: dict[str, ParameterConstraints],
) -> NeuroShardPlanner | EmbeddingShardingPlanner:
    common: dict[str, Any] = {
        "topology": topology,
        "batch_size": request.batch_size,
        "constraints": constraints,
        "storage_reservation": compat.default_storage_reservation(),
        "stats": NoopEmbeddingStats(),
        "debug": False,
        "timeout_seconds": None if options.timeout is None else max(1, math.ceil(options.timeout)),
    }
    if options.planner != "neuroshard":
        return EmbeddingShardingPlanner(**common)
    return NeuroShardPlanner(
        **{**common, "timeout_seconds": options.timeout},
        cost_model=request.cost_model,
        hardware=request.machine.hardware,
        table_stats=workload_model.table_stats(request.workload),
        column_split=options.column_split,
        pipeline=options.pipeline,
        search=SearchConfig(seed=options.seed, prove_bound=options.bound),
    )


def _predict(
    request: Request,
    plan: ShardingPlan,
    model: nn.Module,
    topology: Topology,
    constraints: dict[str, ParameterConstraints],
) -> tuple[dict[str, Any] | None, str]:
    """The ``predicted_ms`` object, or None and the reason why there is none."""
    ranks = request.machine.world_size
    cluster = planning_cluster(topology, np.full((ranks, 2), np.inf), request.machine.hardware, request.pipeline)
    # Constraints on types bind the planner; here they would only reject tables that the plan itself describes.
    free = {name: ParameterConstraints(pooling_factors=c.pooling_factors) for name, c in constraints.items()}
    tables = collect_tables(
        model,
        workload_model.sharders(),
        free,
        request.machine.device,
        request.batch_size,
        workload_model.table_stats(request.workload),
    )
    try:
        problem, placement = simulated_problem(plan, tables, cluster, request.batch_size)
    except UnsimulatedPlanError as error:
        return None, f"no prediction: {error}"
    objective: Objective
    if isinstance(request.cost_model, CostModel):
        objective = request.cost_model
    else:
        enumerator = EmbeddingEnumerator(topology=topology, batch_size=request.batch_size, constraints=free)
        maps = compat.sharder_maps(workload_model.sharders())
        objective = torchrec_objective(tables, enumerator, maps, request.batch_size, cluster)
    return simulate(problem, objective).cost(placement).to_json(), ""


def _provenance(cost_model: CostModel | str) -> dict[str, str]:
    if isinstance(cost_model, CostModel):
        return {
            "name": cost_model.name,
            "provenance": cost_model.provenance,
            "collectives": cost_model.collectives_source,
        }
    return {"name": cost_model, "provenance": "analytic"}


def _memory(plan: list[ShardingOption], world_size: int) -> list[tuple[int, int]]:
    """[ranks] (HBM, DDR) bytes of the shards by the planner's own estimate; replicas are on every rank."""
    totals = [(0, 0)] * world_size
    for option in plan:
        for shard in option.shards:
            if shard.storage is None:
                continue
            for rank in range(world_size) if shard.rank is None else [shard.rank]:
                hbm, ddr = totals[rank]
                totals[rank] = (hbm + int(shard.storage.hbm), ddr + int(shard.storage.ddr))
    return totals


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends everything that planners and libraries print, from C++ too, to standard error."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)
