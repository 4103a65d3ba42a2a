"""Plans on disk, so that a planner which needs minutes runs once per workload, world size and inputs.

As a program it plans in a process of its own, with one thread and a fixed hash seed (TorchRec's plans depend on it):

    python -m benchmarks.plan_cache --workload skewed:0 skewed:1 --world-size 4 8 --planners torchrec
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.plan_records import PlannedResult
from benchmarks.planners import PLANNERS, SHARDERS, plan, planner_inputs
from benchmarks.sources import load_source, samples_per_rank, workload_id

DEFAULT_FOLDER = Path("out/plans")


@dataclass(frozen=True)
class PlanRequest:
    """One plan to make.

    Attributes:
        source: ``skewed:SEED`` or a workload file.
        world_size: ranks.
        planner: one of :data:`benchmarks.planners.PLANNERS`.
        timeout_seconds: limit of TorchRec's search; None lets it finish.
        cost_model: of our planner: "auto", a shipped name or a path.
        sharders: one of :data:`benchmarks.planners.SHARDERS`.
    """

    source: str
    world_size: int
    planner: str
    timeout_seconds: int | None = None
    cost_model: str = "auto"
    sharders: str = "default"

    def path(self, folder: Path) -> Path:
        """The file that holds the plan, named after all it depends on."""
        workload = load_source(self.source)
        batch_size = samples_per_rank(workload, self.world_size)
        inputs = planner_inputs(
            self.planner, self.world_size, batch_size, self.timeout_seconds, self.cost_model, self.sharders
        )
        key = json.dumps([workload_id(workload), self.world_size, self.planner, inputs], sort_keys=True)
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        name = workload.name.replace(":", "_").replace("/", "_")
        return folder / f"{name}-w{self.world_size}-{self.planner}-{digest}.json"


def cached_plans(requests: list[PlanRequest], folder: Path, replan: bool = False) -> dict[PlanRequest, Path]:
    """Returns the plans' files, making those that are missing (or all) in one child process.

    Raises:
        RuntimeError: a planner failed; its message went to standard error.
    """
    paths = {request: request.path(folder) for request in requests}
    missing = [request for request in requests if replan or not paths[request].exists()]
    if missing:
        environment = {**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        arguments = [json.dumps([asdict(request), str(paths[request])]) for request in missing]
        command = [sys.executable, "-m", "benchmarks.plan_cache", "--requests", *arguments]
        if subprocess.run(command, env=environment).returncode:
            raise RuntimeError("planning failed; the message is above")
    return paths


def read_plan(path: Path) -> PlannedResult:
    """Reads a plan's file."""
    return PlannedResult.from_json(json.loads(path.read_text()))


def make_plan(request: PlanRequest, path: Path) -> PlannedResult:
    """Plans in this process and writes the plan's file."""
    workload = load_source(request.source)
    batch_size = samples_per_rank(workload, request.world_size)
    result = plan(
        request.planner,
        workload,
        request.world_size,
        batch_size,
        request.timeout_seconds,
        request.cost_model,
        request.sharders,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(result.to_json(), indent=1))
    partial.replace(path)
    return result


def main() -> None:
    """Makes the plans that are asked for and not there yet."""
    parser = argparse.ArgumentParser(description="Make plans and keep them.")
    parser.add_argument("--workload", nargs="*", default=[], metavar="FILE|skewed:SEED")
    parser.add_argument("--world-size", nargs="*", type=int, default=[])
    parser.add_argument("--planners", nargs="*", choices=PLANNERS, default=[])
    parser.add_argument("--timeout", type=int, help="seconds given to TorchRec's search (default: until it is done)")
    parser.add_argument("--cost-model", default="auto", help="of our planner: auto, a shipped name or a path")
    parser.add_argument("--sharders", choices=SHARDERS, default="default", help="what every planner is given")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER)
    parser.add_argument("--requests", nargs="*", default=[], help="as made by cached_plans; always replanned")
    args = parser.parse_args()
    product = [
        PlanRequest(source, world_size, planner, args.timeout, args.cost_model, args.sharders)
        for planner in args.planners
        for world_size in args.world_size
        for source in args.workload
    ]
    if product:
        cached_plans(product, args.folder)
    for number, text in enumerate(args.requests, start=1):
        fields, path = json.loads(text)
        request = PlanRequest(**fields)
        result = make_plan(request, Path(path))
        print(
            f"{time.strftime('%H:%M:%S')} {number}/{len(args.requests)} {request.source} on {request.world_size} ranks "
            f"by {request.planner}: {result.plan_seconds:.1f} s, plan {result.plan_id}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
