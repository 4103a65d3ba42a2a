"""Every difference between TorchRec versions (1.4 to 1.9) that this package has to know."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import warnings
from typing import Any, Mapping, Sequence

from torch import nn
from torchrec.distributed.planner import planners as torchrec_planners
from torchrec.distributed.planner import types as planner_types
from torchrec.distributed.planner import utils as planner_utils
from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    Enumerator,
    Perf,
    PlannerError,
    PlannerErrorType,
    ShardEstimator,
    ShardingOption,
    Stats,
    Storage,
    StorageReservation,
    Topology,
)
from torchrec.distributed.types import ModuleSharder, ShardingPlan

_BYTES_PER_MS = 1e6  # of 1 GB/s; TorchRec's topologies keep bytes per ms

# TorchRec's own default; EmbeddingShardingPlanner reserves the same.
_DEFAULT_RESERVATION = 0.15

# Estimators take sharders, and since 1.7 snapshots of them. That 1.6 can build snapshots already says nothing.
_TAKES_SHARDER_DATA = "sharder_data_map" in inspect.signature(ShardEstimator.estimate).parameters


def error_type(name: str) -> PlannerErrorType:
    """The error type of this name, or OTHER where the installed TorchRec does not have it yet."""
    return getattr(PlannerErrorType, name, PlannerErrorType.OTHER)


def sharder_key(module_type: type) -> str:
    """The name under which TorchRec files the sharder of a module type."""
    return planner_utils.sharder_name(module_type)


def sharder_maps(sharders: Sequence[ModuleSharder[nn.Module]]) -> dict[str, Any]:
    """Keyword arguments that hand sharders to ``ShardEstimator.estimate`` (``sharder_data_map`` since 1.7)."""
    return estimate_arguments({sharder_key(sharder.module_type): sharder for sharder in sharders})


def estimate_arguments(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The same from sharders, or since 1.7 ``SharderData``, by :func:`sharder_key`; sharders become what is taken."""
    if not _TAKES_SHARDER_DATA:
        return {"sharder_map": dict(entries)}
    sharders = {key: entry for key, entry in entries.items() if not isinstance(entry, planner_types.SharderData)}
    return {"sharder_data_map": {**entries, **planner_utils.build_sharder_data_map(sharders)}}


def fused_params_of(entry: Any) -> Mapping[str, Any]:
    """The fused params of a sharder, or of the ``SharderData`` snapshot that stands for one since 1.7."""
    return getattr(entry, "fused_params", None) or {}


def populate_estimates(enumerator: Enumerator, options: list[ShardingOption], maps: Mapping[str, Any]) -> None:
    """Lets an enumerator estimate options it did not enumerate; ``maps`` come from :func:`sharder_maps`."""
    for name, value in maps.items():
        setattr(enumerator, f"_{name}", value)
    enumerator.populate_estimates(options)


def estimators_of(enumerator: Enumerator, kind: type[ShardEstimator]) -> list[ShardEstimator]:
    """The enumerator's estimators of one kind; empty when it does not tell them apart."""
    return [estimator for estimator in getattr(enumerator, "_estimators", []) if isinstance(estimator, kind)]


def estimate(
    enumerator: Enumerator, kind: type[ShardEstimator], options: list[ShardingOption], maps: Mapping[str, Any]
) -> None:
    """Lets the enumerator's estimators of one kind estimate options, or all of them where it does not tell them apart.

    Args:
        enumerator: whose estimators are asked.
        kind: of the estimators.
        options: get their shards' storage or perf set.
        maps: from :func:`sharder_maps`.
    """
    estimators = estimators_of(enumerator, kind)
    if not estimators:
        populate_estimates(enumerator, options, maps)
    for estimator in estimators:
        estimator.estimate(options, **maps)


def default_storage_reservation() -> StorageReservation:
    """TorchRec's default reservation, without the FutureWarning that is meant for those who chose it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return HeuristicalStorageReservation(percentage=_DEFAULT_RESERVATION)


def intra_group_size(topology: Topology) -> int:
    """Ranks joined by the fast links: a host, or a pod of hosts (since 1.6)."""
    return int(getattr(topology, "intra_group_size", topology.local_world_size))


def link_gbps(topology: Topology) -> tuple[float, float] | None:
    """(intra-host, inter-host) GB/s that the user gave the topology; None for TorchRec's defaults."""
    signature = inspect.signature(Topology.__init__).parameters
    given = (float(topology.intra_host_bw), float(topology.inter_host_bw))
    if given == (signature["intra_host_bw"].default, signature["inter_host_bw"].default):
        return None
    return given[0] / _BYTES_PER_MS, given[1] / _BYTES_PER_MS


