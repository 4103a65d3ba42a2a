"""The real 2-rank step: trains the example's DLRM under DistributedModelParallel on each planner's kept plan.

As a program it is one rank, started by torchrun through :func:`real_steps`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Sequence

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table as RichTable
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.plan_cache import PlanRequest, cached_plans, read_plan
from benchmarks.sources import load_source, samples_per_rank
from torchrec_neuroshard.adapters.workload_model import sharders
from torchrec_neuroshard.problem import DATA_PARALLEL, Placement
from torchrec_neuroshard.workload import Workload

RANKS = 2
STEPS, WARMUP = 23, 3
_PASSES = 3  # every plan is trained this often, planners interleaved
_DENSE_FEATURES = 13
_DISTINCT_BATCHES = 6


def sharding_plan(placement: Placement, workload: Workload, module: nn.Module) -> ShardingPlan:
    """TorchRec's form of a placement of the tables of the module's only EmbeddingBagCollection (on the CPU)."""
    path = next(name for name, child in module.named_modules() if isinstance(child, EmbeddingBagCollection))
    parameters = EmbeddingModuleShardingPlan()
    for index, table in enumerate(workload.tables):
        kind = placement.sharding_types[index]
        shards = [shard for shard in placement.shards if shard.table == index]
        replicated = kind == DATA_PARALLEL  # such tables have no shards, and a specification must have some
        specification = (
            None
            if replicated
            else EnumerableShardingSpec(
                [
                    ShardMetadata(
                        shard_offsets=[0, shard.offset],
                        shard_sizes=[table.num_embeddings, shard.width],
                        placement=f"rank:{shard.rank}/cpu",
                    )
                    for shard in shards
                ]
            )
        )
        parameters[table.name] = ParameterSharding(
            sharding_type=kind,
            compute_kernel="dense" if replicated else "fused",
            ranks=list(range(dist.get_world_size())) if replicated else [shard.rank for shard in shards],
            sharding_spec=specification,
        )
    return ShardingPlan({path: parameters})


def real_steps(
    sources: Sequence[str], planners: Sequence[str], timeout_seconds: int | None, cost_model: str, folder: Path
) -> list[dict[str, Any]]:
    """Trains each planner's 2-rank plan of each workload, planners interleaved.

    Returns:
        One object per workload and planner: {"workload", "planner", "plan_id", "step_ms": [passes], "median_ms"}.

    Raises:
        RuntimeError: training failed; the message went to standard error.
    """
    results = []
    for source in sources:
        requests = [PlanRequest(source, RANKS, planner, timeout_seconds, cost_model) for planner in planners]
        files = cached_plans(requests, folder)
        milliseconds: dict[str, list[float]] = {planner: [] for planner in planners}
        for number in range(_PASSES):
            start = number % len(requests)
            for request in requests[start:] + requests[:start]:
                milliseconds[request.planner].append(_train(request, files[request]))
        results += [
            {
                "workload": source,
                "planner": request.planner,
                "plan_id": read_plan(files[request]).plan_id,
                "step_ms": milliseconds[request.planner],
                "median_ms": statistics.median(milliseconds[request.planner]),
            }
            for request in requests
        ]
    return results


def print_real_steps(steps: Sequence[dict[str, Any]], console: Console) -> None:
    """Prints the steps' times."""
    table = RichTable(title=f"Step of a DLRM under DistributedModelParallel, {RANKS} ranks, sparse_dist pipeline")
    for column in ("workload", "planner", "median ms", "passes"):
        table.add_column(column)
    for step in steps:
        passes = ", ".join(f"{milliseconds:.1f}" for milliseconds in step["step_ms"])
        table.add_row(step["workload"], step["planner"], f"{step['median_ms']:.1f}", passes)
    console.print(table)


def _train(request: PlanRequest, file: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "step.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        command += ["-m", "benchmarks.real_steps", "--source", request.source, "--plan", str(file)]
        command += ["--label", request.planner, "--out", str(out)]
        if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            raise RuntimeError(f"training {request.source} on the plan of {request.planner} failed; see above")
        return float(json.loads(out.read_text()))


def main() -> None:
    """Trains one plan as one rank; rank 0 writes the median step in ms."""
    from examples.synthetic_data import cycle, synthesize_batches
    from examples.train_dlrm import LEARNING_RATE, build_model, train

    parser = argparse.ArgumentParser(description="One rank of a training run; started by torchrun.")
    parser.add_argument("--source", required=True, metavar="FILE|skewed:SEED")
    parser.add_argument("--plan", type=Path, required=True, help="a kept plan for two ranks")
    parser.add_argument("--label", required=True, help="what the progress bar says")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = load_source(args.source)
    batch_size = samples_per_rank(workload, RANKS)
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    rng = np.random.default_rng([0, dist.get_rank()])
    batches = synthesize_batches(workload, batch_size, _DENSE_FEATURES, _DISTINCT_BATCHES, rng)
    module = build_model(workload, device)
    plan = sharding_plan(read_plan(args.plan).placement, workload, module)
    model = DistributedModelParallel(module=module, device=device, plan=plan, sharders=sharders())
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))
    settings = argparse.Namespace(steps=STEPS, planner=args.label, pipeline="sparse_dist")
    step_ms, _ = train(model, optimizer, cycle(batches, STEPS + 2), settings, device)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(statistics.median(step_ms[WARMUP:])))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
