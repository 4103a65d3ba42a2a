"""TorchRec's own planner in its forms, as the benchmark runs it."""

from __future__ import annotations

import time
from typing import Any

import torchrec
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology

from benchmarks.all_types import chosen_sharders
from benchmarks.plan_records import PlannedResult, placement_of
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints
from torchrec_neuroshard.workload import Workload

# More host memory than any of these workloads needs: they compare balance, not packing.
DDR_BYTES_PER_RANK = 256 << 30

_GIB = 1 << 30  # of which TorchRec counts its bandwidths

# The space TorchRec's planner searches best, and the same with column shards of 16 allowed: left alone, it
# never splits dims up to 128.
RESTRICTED = {"sharding_types": ["table_wise", "column_wise"], "compute_kernels": ["fused"]}
MP16 = {"min_partition": 16}
FORMS: dict[str, dict[str, Any]] = {
    "torchrec": {},
    "torchrec_restricted": RESTRICTED,
    "torchrec_restricted_mp16": {**RESTRICTED, **MP16},
    "torchrec_mp16": MP16,
    "torchrec_columns_mp16": {**RESTRICTED, **MP16},
}
# The restricted forms where the sharders offer row_wise too.
RESTRICTED_WITH_ROWS = {**RESTRICTED, "sharding_types": ["table_wise", "column_wise", "row_wise"]}
FORMS_WITH_ROWS: dict[str, dict[str, Any]] = {
    **FORMS,
    "torchrec_restricted": RESTRICTED_WITH_ROWS,
    "torchrec_restricted_mp16": {**RESTRICTED_WITH_ROWS, **MP16},
}


def form_constraints(form: str, sharders: str) -> dict[str, Any]:
    """What a form's ParameterConstraints say beside pooling factors, with one of the choices of sharders."""
    return (FORMS_WITH_ROWS if sharders == "all" else FORMS)[form]


# Where row-wise and data_parallel are chosen from, which buy compute with communication, planners are told the
# bandwidth at which collectives are priced; not so TorchRec's as it comes, and its best form without these types.
UNTOLD_FORMS = ("torchrec", "torchrec_columns_mp16")


def topology(world_size: int, bandwidth: bool = False) -> Topology:
    """One CPU host with all ranks, which every planner is given.

    Args:
        world_size: ranks.
        bandwidth: whether it says the bandwidth at which collectives are priced; else it has TorchRec's defaults.
    """
    given: dict[str, Any] = {"intra_host_bw": BANDWIDTH_GB_PER_S * _GIB / 1000} if bandwidth else {}
    return Topology(
        world_size=world_size,
        local_world_size=world_size,
        compute_device="cpu",
        ddr_cap=DDR_BYTES_PER_RANK,
        **given,
    )


def stated_bandwidths(bandwidth: bool) -> str:
    """What a topology says of the links, in words; argument as of :func:`topology`."""
    return f"{BANDWIDTH_GB_PER_S:g} GB/s for each rank" if bandwidth else "TorchRec's defaults"


def is_told(form: str, sharders: str) -> bool:
    """Whether a form's topology says the bandwidth at which collectives are priced."""
    return sharders == "all" and form not in UNTOLD_FORMS


def torchrec_inputs(
    form: str, world_size: int, batch_size: int, timeout_seconds: int | None, sharders: str
) -> dict[str, Any]:
    """All inputs of one form, as JSON."""
    inputs = {
        "planner": f"torchrec {torchrec.__version__} EmbeddingShardingPlanner",
        "constraints": {"pooling_factors": "true", **form_constraints(form, sharders)},
        "batch_size_per_rank": batch_size,
        "topology": {
            "world_size": world_size,
            "local_world_size": world_size,
            "compute_device": "cpu",
            "ddr_gib_per_rank": DDR_BYTES_PER_RANK >> 30,
            "bandwidths": stated_bandwidths(is_told(form, sharders)),
        },
        "storage_reservation": "TorchRec's default (HeuristicalStorageReservation)",
        "timeout_seconds": timeout_seconds,
        "PYTHONHASHSEED": "0",
    }
    return inputs if sharders == "default" else {**inputs, "sharders": sharders}


def plan_with_torchrec(
    form: str,
    workload: Workload,
    world_size: int,
    batch_size: int,
    timeout_seconds: int | None,
    sharders: str = "default",
) -> PlannedResult:
    """Plans with one of :data:`FORMS`.

    Args:
        form: key of :data:`FORMS`.
        workload: the tables.
        world_size: ranks.
        batch_size: samples per rank.
        timeout_seconds: TorchRec's own time limit for its search; None lets it finish.
        sharders: one of :data:`benchmarks.planners.SHARDERS`.
    """
    planner = EmbeddingShardingPlanner(
        topology=topology(world_size, is_told(form, sharders)),
        batch_size=batch_size,
        constraints=parameter_constraints(workload, **form_constraints(form, sharders)),
        debug=False,
        timeout_seconds=timeout_seconds,
    )
    module, offered = embedding_model(workload), chosen_sharders(sharders)
    begun, begun_cpu = time.perf_counter(), time.process_time()
    plan = planner.plan(module, offered)
    seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - begun_cpu
    loads = [0.0] * world_size
    for option in planner._best_plan or []:
        for shard in option.shards:
            ranks = range(world_size) if shard.rank is None else [shard.rank]
            for rank in ranks:
                loads[rank] += shard.perf.total
    inputs = torchrec_inputs(form, world_size, batch_size, timeout_seconds, sharders)
    return PlannedResult(placement_of(plan, workload), seconds, cpu_seconds, max(loads), inputs)
