"""Measures the fused groups of searched plans, as further training records.

A search exploits the errors of its cost model, so the groups that it builds are not those of a random sample.
The workloads come from the generator of the comparison with seeds from 100 on; the comparison's own seeds,
0 to 11, are refused.

    taskset -c 1 python -m benchmarks.searched_groups --seeds 100 130 --cost-model DIR --out records.jsonl
"""

from __future__ import annotations

import argparse
import sys
from typing import Iterator, Sequence

import torch
from tqdm import tqdm

from benchmarks.neuroshard_planners import VARIANTS, plan_with_neuroshard
from benchmarks.rank_costs import rank_work
from benchmarks.skewed_workloads import SAMPLES_PER_RANK, SEEDS, WORLD_SIZES, skewed_workload
from torchrec_neuroshard.measure.collect import Sampled, collect_groups
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.measure.store import MeasurementStore
from torchrec_neuroshard.measure.timing import RepetitionPolicy


def searched_groups(seeds: range, cost_model: str, planners: Sequence[str]) -> Iterator[GroupSpec]:
    """Groups of the plans for each seed, world size and variant of our planner."""
    for seed in seeds:
        workload = skewed_workload(seed)
        for world_size in WORLD_SIZES:
            for planner in planners:
                planned = plan_with_neuroshard(planner, workload, world_size, SAMPLES_PER_RANK, cost_model)
                for rank in rank_work(workload, planned.placement, world_size, SAMPLES_PER_RANK, seed).groups:
                    yield from rank


def main() -> int:
    """Plans and measures; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure the fused groups of searched plans.")
    parser.add_argument("--seeds", nargs=2, type=int, default=(100, 120), metavar=("FIRST", "END"))
    parser.add_argument("--planners", nargs="+", choices=VARIANTS, default=["neuroshard"], help="who plans")
    parser.add_argument("--cost-model", default="auto")
    parser.add_argument("--out", required=True, metavar="FILE")
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    seeds = range(*args.seeds)
    if not seeds or set(seeds) & set(SEEDS):
        parser.error(f"--seeds must not touch those of the comparison, {SEEDS[0]} to {SEEDS[-1]}")
    torch.set_num_threads(1)
    with MeasurementStore(args.out) as store, tqdm(unit="record") as bar:
        result = collect_groups(
            (Sampled(spec, "plan") for spec in searched_groups(seeds, args.cost_model, args.planners)),
            store,
            torch.device("cpu"),
            args.minutes,
            RepetitionPolicy(warmup=1, minimum=4, maximum=20, seconds=0.35),
            progress=lambda _: bar.update(),
        )
    print(f"{result.written} records in {result.seconds:.0f} s, {result.skipped} were there", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
