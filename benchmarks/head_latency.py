"""How long a cost model takes to price groups: what a search pays for each candidate.

    taskset -c 0 python -m benchmarks.head_latency --cost-model cpu

prints the median time of one call on 10,000 rank states (sums of shards, as the search keeps them) and on one, for the
mean head and for the ensemble, in ms of this machine's core.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from time import perf_counter
from typing import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from torchrec_neuroshard.costs.group_model import GroupCostModel
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.measure.pool import sample_group
from torchrec_neuroshard.training.dataset import spec_features

STATES = 10_000
_GROUPS = 60  # distinct ones, drawn from the pool


def group_sums(model: GroupCostModel, states: int) -> NDArray[np.float64]:
    """[states, z_dim] sums of sampled groups."""
    sums = np.stack([model.contributions(spec_features(sample_group(0, i))).sum(axis=0) for i in range(_GROUPS)])
    return np.ascontiguousarray(sums[np.random.default_rng(0).integers(0, _GROUPS, states)])


def median_ms(call: Callable[[], object], repetitions: int) -> float:
    """Median time of a call, after one that does not count."""
    call()
    times = []
    for _ in range(repetitions):
        begun = perf_counter()
        call()
        times.append(perf_counter() - begun)
    return 1e3 * float(np.median(times))


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description="Time the heads of a cost model.")
    parser.add_argument("--cost-model", default="cpu", metavar="NAME_OR_PATH", help="(default: cpu)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        model = CostModel.load(options.cost_model)
    except CostModelError as error:
        print(f"error: --cost-model: {error}", file=sys.stderr)
        return 2
    table = Table("predicted by", "nets", f"{STATES:,} states (ms)", "one state (ms)", title="Median time of one call")
    for name, groups in (("mean head", model.groups), ("ensemble", model.ensemble)):
        if isinstance(groups, GroupCostModel):
            many = group_sums(groups, STATES)
            cells = (median_ms(partial(groups.predict, many), 20), median_ms(partial(groups.predict, many[:1]), 500))
            table.add_row(name, str(len(groups.nets)), *(f"{cell:.3f}" for cell in cells))
    Console(highlight=False).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
