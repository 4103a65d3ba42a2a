"""NeuroShardPlanner: a drop-in for TorchRec's ``EmbeddingShardingPlanner``.

References:
    [Zha2023] Zha et al., "Pre-train and Search: Efficient Embedding Table Sharding with Pre-trained Neural Cost
    Models", MLSys 2023, arXiv 2305.01868.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from time import perf_counter
from typing import Any, Callable

import numpy as np
import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingPlannerBase, to_sharding_plan
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    Partitioner,
    PerfModel,
    PlanLoader,
    Proposer,
    ShardingOption,
    Stats,
    StorageReservation,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan

from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.delegation import Delegated, delegate, delegated_modules
from torchrec_neuroshard.adapters.errors import (
    UnsupportedArgumentError,
    as_planner_error,
    from_plain,
    insufficient_storage,
    to_plain,
)
from torchrec_neuroshard.adapters.found_plan import FoundPlan
from torchrec_neuroshard.adapters.loaded_plan import load_plan
from torchrec_neuroshard.adapters.module_tables import COLUMN_SPLITS, ShardableTable, collect_tables
from torchrec_neuroshard.adapters.planning_notes import Notes, note_assumptions, note_changed_numerics, note_coverage
from torchrec_neuroshard.adapters.saved_plan import plan_inputs
from torchrec_neuroshard.adapters.split_search import SplitSearch
from torchrec_neuroshard.adapters.storage import ShardStorage, capacity_of, reserved_topology
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.adapters.topology import DetectedMachine, planning_cluster
from torchrec_neuroshard.adapters.torchrec_costs import NAME as TORCHREC_COSTS
from torchrec_neuroshard.adapters.torchrec_costs import torchrec_objective
from torchrec_neuroshard.costs.additive_simulator import Objective
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.model import CostModel, shipped_models
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.garbage import collection_paused
from torchrec_neuroshard.problem import (
    Cluster,
    InfeasibleError,
    Pipeline,
)
from torchrec_neuroshard.report.plan_report import PlanReport
from torchrec_neuroshard.report.reasons import checkpoint_notes, host_memory_reasons, spread_reasons
from torchrec_neuroshard.search import SearchConfig

logger = logging.getLogger(__name__)

# TorchRec's arguments whose work the search does itself, and what to do instead.
_REMEDIES = {
    "proposer": "NeuroShardPlanner searches itself: drop the argument, and tune the search with "
    "search=SearchConfig(...)",
    "partitioner": "NeuroShardPlanner places shards itself: drop the argument",
    "performance_model": "plans are rated by simulating them with the cost model: drop the argument, and give your own "
    "costs as cost_model=",
}


class NeuroShardPlanner(EmbeddingPlannerBase):
    """Finds a sharding plan by search over measured costs [Zha2023]_.

    Plans the tables of all embedding collections of a model together, pooled and unpooled, of every sharding type that
    the sharders offer and the constraints allow (data-parallel and grid where a constraint names them), in device
    memory or, where that does not hold all, partly in host memory. Modules of kinds that nobody measured are left to
    TorchRec's planner (``adapters.module_kinds.DELEGATED_KINDS``), and the others are planned around them.

    Args:
        topology: the machines; None detects them (see ``adapters.topology``), and ``collective_plan`` then takes
            the smallest memory over all ranks.
        batch_size: samples per rank; None warns and takes TorchRec's default.
        constraints: TorchRec's ``ParameterConstraints`` by table name.
        storage_reservation: None takes TorchRec's default.
        stats: what prints the plan; None takes TorchRec's ``EmbeddingStats``.
        debug: whether stats print everything.
        callbacks: functions from a plan's sharding options to those to use instead.
        timeout_seconds: planning stops improving the plan in time to return it about then.
        plan_loader: where a plan comes from instead of a search, when it has one that suits the model and fits (see
            ``adapters.saved_plan.PlanFile``).
        enumerator: its storage estimators say what shards take, and its performance estimators what they cost with
            cost_model="torchrec". What stats print is the cost model's prediction.
        proposer: not supported, see the error.
        partitioner: not supported, see the error.
        performance_model: not supported, see the error.
        cost_model: "auto" (the shipped model of the hardware, else the analytic prior), a shipped model's name, a
            path, a CostModel, or "torchrec": TorchRec's own estimates, rated as its planner rates plans.
        table_stats: measured pooling factors and access distributions; they win over the constraints.
        column_split: "auto" splits columns freely for element-wise optimizers (SGD, Adagrad, Adam), and for
            row-wise ones no narrower than TorchRec would unless nothing else fits; "any" always splits freely;
            "never" leaves tables whole. A table's ``min_partition`` wins over "auto" and "any".
        pipeline: "none", "sparse_dist" or "prefetch": how the training loop overlaps work.
        search: the search's configuration; None takes defaults with ``seed``.
        seed: seed of the search, when ``search`` is None.
        hardware: name of the hardware (see ``costs.hardware``); None detects it.

    Attributes:
        report: prediction and provenance of the last plan; None before the first, and when there was no table.
        plan_inputs: what it was made for, which ``PlanFile`` keeps; None on ranks that were sent the plan.

    Raises:
        UnsupportedArgumentError: an argument cannot be honoured; the message says what to do instead.

    Example::

        planner = NeuroShardPlanner(batch_size=512)
        plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
        model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        storage_reservation: StorageReservation | None = None,
        stats: Stats | list[Stats] | None = None,
        debug: bool = True,
        callbacks: list[Callable[[list[ShardingOption]], list[ShardingOption]]] | None = None,
        timeout_seconds: int | None = None,
        plan_loader: PlanLoader | None = None,
        enumerator: Enumerator | None = None,
        proposer: Proposer | list[Proposer] | None = None,
        partitioner: Partitioner | None = None,
        performance_model: PerfModel | None = None,
        cost_model: str | os.PathLike[str] | CostModel = "auto",
        table_stats: TableStats | None = None,
        column_split: str = "auto",
        pipeline: str | Pipeline = "sparse_dist",
        search: SearchConfig | None = None,
        seed: int = 0,
        hardware: str | None = None,
    ) -> None:
        _reject(proposer=proposer, partitioner=partitioner, performance_model=performance_model)
        if column_split not in COLUMN_SPLITS:
            raise UnsupportedArgumentError(f"column_split must be one of {COLUMN_SPLITS}, got {column_split!r}")
        if pipeline not in tuple(Pipeline):
            names = ", ".join(repr(member.value) for member in Pipeline)
            raise UnsupportedArgumentError(f"pipeline must be one of {names}, got {pipeline!r}")
        if batch_size is not None and batch_size < 1:
            raise UnsupportedArgumentError(f"batch_size must be at least 1 sample per rank, got {batch_size}")
        if timeout_seconds is not None and not (
            isinstance(timeout_seconds, (int, float)) and 0 < timeout_seconds < float("inf")
        ):
            raise UnsupportedArgumentError(f"timeout_seconds must be a positive number, got {timeout_seconds!r}")
        if search is not None and not isinstance(search, SearchConfig):
            raise UnsupportedArgumentError(f"search must be a SearchConfig, got {search!r}")
        if not isinstance(cost_model, (str, os.PathLike, CostModel)):
            raise UnsupportedArgumentError(f"cost_model must be a name, a path or a CostModel, got {cost_model!r}")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UnsupportedArgumentError(f"seed must be a whole number of at least 0, got {seed!r}")
        if hardware is not None and hardware not in (*HARDWARE, *shipped_models()):
            raise UnsupportedArgumentError(
                f"hardware must be one of {', '.join(sorted({*HARDWARE, *shipped_models()}))}, got {hardware!r}"
            )
        self._detected = DetectedMachine.detect(hardware=hardware) if topology is None else None
        self._owns_enumerator = enumerator is None
        super().__init__(
            topology=self._detected.topology() if self._detected else topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation or compat.default_storage_reservation(),
            stats=stats,
            constraints=constraints,
            debug=debug,
            callbacks=callbacks,
            timeout_seconds=timeout_seconds,
        )
        self._batch_size_given = batch_size is not None
        self._cost_model = cost_model
        self._table_stats = table_stats
        self._column_split = column_split
        self._pipeline = Pipeline(pipeline)
        self._search = search or SearchConfig(seed=seed)
        if timeout_seconds is not None:
            self._search = dataclasses.replace(self._search, timeout_seconds=float(timeout_seconds))
        self._hardware = hardware
        self._said: set[str] = set()
        self.plan_loader = plan_loader
        self.plan_inputs: dict[str, Any] | None = None
        self.report: PlanReport | None = None
        # Read by TorchRec's own tools.
        self._num_proposals = 0
        self._num_plans = 0
        self._best_plan: list[ShardingOption] | None = None

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plans on rank 0 and gives every rank the plan and the report, or raises on every rank.

        Args:
            module: the model.
            sharders: TorchRec's sharders; None takes its default ones.
            pg: process group; None takes the default group.

        Raises:
            PlannerError: rank 0 could not plan, for whatever reason.
            RuntimeError: there is no process group.
        """
        if pg is None:
            if not dist.is_initialized():
                raise RuntimeError(
                    "collective_plan needs a process group: call torch.distributed.init_process_group() first, "
                    "or use plan() in a single process"
                )
            pg = dist.GroupMember.WORLD
            assert pg is not None
        self._agree_on_topology(pg)
        outcome: list[Any] = [None]
        failure: BaseException | None = None
        if pg.rank() == 0:
            try:
                outcome[0] = (self.plan(module, sharders), self.report)
            except BaseException as error:  # the other ranks wait: they must hear of anything that goes wrong
                failure = error
                outcome[0] = to_plain(error)
        dist.broadcast_object_list(outcome, src=dist.get_global_rank(pg, 0), group=pg)
        if failure is not None:
            if not isinstance(failure, Exception):
                raise failure
            planner_error = as_planner_error(failure)
            raise planner_error from (failure if planner_error is not failure else failure.__cause__)
        if isinstance(outcome[0], dict):
            raise from_plain(outcome[0])
        plan, self.report = outcome[0]
        return plan

    @collection_paused()
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]] | None = None) -> ShardingPlan:
        """Finds a plan on this rank alone.

        Args:
            module: the model.
            sharders: TorchRec's sharders; None takes its default ones.

        Raises:
            PlannerError: the tables do not fit (INSUFFICIENT_STORAGE), or something asked for is not supported.
            CostModelError: the cost model cannot be loaded.
        """
        begun = perf_counter()
        self.report, self._best_plan, self.plan_inputs = None, None, None
        self._num_proposals = self._num_plans = 0
        sharders = get_default_sharders() if sharders is None else sharders
        tables = collect_tables(
            module,
            sharders,
            self._constraints,
            self._topology.compute_device,
            self._batch_size,
            self._table_stats,
            whole_hosts=self._topology.world_size % compat.intra_group_size(self._topology) == 0,
        )
        if not tables and not delegated_modules(module, sharders):
            return ShardingPlan({})
        notes = Notes(logger, self._said)
        default_batch_size = None if self._batch_size_given else self._batch_size
        note_assumptions(
            notes, self._detected, default_batch_size, self._constraints, has_stats=self._table_stats is not None
        )
        left = reserved_topology(
            self._storage_reservation, self._topology, self._batch_size, module, sharders, self._constraints
        )
        delegated = self._delegate(module, sharders, left, {entry.name for entry in tables}, notes)
        if not tables:
            self._best_plan = delegated.options
            return delegated.plan
        capacity = np.maximum(capacity_of(left) - delegated.memory_bytes, 0.0)
        cluster = planning_cluster(self._topology, capacity, self._hardware_name(), self._pipeline)
        maps = compat.sharder_maps(sharders)
        objective = self._objective(tables, cluster, maps, notes)
        storage = ShardStorage(tables, self._enumerator, maps, self._batch_size, cluster)
        gathered = perf_counter() - begun
        search = SplitSearch(
            tables, cluster, self._batch_size, storage, objective, self._column_split, self._search,
            lambda: self._seconds_left(begun, gathered), delegated.rank_ms if delegated.modules else None,
        )  # fmt: skip
        inputs = plan_inputs(tables, self._topology, self._batch_size, self._constraints)
        try:
            problem, result = load_plan(
                self.plan_loader, search, inputs,
                lambda: compat.context_hash(self, module, sharders), notes.sentences.append,
            ) or search.find(notes.warn, notes.sentences.append)  # fmt: skip
        except InfeasibleError as error:
            raise insufficient_storage(error, cluster.world_size, self._batch_size) from error
        found = FoundPlan.of(tables, problem, result, objective)
        options = found.options(self._batch_size)
        self._note_outcome(found, notes)
        compute_kernels = tuple(option.compute_kernel for option in options)
        for callback in self._callbacks:
            options = callback(options)
        plan = to_sharding_plan(options, self._topology)
        if delegated.modules:
            plan.plan.update(delegated.plan.plan)
            options = [*options, *delegated.options]
        self._num_proposals, self._num_plans = len(result.log), 1
        self._best_plan, self.plan_inputs = options, inputs
        self.report = PlanReport(
            tables=found.problem.tables,
            cluster=dataclasses.replace(cluster, capacity=capacity_of(left)),
            batch_size=self._batch_size,
            placement=found.placement,
            memory_bytes=found.memory_bytes() + delegated.memory_bytes,
            cost=found.cost,
            cost_model={
                "name": objective.name,
                "provenance": objective.provenance,
                "hardware": objective.hardware,
            },
            compute_kernels=compute_kernels,
            plan_seconds=perf_counter() - begun,
            uncertainty=found.uncertainty,
            lower_bound_ms=result.lower_bound_ms,
            search_log=result.log,
            delegated=delegated.modules,
            notes=tuple(notes.sentences),
        )
        # First: TorchRec's stats trip over a rank that a callback made up, without saying so.
        compat.validate_plan(plan, options, module, sharders, self._topology)
        self._log_stats(plan, options, sharders, perf_counter() - begun)
        return plan

    def get_selected_options(self) -> list[ShardingOption]:
        """The sharding options of the last plan, which TorchRec's planner executor (since 1.9) asks for."""
        return list(self._best_plan or [])

    def _delegate(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        left: Topology,
        own_tables: set[str],
        notes: Notes,
    ) -> Delegated:
        """Lets TorchRec's planner place what is left to it, and says so."""
        enumerator = None if self._owns_enumerator else self._enumerator
        delegated = delegate(
            module, sharders, left, self._batch_size, self._constraints, enumerator, self._search.timeout_seconds
        )
        for sentence in delegated.sentences:
            notes.warn(sentence)
        unknown = sorted(set(self._constraints or {}) - own_tables - {option.name for option in delegated.options})
        if unknown:
            notes.warn(f"Constraints for tables that the model does not have are ignored: {', '.join(unknown)}")
        return delegated

    def _objective(
        self, tables: tuple[ShardableTable, ...], cluster: Cluster, maps: dict[str, Any], notes: Notes
    ) -> Objective:
        """The costs to minimise, and warnings of what they do not cover."""
        if self._cost_model == TORCHREC_COSTS:
            return torchrec_objective(tables, self._enumerator, maps, self._batch_size, cluster)
        cost_model = resolve_cost_model(self._cost_model, cluster.device, cluster.hardware)
        note_coverage(notes, cost_model, tables, cluster.device)
        return cost_model

    def _note_outcome(self, found: FoundPlan, notes: Notes) -> None:
        """Says why the plan is as it is, and what follows from it."""
        if self._callbacks:
            notes.add(["Callbacks may have changed the plan; this report is of the plan before them."])
        notes.add(spread_reasons(found.simulator, found.placement, found.cost))
        notes.add(host_memory_reasons(found.problem))
        notes.add(checkpoint_notes(found.problem, found.placement))
        if self._search.prove_bound and found.lower_bound_ms is None:
            notes.warn(
                "No bound is proved: that needs cost_model='torchrec', and tables that may only be table-wise and "
                "column-wise (sharding_types in their ParameterConstraints)."
            )
        note_changed_numerics(notes, found.tables, found.placement)
        for sentence in found.uncertainty.sentences() if found.uncertainty is not None else ():
            notes.warn(sentence)

    def _seconds_left(self, begun: float, gathered: float) -> float | None:
        """Seconds that the search may still take; None without a limit.

        Args:
            begun: when planning began.
            gathered: seconds that it took to gather the tables; writing the plan takes about as long.
        """
        limit = self._search.timeout_seconds
        return None if limit is None else limit - (perf_counter() - begun) - gathered

    def _log_stats(
        self,
        plan: ShardingPlan,
        options: list[ShardingOption],
        sharders: list[ModuleSharder[nn.Module]],
        seconds: float,
    ) -> None:
        for stats in self._stats:
            compat.log_stats(
                stats,
                sharding_plan=plan,
                topology=self._topology,
                batch_size=self._batch_size,
                storage_reservation=self._storage_reservation,
                num_proposals=self._num_proposals,
                num_plans=self._num_plans,
                run_time=seconds,
                best_plan=options,
                constraints=self._constraints,
                sharders=sharders,
                enumerator=self._enumerator,
                debug=self._debug,
            )

    def _hardware_name(self) -> str | None:
        return self._detected.hardware if self._detected else self._hardware

    def _agree_on_topology(self, pg: dist.ProcessGroup) -> None:
        """With a detected topology: plan for this group's ranks and the smallest memory among them."""
        if self._detected is None:
            return
        mine = DetectedMachine.detect(pg.size(), self._hardware)
        seen: list[Any] = [None] * pg.size()
        dist.all_gather_object(seen, mine, group=pg)
        agreed = mine.smallest(seen)
        if agreed == self._detected:
            return
        self._detected = agreed
        self._topology = agreed.topology()
        if self._owns_enumerator:
            self._enumerator = EmbeddingEnumerator(
                topology=self._topology, batch_size=self._batch_size, constraints=self._constraints
            )


def _reject(**arguments: object) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise UnsupportedArgumentError(f"{name}= is not supported: {_REMEDIES[name]}.")
