"""Trains the same DLRM twice on two ranks, on TorchRec's plan and on NeuroShard's, and compares the plans.

python -m examples.demo
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
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable
from tqdm import tqdm

from examples.train_dlrm import DEMO_WORKLOAD
from torchrec_neuroshard.measure.plan_groups import rank_groups
from torchrec_neuroshard.measure.probe import DISTURBED, DisturbanceProbe
from torchrec_neuroshard.measure.tbe import measure_group
from torchrec_neuroshard.problem import Cluster, Placement, Shard, ShardingProblem, TableOptions
from torchrec_neuroshard.workload import Workload

PLANNERS = ("torchrec", "neuroshard")
ROUNDS = 3
BUSY_LOAD = 3.0  # load average above which something else than the demo's two ranks runs


class DemoError(Exception):
    """A run of the demo failed; the message says which and how to look closer."""


def train_with(planner: str, world_size: int, steps: int, folder: Path) -> dict[str, Any]:
    """Runs ``examples.train_dlrm`` under torchrun; returns what it wrote.

    Raises:
        DemoError: the run failed.
    """
    out = folder / f"{planner}.json"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world_size)]
    script = ["-m", "examples.train_dlrm", "--planner", planner, "--steps", str(steps), "--device", "cpu"]
    log = folder / f"{planner}.log"
    # What torchrun and the libraries say at length goes to a file, which is shown only when the run fails.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    with open(log, "w") as output:
        command = [*launcher, *script, "--json", str(out)]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code or not out.exists():
        # What the ranks said ends where torchrun reports the failure and adds a traceback of its own.
        said = log.read_text(errors="replace").replace("\r", "\n").split("failed (exitcode")[0]
        tail = "\n".join(said.splitlines()[-40:])
        raise DemoError(
            f"{tail}\n\nTraining with the {planner} planner failed (exit code {code}); its last lines are above. To "
            f"run it alone:\n  torchrun --standalone --nproc_per_node {world_size} {' '.join(script)}"
        )
    return json.loads(out.read_text())


def placement_of(plan: dict[str, Any], workload: Workload) -> Placement:
    """Converts a plan, as ``train_dlrm`` writes it, to a placement of the workload's tables."""
    shards = [
        Shard(table=index, offset=shard["offset"][1], width=shard["size"][1], rank=shard["rank"])
        for index, table in enumerate(workload.tables)
        for shard in plan[table.name]["shards"]
    ]
    return Placement(tuple(shards), tuple(plan[table.name]["sharding_type"] for table in workload.tables))


def measure_ranks(results: list[dict[str, Any]], workload: Workload, world_size: int) -> list[list[float]]:
    """Times what every rank of every plan looks up, alone on one core with FBGEMM's operator.

    The plans take turns, so that a busy moment of the machine does not fall on one of them.

    Returns:
        [plans][ranks] median ms of forward and backward.
    """
    problem = ShardingProblem(
        tables=workload.tables,
        options=tuple(TableOptions(("column_wise",), table.embedding_dim) for table in workload.tables),
        cluster=Cluster(world_size, world_size, "cpu", np.full((world_size, 2), np.inf)),
        batch_size=results[0]["batch_size"] // world_size,
        memory=lambda table, width: (0.0, 0.0),
    )
    plans = [rank_groups(problem, placement_of(result["plan"], workload)) for result in results]
    rounds: list[list[list[float]]] = [[[] for _ in range(world_size)] for _ in results]
    probe, disturbances = DisturbanceProbe(torch.device("cpu")), []
    with tqdm(total=ROUNDS * len(plans) * world_size, desc="timing each rank alone", leave=False) as bar:
        for _ in range(ROUNDS):
            for plan, ranks in zip(plans, rounds):
                for groups, samples in zip(plan, ranks):
                    timings = [measure_group(group, torch.device("cpu")).total.median for group in groups]
                    samples.append(sum(timings))
                    disturbances.append(probe.disturbance())
                    bar.update()
    if max(disturbances) > DISTURBED or os.getloadavg()[0] > BUSY_LOAD:
        print("Other work disturbed the machine meanwhile: times are too long, and do not compare. Repeat when idle.")
    return [[statistics.median(samples) for samples in ranks] for ranks in rounds]


def comparison(results: list[dict[str, Any]], measured: list[list[float]]) -> RichTable:
    """The table at the end: one column per planner, one line per figure."""
    table = RichTable(title=f"{results[0]['workload']}: {results[0]['world_size']} ranks on CPU", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result["planner"], justify="right")
    table.add_row("cost model", *(result["cost_model"] for result in results))
    table.add_row("plan time (s)", *(f"{result['plan_seconds']:.2f}" for result in results))
    for rank in range(results[0]["world_size"]):
        table.add_row(
            f"rank {rank}, predicted by the planner (ms)",
            *(f"{result['predicted_ms_per_rank'][rank]:.1f}" for result in results),
        )
    for rank in range(results[0]["world_size"]):
        table.add_row(f"rank {rank}, measured (ms)", *(f"{ranks[rank]:.1f}" for ranks in measured))
    table.add_row("slowest rank, measured (ms)", *(f"{max(ranks):.1f}" for ranks in measured), style="bold")
    table.add_row("training step (ms)", *(f"{result['step_ms']:.1f}" for result in results), style="bold")
    table.add_row("last loss", *(f"{result['loss'][-1]:.4f}" for result in results))
    table.caption = (
        "Predicted and measured: embedding lookups of a rank, forward and backward with update; measured alone on "
        "one core. A training step adds the dense layers and the collectives."
    )
    table.caption_justify = "left"
    return table


def main() -> int:
    """Runs the demo; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compare TorchRec's planner and NeuroShard's on two ranks of a CPU.")
    parser.add_argument("--steps", type=int, default=60, help="training steps with each planner (default: 60)")
    parser.add_argument("--world-size", type=int, default=2, help="ranks (default: 2)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console()
    workload = Workload.load(DEMO_WORKLOAD)
    results = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for planner in PLANNERS:
                with console.status(f"training a DLRM on {args.world_size} ranks, plan by {planner} ..."):
                    results.append(train_with(planner, args.world_size, args.steps, Path(folder)))
                last = results[-1]
                console.print(f"{planner}: {args.steps} steps, loss {last['loss'][0]:.4f} -> {last['loss'][-1]:.4f}")
        measured = measure_ranks(results, workload, args.world_size)
    except DemoError as error:
        console.print(str(error), markup=False, highlight=False)
        return 1
    console.print(comparison(results, measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
