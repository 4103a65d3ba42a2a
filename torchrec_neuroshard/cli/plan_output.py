"""What ``plan`` prints: one JSON object (the contract), or tables for a terminal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from torchrec.distributed.types import ShardingPlan

from torchrec_neuroshard.adapters.topology import DetectedMachine
from torchrec_neuroshard.costs.plan_uncertainty import PlanUncertainty
from torchrec_neuroshard.problem import FUSED, UVM_CACHING
from torchrec_neuroshard.workload import Workload

_GIB = 1024**3
_SCHEMA = 1


@dataclass(frozen=True)
class PlanOutput:
    """A plan and what is known of it.

    Attributes:
        planner: which planner made it.
        plan_seconds: time the planner took.
        workload: the tables.
        machine: the ranks it is for.
        batch_size: samples per iteration over all ranks.
        pipeline: how the training loop overlaps work.
        cost_model: name and provenance of what the prediction was made with.
        plan: TorchRec's plan.
        memory_bytes: [ranks] (HBM, DDR) bytes by the planner's estimate.
        predicted_ms: the contract's ``predicted_ms``; None when the cost models do not cover the plan.
        remark: why there is no prediction.
        lower_bound_ms: what every plan costs at least, where that was proved.
        uncertainty: how sure the prediction is; None where nobody can say.
        notes: why the plan is as it is, and what follows from it.
    """

    planner: str
    plan_seconds: float
    workload: Workload
    machine: DetectedMachine
    batch_size: int
    pipeline: str
    cost_model: dict[str, str]
    plan: ShardingPlan
    memory_bytes: list[tuple[int, int]]
    predicted_ms: dict[str, Any] | None
    remark: str
    uncertainty: PlanUncertainty | None = None
    lower_bound_ms: float | None = None
    notes: tuple[str, ...] = ()

    def parameters(self) -> dict[str, Any]:
        """Table name -> TorchRec's ``ParameterSharding``, in the workload's order."""
        found: dict[str, Any] = {}
        for module_plan in self.plan.plan.values():
            found.update(module_plan)
        return {table.name: found[table.name] for table in self.workload.tables}

    def to_json(self) -> dict[str, Any]:
        """The JSON object of the command line's contract."""
        content = {
            "schema": _SCHEMA,
            "planner": self.planner,
            "plan_seconds": round(self.plan_seconds, 4),
            "workload": self.workload.name,
            "world_size": self.machine.world_size,
            "local_world_size": self.machine.local_world_size,
            "device": self.machine.device,
            "hardware": self.machine.hardware,
            "batch_size": self.batch_size,
            "pipeline": self.pipeline,
            "cost_model": dict(self.cost_model),
            "predicted_ms": self.predicted_ms,
            "lower_bound_ms": self.lower_bound_ms,
            "uncertainty": self.uncertainty.to_json() if self.uncertainty is not None else None,
            "notes": list(self.notes),
            "memory_bytes_per_rank": [{"hbm": hbm, "ddr": ddr} for hbm, ddr in self.memory_bytes],
            "tables": {
                name: _table_json(parameter, self.machine.world_size) for name, parameter in self.parameters().items()
            },
        }
        return {**content, "remark": self.remark} if self.remark else content


def _table_json(parameter: Any, world_size: int) -> dict[str, Any]:
    if parameter.sharding_spec is None:  # data_parallel: a replica on every rank
        shards = [{"rank": rank} for rank in parameter.ranks or range(world_size)]
    else:
        shards = [
            {"rank": rank, "offset": list(shard.shard_offsets), "size": list(shard.shard_sizes)}
            for rank, shard in zip(parameter.ranks, parameter.sharding_spec.shards)
        ]
    result = {"sharding_type": parameter.sharding_type, "compute_kernel": parameter.compute_kernel, "shards": shards}
    if parameter.compute_kernel == UVM_CACHING and parameter.cache_params is not None:
        result["cache_load_factor"] = parameter.cache_params.load_factor
    return result


def print_tables(output: PlanOutput) -> None:
    """Prints the plan for a person: totals, then one line per rank."""
    console = Console(highlight=False, soft_wrap=True)
    content = output.to_json()
    types = Counter(_kind(table) for table in content["tables"].values())
    console.print(
        f"{output.workload.name}: {len(output.workload.tables)} tables on {output.machine.world_size} ranks, "
        f"{output.batch_size} samples per iteration, pipeline {output.pipeline}",
        markup=False,
    )
    console.print(
        f"planned by {output.planner} in {output.plan_seconds:.2f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(types.items())),
        markup=False,
    )
    model = f"{output.cost_model['name']} ({output.cost_model['provenance']})"
    predicted = output.predicted_ms
    total = output.remark if predicted is None else f"predicted {predicted['total']:.3f} ms per iteration"
    console.print(f"{total}; cost model {model}", markup=False)
    if output.lower_bound_ms is not None and output.predicted_ms is not None:
        gap = output.predicted_ms["total"] / max(output.lower_bound_ms, 1e-12) - 1
        console.print(f"Proved: at most {gap:.1%} from the best plan that there is, by these costs.", markup=False)
    if output.uncertainty is not None:
        console.print(output.uncertainty.summary(), markup=False)
    console.print(_rank_table(output, content["tables"]))
    for note in output.notes:
        console.print(f"- {note}", markup=False)


def _kind(table: dict[str, Any]) -> str:
    """Sharding type, and the kernel where it is not the usual one."""
    usual = table["compute_kernel"] in (FUSED, "dense")
    return table["sharding_type"] if usual else f"{table['sharding_type']} ({table['compute_kernel']})"


def _rank_table(output: PlanOutput, tables: dict[str, Any]) -> Table:
    table = Table("rank", "shards", "columns", "HBM GiB", "DDR GiB", "forward ms", "backward ms", "comms ms")
    for column in table.columns:
        column.justify = "right"
    held: list[list[int]] = [[] for _ in range(output.machine.world_size)]
    dims = {entry.name: entry.embedding_dim for entry in output.workload.tables}
    for name, entry in tables.items():
        for shard in entry["shards"]:
            held[shard["rank"]].append(shard["size"][1] if "size" in shard else dims[name])
    for rank, widths in enumerate(held):
        hbm, ddr = output.memory_bytes[rank]
        costs = ["-"] * 3
        if output.predicted_ms is not None:
            cost = output.predicted_ms["per_rank"][rank]
            comms = cost["forward_comms"] + cost["backward_comms"]
            costs = [f"{value:.3f}" for value in (cost["forward"], cost["backward"], comms)]
        memory = [f"{hbm / _GIB:.2f}", f"{ddr / _GIB:.2f}"]
        table.add_row(str(rank), str(len(widths)), str(sum(widths)), *memory, *costs)
    return table
