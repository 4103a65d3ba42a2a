"""Trains a DLRM under DistributedModelParallel on a plan of NeuroShardPlanner or of TorchRec's planner.

torchrun --nproc_per_node 2 -m examples.train_dlrm --planner neuroshard
torchrun --nproc_per_node 2 -m examples.train_dlrm --planner torchrec
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DenseArch, DLRMTrain, OverArch
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import Adagrad, RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from tqdm import tqdm

from examples.synthetic_data import cycle, synthesize_batches
from torchrec_neuroshard import NeuroShardPlanner, TableStats
from torchrec_neuroshard.adapters.workload_model import embedding_configs, parameter_constraints
from torchrec_neuroshard.workload import Workload, WorkloadError

DEMO_WORKLOAD = Path(__file__).parent / "workloads" / "demo.json"
DENSE_FEATURES = 13
LEARNING_RATE = 0.05
WARMUP_STEPS = 3
DISTINCT_BATCHES = 8

FUSED_OPTIMIZERS = {"sgd": torch.optim.SGD, "adagrad": Adagrad, "rowwise_adagrad": RowWiseAdagrad}


class MixedDimDLRM(nn.Module):
    """A DLRM for tables of different dims, from TorchRec's own parts.

    TorchRec's DLRM takes dot products between embeddings, so it needs one dim for all tables; this one feeds
    the concatenated embeddings to the over arch instead. What the planner shards is the same.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection, dense_device: torch.device) -> None:
        super().__init__()
        columns = sum(
            config.embedding_dim * len(config.feature_names)
            for config in embedding_bag_collection.embedding_bag_configs()
        )
        self.embedding_bag_collection = embedding_bag_collection
        self.dense_arch = DenseArch(DENSE_FEATURES, [64, 32], device=dense_device)
        self.over_arch = OverArch(columns + 32, [64, 1], device=dense_device)

    def forward(self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor) -> torch.Tensor:
        """Returns [batch, 1] logits for [batch, DENSE_FEATURES] dense features and the ids."""
        pooled = self.embedding_bag_collection(sparse_features).values()
        return self.over_arch(torch.cat([self.dense_arch(dense_features), pooled], dim=1))


def build_model(workload: Workload, device: torch.device) -> DLRMTrain:
    """Builds the model; its tables stay on the meta device until they are sharded."""
    ebc = EmbeddingBagCollection(embedding_configs(workload, weighted=False), device=torch.device("meta"))
    optimizer = FUSED_OPTIMIZERS[workload.tables[0].optimizer]
    apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": LEARNING_RATE})
    dims = {table.embedding_dim for table in workload.tables}
    if len(dims) > 1:
        return DLRMTrain(MixedDimDLRM(ebc, device))
    return DLRMTrain(DLRM(ebc, DENSE_FEATURES, [64, dims.pop()], [64, 1], device))


def torchrec_planner(workload: Workload, batch_size: int, device: torch.device) -> EmbeddingShardingPlanner:
    """TorchRec's own planner, told the true pooling factors and this machine's memory."""
    local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
    topology = Topology(
        world_size=dist.get_world_size(),
        local_world_size=local_world_size,
        compute_device=device.type,
        hbm_cap=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        ddr_cap=psutil.virtual_memory().total // local_world_size,
    )
    return EmbeddingShardingPlanner(
        topology=topology, batch_size=batch_size, constraints=parameter_constraints(workload)
    )


def plan_to_json(plan: ShardingPlan) -> dict[str, Any]:
    """The plan as the command line's ``plan --json`` writes tables."""
    tables = {}
    for module_plan in plan.plan.values():
        assert isinstance(module_plan, EmbeddingModuleShardingPlan)
        for name, parameter in module_plan.items():
            shards = parameter.sharding_spec.shards if parameter.sharding_spec is not None else []
            tables[name] = {
                "sharding_type": parameter.sharding_type,
                "compute_kernel": parameter.compute_kernel,
                "shards": [
                    {"rank": shard.placement.rank(), "offset": shard.shard_offsets, "size": shard.shard_sizes}
                    for shard in shards
                ],
            }
    return tables


def predicted_ms(planner: Any, world_size: int) -> list[float]:
    """What the planner itself expects the lookups of each rank to take, forward and backward, in ms; rank 0 only."""
    if isinstance(planner, EmbeddingShardingPlanner):
        totals = [0.0] * world_size
        for shard in (shard for option in planner._best_plan or [] for shard in option.shards):
            if shard.rank is not None and shard.perf is not None:
                totals[shard.rank] += shard.perf.fwd_compute + shard.perf.bwd_compute
        return totals
    return (planner.report.cost.forward_ms + planner.report.cost.backward_ms).tolist()


def cost_model_name(planner: Any) -> str:
    """What the planner's prediction rests on; rank 0 only."""
    if isinstance(planner, EmbeddingShardingPlanner):
        return "TorchRec's formula"
    name, provenance = planner.report.cost_model["name"], planner.report.cost_model["provenance"]
    return name if provenance in name else f"{name} ({provenance})"


