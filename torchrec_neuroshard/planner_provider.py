"""NeuroShardPlanner behind TorchRec's planner executor and its dry-run command line, which exist since TorchRec 1.9.

This module can be imported there only.
"""

from __future__ import annotations

from typing import Any, Mapping

from torchrec.distributed.planner.planners import EmbeddingPlannerBase
from torchrec.distributed.planner.types import StorageReservation, Topology

from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import shipped_models
from torchrec_neuroshard.planner import NeuroShardPlanner

try:
    from torchrec.distributed.planner.provider import DefaultPlannerProvider
    from torchrec.distributed.planner.types import PlannerSessionContext, PlannerVariant
except ImportError as error:
    from torchrec_neuroshard._versions import installed_stack

    raise ImportError(
        "torchrec_neuroshard.planner_provider needs the planner executor of TorchRec 1.9 or later, and "
        f"{installed_stack().version('torchrec')} is installed. Give NeuroShardPlanner's plan to "
        "DistributedModelParallel(plan=...) instead."
    ) from error

# Settings of TorchRec's PlannerConfig whose work the search does itself, and what they are unset.
_REPLACED: Mapping[str, Any] = {
    "proposer_type": None,
    "proposer_config": None,
    "partitioner_type": None,
    "partitioner_sort_by": None,
    "memory_balanced_max_search_count": None,
    "memory_balanced_tolerance": None,
    "balance_modules": False,
    "performance_model": None,
    "use_hardware_based_compute": False,
    "use_hardware_based_bandwidth": False,
    "bwd_compute_multiplier": None,
}

# By TorchRec's PipelineType; others say nothing of how the training loop overlaps work.
_PIPELINES = {"train_base": "none", "train_sparse_dist": "sparse_dist", "train_prefetch_sparse_dist": "prefetch"}


class NeuroShardPlannerProvider(DefaultPlannerProvider):
    """Builds a :class:`NeuroShardPlanner` for each request; topology and storage reservation stay TorchRec's.

    Args:
        hardware: SKU -> name of the hardware (see ``costs.hardware``). A SKU of that very name needs no entry; any
            other takes the hardware of this machine.
        arguments: of NeuroShardPlanner (``cost_model``, ``table_stats``, ``column_split``, ``pipeline``, ``search``,
            ``seed``), for all requests.

    Example::

        executor = DefaultPlannerExecutor(NeuroShardPlannerProvider(cost_model="my_model"))
        dry_run.cli.main(["--sku-list", "h100_sxm", "--world-size", "8"], DryRunOrchestrator(executor))
    """

    def __init__(self, hardware: Mapping[str, str] | None = None, **arguments: Any) -> None:
        self._hardware = dict(hardware or {})
        self._arguments = arguments

    def build_planner(
        self,
        sku: str,
        *,
        topology: Topology,
        storage_reservation: StorageReservation,
        ctx: PlannerSessionContext,
    ) -> EmbeddingPlannerBase:
        """The planner of a request.

        Args:
            sku: the hardware to plan for.
            topology: the machines.
            storage_reservation: memory that is not for tables.
            ctx: of the request.

        Raises:
            NotImplementedError: the request wants a planner that is none of TorchRec's open source.
            UnsupportedArgumentError: the request's configuration asks for something that the search replaces.
        """
        request = ctx.request
        config = request.planner_config
        if config.planner_variant not in (PlannerVariant.UNSET, PlannerVariant.OSS):
            return super().build_planner(
                sku, topology=topology, storage_reservation=storage_reservation, ctx=ctx
            )  # says who builds it
        replaced = [name for name, unset in _REPLACED.items() if getattr(config, name, unset) != unset]
        if getattr(config.proposer_config, "kind", None) == "default":
            replaced.remove("proposer_config")
        if replaced:
            raise UnsupportedArgumentError(
                f"PlannerConfig: {', '.join(replaced)} cannot be honoured, as NeuroShardPlanner searches and rates "
                "plans itself: leave them unset, and tune it by NeuroShardPlannerProvider(search=..., cost_model=...)"
            )
        arguments = dict(self._arguments)
        if config.pipeline_type in _PIPELINES:
            arguments.setdefault("pipeline", _PIPELINES[config.pipeline_type])
        named = sku if sku in {*HARDWARE, *shipped_models()} else None
        return NeuroShardPlanner(
            topology=topology,
            batch_size=request.batch_size,
            constraints=request.constraints,
            storage_reservation=storage_reservation,
            enumerator=self._build_enumerator(sku, topology, ctx),
            stats=ctx.stats,
            debug=config.debug,
            timeout_seconds=config.timeout_seconds,
            hardware=self._hardware.get(sku, named),
            **arguments,
        )
