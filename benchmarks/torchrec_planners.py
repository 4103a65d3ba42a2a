"""TorchRec's own planner in its three forms, as the benchmark runs it."""

from __future__ import annotations

import time
from typing import Any

import torchrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from benchmarks.plan_records import PlannedResult, placement_of
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, sharders
from torchrec_neuroshard.workload import Workload

# More host memory than any of these workloads needs: they compare balance, not packing.
DDR_BYTES_PER_RANK = 256 << 30

# The space TorchRec's planner searches best, and the same with column shards of 16 allowed: left alone, it
# never splits dims up to 128.
RESTRICTED = {"sharding_types": ["table_wise", "column_wise"], "compute_kernels": ["fused"]}
FORMS: dict[str, dict[str, Any]] = {
    "torchrec": {},
    "torchrec_restricted": RESTRICTED,
    "torchrec_restricted_mp16": {**RESTRICTED, "min_partition": 16},
}


def topology(world_size: int) -> Topology:
    """One CPU host with all ranks, which every planner is given."""
    return Topology(
        world_size=world_size,
        local_world_size=world_size,
        compute_device="cpu",
        ddr_cap=DDR_BYTES_PER_RANK,
    )


def torchrec_inputs(form: str, world_size: int, batch_size: int, timeout_seconds: int | None) -> dict[str, Any]:
    """All inputs of one form, as JSON."""
    return {
        "planner": f"torchrec {torchrec.__version__} EmbeddingShardingPlanner",
        "constraints": {"pooling_factors": "true", **FORMS[form]},
        "batch_size_per_rank": batch_size,
        "topology": {
            "world_size": world_size,
            "local_world_size": world_size,
            "compute_device": "cpu",
            "ddr_gib_per_rank": DDR_BYTES_PER_RANK >> 30,
            "bandwidths": "TorchRec's defaults",
        },
        "storage_reservation": "TorchRec's default (HeuristicalStorageReservation)",
        "timeout_seconds": timeout_seconds,
        "PYTHONHASHSEED": "0",
    }


def plan_with_torchrec(
    form: str, workload: Workload, world_size: int, batch_size: int, timeout_seconds: int | None
) -> PlannedResult:
    """Plans with one of :data:`FORMS`.

    Args:
        form: key of :data:`FORMS`.
        workload: the tables.
        world_size: ranks.
        batch_size: samples per rank.
        timeout_seconds: TorchRec's own time limit for its search; None lets it finish.
    """
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size),
        batch_size=batch_size,
        constraints=parameter_constraints(workload, **FORMS[form]),
        debug=False,
        timeout_seconds=timeout_seconds,
    )
    module = embedding_model(workload)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    plan = planner.plan(module, sharders())
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    loads = [0.0] * world_size
    for option in planner._best_plan or []:
        for shard in option.shards:
            ranks = range(world_size) if shard.rank is None else [shard.rank]
            for rank in ranks:
                loads[rank] += shard.perf.total
    inputs = torchrec_inputs(form, world_size, batch_size, timeout_seconds)
    return PlannedResult(placement_of(plan, workload), seconds, cpu_seconds, max(loads), inputs)
