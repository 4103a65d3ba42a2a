"""Every sharding type in one plan under DistributedModelParallel, on four gloo ranks of two hosts."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import AllTypesSharder
from planner_models import ANALYTIC, bag_collection, bag_config
from test_planner_distributed import (
    LEARNING_RATE,
    LOCAL_BATCH,
    SGD,
    columns_of,
    loss_of,
    random_batch,
    state_error,
)
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.types import ParameterConstraints, Topology

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
)

RANKS, RANKS_PER_HOST = 4, 2

# rows, dim, features; rows that do not divide evenly, tables of one type that share a lookup
TABLES: dict[str, tuple[int, int, list[str], str]] = {
    "host_rows": (91, 64, ["a"], TABLE_ROW_WISE),
    "host_rows_too": (40, 16, ["b", "c"], TABLE_ROW_WISE),
    "grid": (51, 64, ["d", "e"], GRID_SHARD),
    "host_columns": (70, 32, ["f"], TABLE_COLUMN_WISE),
    "rows": (33, 16, ["g"], ROW_WISE),
    "columns": (30, 64, ["h"], COLUMN_WISE),
    "whole": (20, 8, ["i"], TABLE_WISE),
    "copies": (25, 16, ["j"], DATA_PARALLEL),
}


def every_type_worker(rank: int) -> dict[str, Any]:
    os.environ.update(LOCAL_WORLD_SIZE=str(RANKS_PER_HOST), LOCAL_RANK=str(rank % RANKS_PER_HOST))
    torch.manual_seed(7)
    configs = [bag_config(name, rows, dim, features) for name, (rows, dim, features, _) in TABLES.items()]
    reference, meta = bag_collection(*configs, device="cpu"), bag_collection(*configs)
    sharders: list[Any] = [AllTypesSharder(fused_params=SGD)]
    planner = NeuroShardPlanner(
        Topology(RANKS, "cpu", local_world_size=RANKS_PER_HOST, ddr_cap=2**32),
        LOCAL_BATCH,
        {
            name: ParameterConstraints(sharding_types=[kind], min_partition=16)
            for name, (_, _, _, kind) in TABLES.items()
        },
        cost_model=ANALYTIC,
    )
    plan = planner.collective_plan(meta, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders)
    with torch.no_grad():
        state_error(sharded, reference.state_dict(), copy=True)

    rows_of = {feature: rows for rows, _, features, _ in TABLES.values() for feature in features}
    output = columns_of(sharded(random_batch(rank, rows_of)).wait())
    expected = [columns_of(reference(random_batch(r, rows_of))) for r in range(RANKS)]
    output_error = float((output - expected[rank]).abs().max().detach())
    loss_of(output).backward()
    (sum(loss_of(columns) for columns in expected) / RANKS).backward()  # TorchRec averages gradients over ranks
    before = {name: weight.clone() for name, weight in reference.state_dict().items()}
    with torch.no_grad():
        for module in (sharded, reference):  # replicas have no fused optimizer
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter -= LEARNING_RATE * parameter.grad
    weight_error, shards = state_error(sharded, reference.state_dict())
    moved = min(float((w - before[name]).abs().max()) for name, w in reference.state_dict().items())
    types = {name: entry.sharding_type for name, entry in plan.plan[""].items()}  # type: ignore[attr-defined]
    return {"output": output_error, "weights": weight_error, "shards": shards, "moved": moved, "types": types}


def test_every_sharding_type_trains_as_the_unsharded_module_does() -> None:
    results = run_ranks(every_type_worker, RANKS)
    assert results[0]["types"] == {name: kind for name, (_, _, _, kind) in TABLES.items()}
    for result in results:
        assert result["output"] < 1e-5
        assert result["weights"] < 1e-5
        assert result["moved"] > 1e-3
    # Row-wise blocks and replicas on each rank, two host-row tables and four blocks of the grid, and the others.
    assert sum(result["shards"] for result in results) >= 4 + 4 + 2 * 2 + 4 + 3
