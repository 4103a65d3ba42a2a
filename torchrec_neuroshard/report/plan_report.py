"""What a plan is expected to cost, and how it was found."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any, Mapping

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable

from torchrec_neuroshard.costs.plan_uncertainty import PlanUncertainty
from torchrec_neuroshard.costs.simulator import PlanCost
from torchrec_neuroshard.problem import UVM_CACHING, Block, Cluster, Placement, Table

SCHEMA_VERSION = 1
_GIB = 1024**3
_TEXT_WIDTH = 110


@dataclass(frozen=True)
class PlanReport:
    """Prediction and provenance of one plan.

    Attributes:
        tables: what was planned.
        cluster: the ranks, with the memory left for shards.
        batch_size: samples per rank.
        placement: the plan.
        memory_bytes: [ranks, 2] bytes of HBM and DDR that the shards of each rank take.
        cost: predicted ms per rank and part, and per iteration.
        uncertainty: how sure the prediction is; None where the cost model cannot say.
        cost_model: {"name", "provenance", "hardware"} of the cost model.
        compute_kernels: [tables] kernel of each table's shards.
        plan_seconds: wall time of planning.
        lower_bound_ms: what every plan costs at least by the same costs, where that was proved.
        search_log: one record per step of the search.
        notes: what the user should know: assumptions made, defaults taken, warnings.
        delegated: module path -> (kind, number of tables, reason) of modules whose tables TorchRec's planner placed;
            their memory and time are counted above, their tables are not listed.
    """

    tables: tuple[Table, ...]
    cluster: Cluster
    batch_size: int
    placement: Placement
    memory_bytes: NDArray[np.float64]
    cost: PlanCost
    cost_model: dict[str, str]
    compute_kernels: tuple[str, ...]
    plan_seconds: float
    uncertainty: PlanUncertainty | None = None
    lower_bound_ms: float | None = None
    search_log: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    delegated: Mapping[str, tuple[str, int, str]] = field(default_factory=dict)

    def tables_json(self) -> dict[str, Any]:
        """The plan itself: table -> sharding type, kernel and shards in column order."""
        tables: dict[str, Any] = {
            table.name: {
                "sharding_type": kind,
                "compute_kernel": kernel,
                **({"cache_load_factor": table.load_factor} if kernel == UVM_CACHING else {}),
                "shards": self._spread_shards(number),
            }
            for number, (table, kind, kernel) in enumerate(
                zip(self.tables, self.placement.sharding_types, self.compute_kernels)
            )
        }
        for shard in sorted(self.placement.shards, key=lambda shard: (shard.table, shard.offset)):
            table = self.tables[shard.table]
            tables[table.name]["shards"].append(
                {"rank": shard.rank, "offset": [0, shard.offset], "size": [table.num_embeddings, shard.width]}
            )
        return tables

    def _spread_shards(self, number: int) -> list[dict[str, Any]]:
        """Shards of a spread table; none for others."""
        return [
            {"rank": block.rank, "offset": [block.first_row, block.offset], "size": [block.rows, block.width]}
            for block in self._blocks(number)
        ]

    def _blocks(self, number: int) -> tuple[Block, ...]:
        spread, table, cluster = self.placement.spreads[number], self.tables[number], self.cluster
        if spread is None:
            return ()
        return spread.blocks(table.num_embeddings, table.embedding_dim, cluster.world_size, cluster.ranks_per_host)

    def to_json(self) -> dict[str, Any]:
        """A JSON object with the fields that ``plan --json`` promises, and the search log and notes."""
        cluster = self.cluster
        return {
            "schema": SCHEMA_VERSION,
            "planner": "neuroshard",
            "plan_seconds": round(self.plan_seconds, 4),
            "world_size": cluster.world_size,
            "local_world_size": cluster.local_world_size,
            "device": cluster.device,
            "hardware": cluster.hardware,
            "batch_size_per_rank": self.batch_size,
            "pipeline": self.cost.pipeline.value,
            "cost_model": dict(self.cost_model),
            "predicted_ms": {**self.cost.to_json(), "bottleneck_rank": self.cost.bottleneck_rank},
            "lower_bound_ms": self.lower_bound_ms,
            "uncertainty": None if self.uncertainty is None else self.uncertainty.to_json(),
            "memory_bytes_per_rank": [{"hbm": int(hbm), "ddr": int(ddr)} for hbm, ddr in self.memory_bytes],
            "capacity_bytes_per_rank": [{"hbm": int(hbm), "ddr": int(ddr)} for hbm, ddr in cluster.capacity],
            "tables": self.tables_json(),
            "delegated": {
                path: {"kind": kind, "tables": tables, "reason": reason}
                for path, (kind, tables, reason) in self.delegated.items()
            },
            "search_log": list(self.search_log),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        """A table for the terminal."""
        cluster = self.cluster
        held = [shard.rank for shard in self.placement.shards]
        held += [block.rank for number in range(len(self.tables)) for block in self._blocks(number)]
        shards = np.bincount(held, minlength=cluster.world_size)
        grid = RichTable(
            title=f"NeuroShard plan: {len(self.tables)} tables, {shards.sum()} shards, "
            f"{cluster.world_size} ranks, {self.batch_size} samples per rank"
        )
        memory_name, memory_column = ("HBM", 0) if cluster.device == "cuda" else ("DDR", 1)
        headings = ("rank", "shards", "forward", "backward", "fwd comms", "bwd comms", "input dist")
        for heading in (*headings, f"{memory_name} GiB"):
            grid.add_column(heading, justify="right")
        memory = self.memory_bytes[:, memory_column] / _GIB
        capacity = cluster.capacity[:, memory_column] / _GIB
        for rank in range(cluster.world_size):
            parts = (
                self.cost.forward_ms,
                self.cost.backward_ms,
                self.cost.forward_comms_ms,
                self.cost.backward_comms_ms,
                self.cost.input_dist_ms,
            )
            grid.add_row(
                str(rank),
                str(shards[rank]),
                *(f"{part[rank]:.3f}" for part in parts),
                f"{memory[rank]:.2f} of {capacity[rank]:.2f}",
                style="bold" if rank == self.cost.bottleneck_rank else "",
            )
        console = Console(file=io.StringIO(), width=_TEXT_WIDTH, color_system=None)
        console.print(grid)
        console.print(
            f"Predicted {self.cost.total_ms:.3f} ms per iteration (times in ms; pipeline {self.cost.pipeline.value}; "
            f"slowest rank {self.cost.bottleneck_rank}) by {self.cost_model['provenance']} cost model "
            f"{self.cost_model['name']}; planned in {self.plan_seconds:.2f} s.",
            markup=False,
        )
        if self.uncertainty is not None:
            console.print(self.uncertainty.summary(), markup=False)
        if self.lower_bound_ms is not None:
            gap = self.cost.total_ms / max(self.lower_bound_ms, 1e-12) - 1
            console.print(f"Proved: at most {gap:.1%} from the best plan that there is, by these costs.", markup=False)
        for note in self.notes:
            console.print(f"- {note}", markup=False)
        output = console.file
        assert isinstance(output, io.StringIO)
        return output.getvalue()