def make_topology(
    *,
    world_size: int,
    local_world_size: int,
    device: str,
    hbm_bytes: int,
    ddr_bytes: int,
    bandwidths_gbps: Mapping[str, float],
) -> Topology:
    """Builds a Topology, through ``TopologyFactory`` where there is one (1.7 warns without it).

    Args:
        world_size: ranks.
        local_world_size: ranks per host.
        device: "cuda" or "cpu".
        hbm_bytes: HBM of one rank; ignored for cpu.
        ddr_bytes: host memory of one rank.
        bandwidths_gbps: GB/s by the name of Topology's parameter (``hbm_mem_bw``, ``intra_host_bw``, ...).
    """
    bandwidths = {name: gbps * _BYTES_PER_MS for name, gbps in bandwidths_gbps.items()}
    factory = getattr(planner_types, "TopologyFactory", None)
    if factory is None:
        return Topology(
            world_size=world_size,
            compute_device=device,
            hbm_cap=hbm_bytes,
            ddr_cap=ddr_bytes,
            local_world_size=local_world_size,
            **bandwidths,
        )
    return factory.create_topology(
        trainer_config=planner_types.TrainerConfig(world_size=world_size, local_world_size=local_world_size),
        hardware_config=planner_types.HardwareConfig(hbm_cap_bytes=hbm_bytes, ddr_cap_bytes=ddr_bytes, **bandwidths),
        kernel_config=planner_types.KernelConfig(compute_device=device),
    )


def make_perf(
    forward_ms: float, forward_comms_ms: float, backward_ms: float, backward_comms_ms: float, input_dist_ms: float
) -> Perf:
    """A Perf in ms; ``input_dist_comms`` exists since 1.5."""
    perf = Perf(
        fwd_compute=forward_ms, fwd_comms=forward_comms_ms, bwd_compute=backward_ms, bwd_comms=backward_comms_ms
    )
    perf.prefetch_compute = 0.0
    if "input_dist_comms" in {field.name for field in dataclasses.fields(Perf)}:
        perf.input_dist_comms = input_dist_ms
    return perf


def perf_parts(perf: Perf) -> tuple[float, float, float, float]:
    """ms of forward, backward (with the prefetch of caches, where there is one) and their communication."""
    backward = perf.bwd_compute + getattr(perf, "prefetch_compute", 0.0)
    return perf.fwd_compute, backward, perf.fwd_comms, perf.bwd_comms


def make_storage(hbm: int, ddr: int) -> Storage:
    """A Storage in bytes (which has an ``ssd`` field too since 1.6)."""
    return Storage(hbm=hbm, ddr=ddr)


def validate_plan(
    plan: ShardingPlan,
    options: list[ShardingOption],
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]],
    topology: Topology,
) -> None:
    """Runs TorchRec's own validators where they exist: rank assignment (1.5), inclusion and kernels (1.7).

    Raises:
        PlannerError: a validator objects.
    """
    validators: list[tuple[str, tuple[Any, ...]]] = [
        ("validate_modules_inclusion_in_sharding_plan", (plan, module, sharders)),
        ("validate_rank_assignment", (plan, topology)),
        ("validate_compute_kernels", (options,)),
    ]
    for name, arguments in validators:
        validator = getattr(torchrec_planners, name, None)
        if validator is not None:
            validator(*arguments)


def context_hash(
    planner: EmbeddingPlannerBase, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
) -> str | None:
    """TorchRec's hash of a planner's inputs, as its own planner has it; None where it cannot tell (since 1.9).

    Args:
        planner: whose enumerator and storage reservation are asked anew, as the hash is of what they said last.
        module: the model.
        sharders: of its modules.
    """
    unstable = getattr(planner_types, "PlannerContextFingerprintError", ())
    planner._storage_reservation.reserve(
        topology=copy.deepcopy(planner._topology),
        batch_size=planner._batch_size,
        module=module,
        sharders=sharders,
        constraints=planner._constraints,
    )
    planner._enumerator.enumerate(module, sharders)
    try:
        return planner.hash_planner_context_inputs_str()
    except unstable:
        return None


def log_stats(stats: Stats, **arguments: Any) -> None:
    """Calls ``stats.log`` with those of the arguments that it accepts."""
    parameters = inspect.signature(stats.log).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    stats.log(**{name: value for name, value in arguments.items() if takes_any or name in parameters})


__all__ = [
    "PlannerError",
    "context_hash",
    "default_storage_reservation",
    "error_type",
    "estimate",
    "estimate_arguments",
    "estimators_of",
    "fused_params_of",
    "intra_group_size",
    "link_gbps",
    "log_stats",
    "make_perf",
    "make_storage",
    "make_topology",
    "perf_parts",
    "populate_estimates",
    "sharder_key",
    "sharder_maps",
    "validate_plan",
]
