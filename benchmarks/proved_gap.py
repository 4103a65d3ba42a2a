"""How far plans are from the best there is, at most: a proved bound under TorchRec's own, additive costs.

    python -m benchmarks.proved_gap

Plans the public workloads of ``benchmarks/workloads/`` whose tables are pooled, on one host of devices of 80 GB
(planning only; nothing runs on a GPU), and proves how low any plan could be
(:mod:`torchrec_neuroshard.search.lower_bound`).
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import PlannerError

from benchmarks.plan_time import HBM_BYTES
from benchmarks.torchrec_planners import DDR_BYTES_PER_RANK, RESTRICTED
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints, sharders
from torchrec_neuroshard.search import SearchConfig
from torchrec_neuroshard.workload import Workload, WorkloadError

FOLDER = Path(__file__).parent / "workloads"
_DEFAULT_BATCH = 65_536  # global, of the files that leave it open


def gap_of(workload: Workload, ranks: int) -> dict[str, Any]:
    """Plans a workload under TorchRec's estimates and proves a bound."""
    planner = NeuroShardPlanner(
        topology=Topology(ranks, "cuda", hbm_cap=HBM_BYTES, ddr_cap=DDR_BYTES_PER_RANK, local_world_size=min(ranks, 8)),
        batch_size=max(1, (workload.batch_size or _DEFAULT_BATCH) // ranks),
        constraints=parameter_constraints(workload, **RESTRICTED),
        cost_model="torchrec",
        search=SearchConfig(prove_bound=True),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    planner.plan(embedding_model(workload), sharders())
    report = planner.report
    assert report is not None and report.lower_bound_ms is not None
    return {
        "tables": len(workload.tables),
        "ms": report.cost.total_ms,
        "bound_ms": report.lower_bound_ms,
        "gap": report.cost.total_ms / report.lower_bound_ms - 1,
        "seconds": report.plan_seconds,
    }


def main() -> int:
    """Prints the gap of each workload and the median; returns the exit code."""
    parser = argparse.ArgumentParser(description="Proved gaps to the optimum under TorchRec's own costs.")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    table = Table("workload", "tables", "slowest rank ms", "proved least ms", "gap %", "seconds")
    gaps: dict[str, dict[str, Any]] = {}
    for file in sorted(FOLDER.glob("*.json")):
        try:
            workload = Workload.load(file)
            if any(entry.get("unpooled") for entry in json.loads(file.read_text())["tables"]):
                continue
            gaps[file.stem] = gap_of(workload, args.world_size)
        except (WorkloadError, PlannerError) as error:
            print(f"{file.stem} is left out: {str(error).splitlines()[0][:160]}", file=sys.stderr)
            continue
        one = gaps[file.stem]
        figures = (f"{one[key]:.4f}" for key in ("ms", "bound_ms"))
        table.add_row(file.stem, str(one["tables"]), *figures, f"{100 * one['gap']:.2f}", f"{one['seconds']:.1f}")
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    values = np.asarray([one["gap"] for one in gaps.values()])
    print(f"{len(values)} workloads: median gap {100 * np.median(values):.2f} %, largest {100 * values.max():.2f} %")
    if args.json:
        result = {"schema": 1, "world_size": args.world_size, "workloads": gaps}
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
