"""One rank of the two-host comparison: trains every plan in turn and counts what crosses the link.

Started by torchrun on both hosts through :mod:`benchmarks.two_hosts`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from benchmarks.two_hosts_plans import (
    LEARNING_RATE,
    RANKS,
    RANKS_PER_HOST,
    bag_collection,
    every_type_sharders,
    plan_from_json,
    quiet,
)
from benchmarks.two_hosts_workloads import load_two_hosts_source
from examples.synthetic_data import synthesize_features
from torchrec_neuroshard.measure.netns import INTERFACE
from torchrec_neuroshard.measure.processes import end_with_parent
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.workload import Workload

_DISTINCT_BATCHES = 4
_FIRST_OF_SECOND_HOST = RANKS_PER_HOST


class TrainedPlan:
    """A model sharded by one plan.

    Args:
        content: the plan, from :func:`benchmarks.two_hosts_plans.plan_to_json`.
        workload: the tables.
    """

    def __init__(self, content: dict[str, Any], workload: Workload) -> None:
        self._model = DistributedModelParallel(
            bag_collection(workload),
            device=torch.device("cpu"),
            plan=plan_from_json(content),
            sharders=every_type_sharders(),
        )
        replicas = list(dict(in_backward_optimizer_filter(self._model.named_parameters())).values())
        self._dense = torch.optim.SGD(replicas, lr=LEARNING_RATE) if replicas else None

    def step(self, features: KeyedJaggedTensor) -> float:
        """Forward, loss and backward with the fused update, and the update of replicas; returns the loss."""
        loss: torch.Tensor = self._model(features).wait().values().square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        if self._dense is not None:
            self._dense.step()
            self._dense.zero_grad()
        return float(loss.detach())


def link_bytes_sent() -> int:
    """Bytes that this rank's host has sent over the link, headers included, since the link was made."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise RuntimeError(f"there is no interface {INTERFACE}: start this program through benchmarks.two_hosts")


def measure(trained: TrainedPlan, batches: list[KeyedJaggedTensor], steps: int) -> dict[str, Any]:
    """Trains some steps; all ranks call it.

    Returns:
        "step_ms": [steps] of the slowest rank, and "link_bytes": [hosts] bytes a step that each host sent.

    Raises:
        RuntimeError: training diverged.
    """
    trained.step(batches[-1])
    before = _between_barriers()
    milliseconds = []
    for number in range(steps):
        begun = time.perf_counter()
        loss = trained.step(batches[number % len(batches)])
        milliseconds.append((time.perf_counter() - begun) * 1e3)
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss}; training diverged")
    sent = _between_barriers() - before
    slowest = torch.tensor(milliseconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    of_rank = [torch.empty(1, dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(of_rank, torch.tensor([sent / steps], dtype=torch.float64))
    return {
        "step_ms": [round(value, 3) for value in slowest.tolist()],
        "link_bytes": [round(float(of_rank[first])) for first in (0, _FIRST_OF_SECOND_HOST)],
    }


def _between_barriers() -> int:
    """The link's counter while no rank trains."""
    dist.barrier()
    sent = link_bytes_sent()
    dist.barrier()
    return sent


def _rank_0_says(flag: bool) -> bool:
    """Rank 0's flag, so that no rank leaves a loop alone."""
    tensor = torch.tensor([int(flag)])
    dist.broadcast(tensor, 0)
    return bool(tensor.item())


def main() -> None:
    """Trains the plans of one workload in interleaved rounds; rank 0 appends a record for each plan and round."""
    parser = argparse.ArgumentParser(description="One rank of the two-host comparison; started by torchrun.")
    parser.add_argument("--job", type=Path, required=True, help="what benchmarks.two_hosts wrote")
    args = parser.parse_args()
    end_with_parent()
    quiet()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    job = json.loads(args.job.read_text())
    workload = load_two_hosts_source(job["source"], RANKS)
    assert workload.batch_size is not None
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    rng = np.random.default_rng([0, rank])
    batches = [synthesize_features(workload, workload.batch_size // RANKS, rng) for _ in range(_DISTINCT_BATCHES)]
    trained = {plan_id: TrainedPlan(content, workload) for plan_id, content in job["plans"].items()}
    store = MeasurementStore(job["store"]) if rank == 0 else None
    order = list(trained)
    begun = time.monotonic()
    for number in range(job["rounds"]):
        if _rank_0_says(time.monotonic() - begun > job["budget_seconds"]):
            break
        first = number % len(order)
        for plan_id in order[first:] + order[:first]:
            measured = measure(trained[plan_id], batches, job["steps"])
            if store is not None:
                load = round(os.getloadavg()[0], 2)
                round_id = f"{job['process']}-{number}"
                store.append({**job["case"], "plan_id": plan_id, "round": round_id, "load_average": load, **measured})
    dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # DMP's groups within and between hosts are gloo's too: whoever ends last finds peers gone, and may abort in C++
    # while the interpreter takes them down. All that was measured is written.
    os._exit(0)


if __name__ == "__main__":
    main()
