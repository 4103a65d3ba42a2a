"""The real step: trains a DLRM under DistributedModelParallel on each planner's kept plan, on a few gloo ranks.

As a program it is one rank, started by torchrun through :func:`real_steps`.
"""

from __future__ import annotations

import argparse
import gc
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
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRMTrain
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from benchmarks.all_types import chosen_sharders
from benchmarks.plan_cache import PlanRequest, cached_plans, read_plan
from benchmarks.planners import SHARDERS
from benchmarks.sources import load_source, samples_per_rank
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.sharding_plan import sharding_plan
from torchrec_neuroshard.adapters.workload_model import embedding_configs
from torchrec_neuroshard.problem import DATA_PARALLEL, Placement
from torchrec_neuroshard.workload import Workload

STEPS, WARMUP, DRAINING = 25, 3, 2  # steps, the first and the last of which are not timed
_PASSES = 3  # every plan is trained this often, planners interleaved
_DENSE_FEATURES = 13
_DISTINCT_BATCHES = 6


def build_model(workload: Workload, placement: Placement, device: torch.device) -> nn.Module:
    """A DLRM whose tables have their optimizer fused, but for those that the plan replicates.

    TorchRec drops a fused optimizer on a replicated table; the dense optimizer (SGD) updates those.
    """
    from examples.train_dlrm import FUSED_OPTIMIZERS, LEARNING_RATE, MixedDimDLRM

    bags = EmbeddingBagCollection(embedding_configs(workload, weighted=False), device=torch.device("meta"))
    for table, kind in zip(workload.tables, placement.sharding_types):
        if kind != DATA_PARALLEL:
            weights = bags.embedding_bags[table.name].parameters()
            apply_optimizer_in_backward(FUSED_OPTIMIZERS[table.optimizer], weights, {"lr": LEARNING_RATE})
    return DLRMTrain(MixedDimDLRM(bags, device))


def torchrec_plan(
    placement: Placement, module: nn.Module, sharders: list[ModuleSharder[nn.Module]], batch_size: int
) -> ShardingPlan:
    """TorchRec's form of a placement of the module's tables on the ranks of this CPU host."""
    ranks = dist.get_world_size()
    topology = Topology(world_size=ranks, local_world_size=ranks, compute_device="cpu")
    tables = collect_tables(module, sharders, None, "cpu", batch_size)
    return sharding_plan(tables, placement, topology, batch_size)


def real_steps(
    sources: Sequence[str],
    planners: Sequence[str],
    ranks: int,
    timeout_seconds: int | None,
    cost_model: str,
    sharders: str,
    folder: Path,
) -> list[dict[str, Any]]:
    """Trains each planner's plan of each workload on a few ranks, planners interleaved.

    Returns:
        One object per workload and planner: {"workload", "ranks", "planner", "plan_id", "step_ms": [passes],
        "median_ms"}.

    Raises:
        RuntimeError: training failed; the message went to standard error.
    """
    results = []
    for source in sources:
        requests = [PlanRequest(source, ranks, planner, timeout_seconds, cost_model, sharders) for planner in planners]
        files = cached_plans(requests, folder)
        milliseconds: dict[str, list[float]] = {planner: [] for planner in planners}
        for number in range(_PASSES):
            start = number % len(requests)
            for request in requests[start:] + requests[:start]:
                milliseconds[request.planner].append(_train(request, files[request]))
        results += [
            {
                "workload": source,
                "ranks": ranks,
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
    table = RichTable(title="Step of a DLRM under DistributedModelParallel, sparse_dist pipeline")
    for column in ("workload", "ranks", "planner", "median ms", "passes"):
        table.add_column(column)
    for step in steps:
        passes = ", ".join(f"{milliseconds:.1f}" for milliseconds in step["step_ms"])
        table.add_row(step["workload"], str(step["ranks"]), step["planner"], f"{step['median_ms']:.1f}", passes)
    console.print(table)


def _train(request: PlanRequest, file: Path) -> float:
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "step.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={request.world_size}"]
        command += ["-m", "benchmarks.real_steps", "--source", request.source, "--plan", str(file)]
        command += ["--sharders", request.sharders, "--label", request.planner, "--out", str(out)]
        if subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
            raise RuntimeError(f"training {request.source} on the plan of {request.planner} failed; see above")
        return float(json.loads(out.read_text()))


def main() -> None:
    """Trains one plan as one rank; rank 0 writes the median step in ms."""
    from examples.synthetic_data import cycle, synthesize_batches
    from examples.train_dlrm import LEARNING_RATE, train

    parser = argparse.ArgumentParser(description="One rank of a training run; started by torchrun.")
    parser.add_argument("--source", required=True, metavar="FILE|skewed:SEED")
    parser.add_argument("--plan", type=Path, required=True, help="a kept plan for as many ranks")
    parser.add_argument("--sharders", choices=SHARDERS, required=True, help="what the planner was given")
    parser.add_argument("--label", required=True, help="what the progress bar says")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = load_source(args.source)
    device = torch.device("cpu")
    dist.init_process_group("gloo")
    batch_size = samples_per_rank(workload, dist.get_world_size())
    rng = np.random.default_rng([0, dist.get_rank()])
    batches = synthesize_batches(workload, batch_size, _DENSE_FEATURES, _DISTINCT_BATCHES, rng)
    placement, sharders = read_plan(args.plan).placement, chosen_sharders(args.sharders)
    module = build_model(workload, placement, device)
    plan = torchrec_plan(placement, module, sharders, batch_size)
    model = DistributedModelParallel(module=module, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE))
    settings = argparse.Namespace(steps=STEPS, planner=args.label, pipeline="sparse_dist")
    step_ms, _ = train(model, optimizer, cycle(batches, STEPS), settings, device)
    if dist.get_rank() == 0:
        args.out.write_text(json.dumps(statistics.median(step_ms[WARMUP:-DRAINING])))
    dist.barrier()
    del model, module, optimizer, dense  # gloo's threads end with the last that holds the group: before Python does
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
