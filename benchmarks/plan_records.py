"""Plans as the benchmark keeps them: a placement, what made it, and how long that took."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Mapping

from torchrec_neuroshard.layout import row_blocks
from torchrec_neuroshard.problem import EVERYWHERE_TYPES, ROW_WISE, Placement, Shard
from torchrec_neuroshard.workload import Workload

if TYPE_CHECKING:  # measuring reads plans without the seconds that importing TorchRec takes
    from torchrec.distributed.types import ShardingPlan

PLACED_TYPES = ("table_wise", "column_wise", "table_column_wise")


@dataclass(frozen=True)
class PlannedResult:
    """What one planner made of one workload.

    Attributes:
        placement: the plan; data_parallel and row_wise tables have no shards in it.
        plan_seconds: wall time of the planner's ``plan`` call.
        plan_cpu_seconds: processor time of the same call, which other load on the machine does not stretch.
        predicted_ms: the planner's own cost of its plan: its slowest rank in its own terms.
        inputs: everything the planner was given, for the record.
    """

    placement: Placement
    plan_seconds: float
    plan_cpu_seconds: float
    predicted_ms: float
    inputs: Mapping[str, Any]

    @property
    def plan_id(self) -> str:
        """A stable id of the placement alone, so that equal plans are known to be equal."""
        text = json.dumps(placement_json(self.placement), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """A JSON object; :meth:`from_json` reads it back."""
        return {
            "plan_id": self.plan_id,
            "plan_seconds": round(self.plan_seconds, 3),
            "plan_cpu_seconds": round(self.plan_cpu_seconds, 3),
            "predicted_ms": round(self.predicted_ms, 4),
            "inputs": dict(self.inputs),
            "placement": placement_json(self.placement),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> PlannedResult:
        """Reads what :meth:`to_json` wrote."""
        placement = record["placement"]
        return cls(
            Placement(tuple(Shard(*shard) for shard in placement["shards"]), tuple(placement["sharding_types"])),
            record["plan_seconds"],
            record["plan_cpu_seconds"],
            record["predicted_ms"],
            record["inputs"],
        )


def placement_json(placement: Placement) -> dict[str, Any]:
    """The placement as a JSON object: shards are [table, offset, width, rank]."""
    return {
        "shards": [list(asdict(shard).values()) for shard in placement.shards],
        "sharding_types": list(placement.sharding_types),
    }


def placement_of(plan: ShardingPlan, workload: Workload) -> Placement:
    """Converts TorchRec's plan of the workload's tables.

    Raises:
        ValueError: the plan leaves out a table or a column, or uses a sharding type that the benchmark cannot
            measure (types that cut rows among the ranks of a host: all ranks are on one here), or cuts rows otherwise
            than TorchRec's run time does.
    """
    parameters: dict[str, Any] = {}
    for module_plan in plan.plan.values():
        parameters.update(module_plan)
    shards: list[Shard] = []
    types: list[str] = []
    for index, table in enumerate(workload.tables):
        if table.name not in parameters:
            raise ValueError(f"the plan leaves out table {table.name}")
        sharding = parameters[table.name]
        types.append(sharding.sharding_type)
        if sharding.sharding_type == ROW_WISE:
            _check_rows(table.name, sharding, table.num_embeddings)
        if sharding.sharding_type in EVERYWHERE_TYPES:
            continue
        if sharding.sharding_type not in PLACED_TYPES:
            known = (*PLACED_TYPES, *EVERYWHERE_TYPES)
            raise ValueError(f"{table.name}: cannot measure {sharding.sharding_type}; only {known}")
        pieces = sorted(
            (metadata.shard_offsets[1], metadata.shard_sizes[1], rank)
            for metadata, rank in zip(sharding.sharding_spec.shards, sharding.ranks)
        )
        shards.extend(Shard(index, offset, width, rank) for offset, width, rank in pieces)
    placement = Placement(tuple(shards), tuple(types))
    check_columns(placement, workload)
    return placement


def check_columns(placement: Placement, workload: Workload) -> None:
    """Raises ValueError unless each column of each table is placed exactly once, those on all ranks apart."""
    for index, table in enumerate(workload.tables):
        pieces = sorted((s.offset, s.width) for s in placement.shards if s.table == index)
        expected = 0
        for offset, width in pieces:
            if offset != expected:
                raise ValueError(f"{table.name}: a shard starts at column {offset}, expected {expected}")
            expected = offset + width
        if expected != (0 if placement.sharding_types[index] in EVERYWHERE_TYPES else table.embedding_dim):
            raise ValueError(f"{table.name}: {expected} of {table.embedding_dim} columns are placed")


def _check_rows(table: str, sharding: Any, rows: int) -> None:
    """Raises ValueError unless a row_wise table is cut into the blocks that TorchRec's run time takes it to have."""
    blocks = tuple(
        (piece.shard_offsets[0], piece.shard_offsets[0] + piece.shard_sizes[0])
        for piece in sharding.sharding_spec.shards
    )
    expected = row_blocks(rows, len(blocks))
    if blocks != expected:
        raise ValueError(f"{table}: row_wise blocks {blocks}, where TorchRec runs {expected}")