def train(
    model: DistributedModelParallel,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    args: argparse.Namespace,
    device: torch.device,
) -> tuple[list[float], list[float]]:
    """Trains for ``args.steps`` steps; returns ([steps] ms, [steps] loss) of this rank."""
    pipeline = TrainPipelineSparseDist(model, optimizer, device)
    step_ms, losses = [], []
    with tqdm(total=args.steps, desc=args.planner, unit=" steps", disable=dist.get_rank() != 0) as bar:
        for _ in range(args.steps):
            started = time.perf_counter()
            if args.pipeline == "sparse_dist":
                loss, _logits, _labels = pipeline.progress(batches)
            else:
                optimizer.zero_grad()
                total, (loss, _logits, _labels) = model(next(batches).to(device))
                total.backward()
                optimizer.step()
            losses.append(loss.item())  # waits for the device
            step_ms.append((time.perf_counter() - started) * 1e3)
            bar.set_postfix(loss=f"{losses[-1]:.4f}", ms=f"{step_ms[-1]:.0f}", refresh=False)
            bar.update()
    return step_ms, losses


def parse_args() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description="Train a DLRM on synthetic batches of a workload file.")
    parser.add_argument("--workload", type=Path, default=DEMO_WORKLOAD, help="workload file (default: the demo's)")
    parser.add_argument("--planner", choices=("neuroshard", "torchrec"), default="neuroshard")
    parser.add_argument("--pipeline", choices=("none", "sparse_dist"), default="sparse_dist")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--batch-size", type=int, help="global samples per step (default: the workload's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps <= WARMUP_STEPS:
        parser.error(f"--steps must be more than the {WARMUP_STEPS} warm-up steps, got {args.steps}")
    if "RANK" not in os.environ:
        parser.error("start me with: torchrun --nproc_per_node 2 -m examples.train_dlrm ...")
    return args


def load_workload(args: argparse.Namespace) -> tuple[Workload, int]:
    """Reads the workload file; returns it with the batch size per rank.

    Raises:
        WorkloadError: the file is bad, or this example cannot train it.
    """
    workload = Workload.load(args.workload)
    world_size = int(os.environ["WORLD_SIZE"])
    batch_size = args.batch_size or workload.batch_size
    if batch_size is None:
        raise WorkloadError(f"{args.workload}: field 'batch_size' is null; give --batch-size")
    if batch_size % world_size:
        raise WorkloadError(
            f"a global batch of {batch_size} does not divide among {world_size} ranks; set --batch-size"
        )
    for table in workload.tables:
        if table.weighted:
            raise WorkloadError(
                f"{args.workload}: table {table.name!r} is weighted; this example trains unweighted ones"
            )
        if table.optimizer not in FUSED_OPTIMIZERS:
            known = ", ".join(FUSED_OPTIMIZERS)
            raise WorkloadError(f"{args.workload}: field 'optimizer' is {table.optimizer!r}; this example has {known}")
    return workload, batch_size // world_size


def main() -> int:
    """Plans, shards, trains and reports; returns the exit code."""
    args = parse_args()
    try:
        workload, batch_size = load_workload(args)
    except WorkloadError as error:
        print(error, file=sys.stderr)  # on every rank: torchrun ends the others as soon as one has failed
        return 2
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # 1. Data: synthetic batches of this rank, served over and over.
    rng = np.random.default_rng([args.seed, rank])
    batches = synthesize_batches(workload, batch_size, DENSE_FEATURES, DISTINCT_BATCHES, rng)

    # 2. Model: tables on the meta device, their optimizer fused into the backward pass.
    model = build_model(workload, device)

    # 3. Plan. Which planner is built here is the one line to change; all else stays as it is with TorchRec's.
    planner: Any
    if args.planner == "torchrec":
        planner = torchrec_planner(workload, batch_size, device)
    else:
        planner = NeuroShardPlanner(
            batch_size=batch_size,
            constraints=parameter_constraints(workload),
            table_stats=TableStats.from_batches(batches, model),
            pipeline=args.pipeline,
        )
    sharders: list[ModuleSharder[Any]] = [EmbeddingBagCollectionSharder()]
    started = time.perf_counter()
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    plan_seconds = time.perf_counter() - started

    # 4. Shard, with a plain optimizer for the dense parameters.
    model = DistributedModelParallel(module=model, device=device, plan=plan, sharders=sharders)
    dense_parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense_parameters, lambda params: torch.optim.SGD(params, lr=LEARNING_RATE))

    # 5. Train. The pipeline runs up to two batches ahead of the step; that there are no more batches than steps leaves
    # no collective of a batch under way when the ranks part.
    step_ms, losses = train(model, optimizer, cycle(batches, args.steps), args, device)

    # 6. Report.
    if rank == 0:
        result = {
            "planner": args.planner,
            "pipeline": args.pipeline,
            "workload": workload.name,
            "world_size": world_size,
            "device": device.type,
            "batch_size": batch_size * world_size,
            "plan_seconds": round(plan_seconds, 3),
            "cost_model": cost_model_name(planner),
            "predicted_ms_per_rank": [round(ms, 3) for ms in predicted_ms(planner, world_size)],
            "step_ms": round(statistics.median(step_ms[WARMUP_STEPS:]), 2),
            "loss": [round(loss, 4) for loss in losses],
            "plan": plan_to_json(plan),
        }
        per_rank = ", ".join(f"{ms:.1f}" for ms in result["predicted_ms_per_rank"])
        print(f"planner: {args.planner}; plan found in {plan_seconds:.2f} s")
        print(f"predicted lookup time per rank, forward and backward: {per_rank} ms")
        print(f"median step: {result['step_ms']:.1f} ms; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
        if args.json:
            args.json.write_text(json.dumps(result, indent=1) + "\n")
    # 7. Part. A rank that leaves early cuts off those that still wait for it; and the group's threads end with the last
    # object that holds it, which must be before Python ends.
    dist.barrier()
    del model, optimizer, dense_parameters
    gc.collect()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
