"""Does a plan that fits get found when memory is nearly full? Ours against size-first halving, on generated tasks.

    python -m benchmarks.tight_memory --json out/tight_memory.json

Tables fill 93 to 99 % of the ranks' memory; some are larger than a rank. The baseline is what other sharders do: pack
by first-fit-decreasing, and while that fails halve the largest shard. Every plan is checked independently. Tasks that
nobody solves are handed to an integer program, which finds a plan, proves that there is none, or runs out of time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table as RichTable
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.paper_tasks import weights_only_problem
from torchrec_neuroshard.costs.hardware import detect_hardware
from torchrec_neuroshard.costs.model import CostModel, CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import (
    WIDTH_MULTIPLE,
    InfeasibleError,
    Placement,
    Shard,
    ShardingProblem,
    Table,
)
from torchrec_neuroshard.search import SearchConfig, find_placement
from torchrec_neuroshard.search.feasibility import feasible_placement

TASKS = 300
SHORT_SEARCH = SearchConfig(levels=2, proposals=5, grid=3, repack_rounds=0)
METHODS = ("size_first_halving", "feasible_placement", "find_placement")

_RANKS = (2, 16)
_TABLES = (10, 60)
_FILL = (0.93, 0.99)
_RANK_BYTES = 4 << 30
_DIMS: dict[str, tuple[int, ...]] = {"narrow": (4, 8, 16), "coarse": (64, 128, 256)}
_OTHER_DIMS = (16, 32, 64, 128, 256)
_COARSE_WIDTH = 32
_PROVED_NONE = 2  # status of scipy's milp


def _lognormal(rng: np.random.RandomState, tables: int, ranks: int) -> NDArray[np.float64]:
    return np.exp(1.5 * rng.randn(tables))


def _even(rng: np.random.RandomState, tables: int, ranks: int) -> NDArray[np.float64]:
    return rng.uniform(0.5, 1.5, tables)


def _giants(rng: np.random.RandomState, tables: int, ranks: int) -> NDArray[np.float64]:
    """One to three tables, each larger than a rank where the ranks have room for them."""
    giants = rng.randint(1, 4)
    sizes = _lognormal(rng, tables, ranks)
    rank_share = 1.0 / ranks
    of_giants = np.minimum(rng.uniform(1.1, 2.5, giants) * rank_share, 0.8 / giants)
    sizes[giants:] *= (1.0 - of_giants.sum()) / sizes[giants:].sum()
    sizes[:giants] = of_giants
    return sizes


def _over_half(rng: np.random.RandomState, tables: int, ranks: int) -> NDArray[np.float64]:
    """A table for each rank that takes a little more than half of it, and small ones."""
    large = min(ranks, tables - 1)
    sizes = rng.uniform(0.2, 1.8, tables)
    sizes[:large] = rng.uniform(0.5, 0.62, large) / ranks
    sizes[large:] *= (1.0 - sizes[:large].sum()) / sizes[large:].sum()
    return sizes


def _few_large(rng: np.random.RandomState, tables: int, ranks: int) -> NDArray[np.float64]:
    """A fifth of the tables take four fifths of the memory."""
    large = max(1, tables // 5)
    sizes = rng.uniform(0.5, 1.5, tables)
    sizes[:large] *= 0.8 / sizes[:large].sum()
    sizes[large:] *= 0.2 / sizes[large:].sum()
    return sizes


# Distributions of table sizes: relative bytes, [tables].
_SIZES: dict[str, Callable[[np.random.RandomState, int, int], NDArray[np.float64]]] = {
    "lognormal": _lognormal,
    "even": _even,
    "giants": _giants,
    "over_half": _over_half,
    "few_large": _few_large,
    "narrow": _even,  # dims of 4 to 16
    "coarse": _lognormal,  # column shards of at least 32
}
KINDS = tuple(_SIZES)


@dataclass(frozen=True)
class TightTask:
    """A task.

    Attributes:
        index: of the task.
        kind: distribution of table sizes, one of :data:`KINDS`.
        fill: share of all memory that the weights take.
        problem: the tables and ranks.
    """

    index: int
    kind: str
    fill: float
    problem: ShardingProblem


def tight_task(index: int) -> TightTask:
    """The task with this index, from 0; kinds take turns."""
    rng = np.random.RandomState([index, 93])
    kind = KINDS[index % len(KINDS)]
    ranks = int(rng.randint(_RANKS[0], _RANKS[1] + 1))
    count = int(rng.randint(_TABLES[0], _TABLES[1] + 1))
    fill = float(rng.uniform(*_FILL))
    sizes = _SIZES[kind](rng, count, ranks)
    dims = rng.choice(_DIMS.get(kind, _OTHER_DIMS), size=count)
    rows = np.maximum(sizes / sizes.sum() * _RANK_BYTES * ranks * fill / (4 * dims), 10).astype(np.int64)
    tables = tuple(
        Table(f"t{number}", int(table_rows), int(dim), float(rng.randint(1, 30)))
        for number, (table_rows, dim) in enumerate(zip(rows, dims))
    )
    total = float(4 * (rows * dims).sum())
    problem = weights_only_problem(tables, ranks, total / fill / ranks)
    if kind == "coarse":
        problem = replace(problem, options=tuple(replace(o, min_width=_COARSE_WIDTH) for o in problem.options))
    return TightTask(index, kind, fill, problem)


def size_first_halving(problem: ShardingProblem) -> Placement | None:
    """First-fit-decreasing by bytes; while it fails, the largest shard that may be halved is.

    Returns:
        The placement; None where no shard is left that may be halved.
    """
    shards = [(index, table.embedding_dim) for index, table in enumerate(problem.tables)]
    while True:
        shards.sort(key=lambda shard: (-sum(problem.shard_memory(*shard)), shard))
        ranks = _first_fit(problem, shards)
        if ranks is not None:
            return _placement(problem, shards, ranks)
        pieces = np.bincount([table for table, _ in shards], minlength=len(problem.tables))
        halvable = (
            position
            for position, (table, width) in enumerate(shards)
            if problem.splittable(table)
            and width % (2 * WIDTH_MULTIPLE) == 0
            and width // 2 >= problem.options[table].min_width
            and pieces[table] < problem.cluster.world_size
        )
        largest = next(halvable, None)
        if largest is None:
            return None
        table, width = shards.pop(largest)
        shards += [(table, width // 2)] * 2


def _first_fit(problem: ShardingProblem, shards: list[tuple[int, int]]) -> list[int] | None:
    """[shards] the first rank with room for each and no shard of its table; None where one has nowhere to go."""
    free = problem.cluster.capacity.astype(np.float64).copy()
    holders: list[set[int]] = [set() for _ in problem.tables]
    ranks = []
    for table, width in shards:
        memory = problem.shard_memory(table, width)
        fitting = np.flatnonzero((free >= memory).all(axis=1)).tolist()
        rank = next((rank for rank in fitting if rank not in holders[table]), None)
        if rank is None:
            return None
        holders[table].add(rank)
        free[rank] -= memory
        ranks.append(rank)
    return ranks


def _placement(problem: ShardingProblem, shards: list[tuple[int, int]], ranks: list[int]) -> Placement:
    offsets = [0] * len(problem.tables)
    placed = []
    for (table, width), rank in sorted(zip(shards, ranks)):
        placed.append(Shard(table, offsets[table], width, rank))
        offsets[table] += width
    pieces = np.bincount([shard.table for shard in placed], minlength=len(problem.tables))
    return Placement(tuple(placed), problem.sharding_types((pieces > 1).tolist()))


def has_plan(problem: ShardingProblem, seconds: float) -> bool | None:
    """Whether any plan fits, by integer programming; None where that was not settled in time.

    For each table and rank, a variable counts the pieces of :data:`~torchrec_neuroshard.problem.WIDTH_MULTIPLE` columns
    that the rank holds, and a binary one says whether it holds any, which then are at least the least width. Memory has
    to be proportional to columns.
    """
    tables, ranks = len(problem.tables), problem.cluster.world_size
    cells = tables * ranks
    dims = np.asarray([table.embedding_dim for table in problem.tables])
    least = [option.min_width if problem.splittable(t) else dims[t] for t, option in enumerate(problem.options)]
    pieces, fewest = dims // WIDTH_MULTIPLE, -(-np.minimum(least, dims) // WIDTH_MULTIPLE)
    capacity = problem.cluster.capacity.sum(axis=1)
    piece_bytes = np.asarray([sum(problem.shard_memory(t, WIDTH_MULTIPLE)) for t in range(tables)]) / capacity.max()
    whole = np.hstack([np.kron(np.eye(tables), np.ones(ranks)), np.zeros((tables, cells))])
    memory = np.hstack([np.kron(piece_bytes, np.eye(ranks)), np.zeros((ranks, cells))])
    most_held = np.hstack([np.eye(cells), -np.diag(np.repeat(pieces, ranks))])
    least_held = np.hstack([np.eye(cells), -np.diag(np.repeat(fewest, ranks))])
    result = milp(
        np.zeros(2 * cells),
        integrality=np.ones(2 * cells),
        bounds=Bounds(0, np.concatenate([np.repeat(pieces, ranks), np.ones(cells)])),
        constraints=[
            LinearConstraint(whole, pieces, pieces),
            # Solvers work to a tolerance; what has no solution even with a little more room has none.
            LinearConstraint(memory, -np.inf, capacity / capacity.max() * (1 + 1e-6)),
            LinearConstraint(most_held, -np.inf, 0),
            LinearConstraint(least_held, 0, np.inf),
        ],
        options={"time_limit": seconds},
    )
    if result.x is None:
        return False if result.status == _PROVED_NONE else None
    widths = WIDTH_MULTIPLE * np.rint(result.x[:cells]).astype(np.int64).reshape(tables, ranks)
    held = [(int(t), int(r)) for t, r in np.argwhere(widths)]
    placement = _placement(problem, [(t, int(widths[t, r])) for t, r in held], [r for _, r in held])
    return True if not check_placement(problem, placement) else None


@dataclass(frozen=True)
class TightResult:
    """What became of one task.

    Attributes:
        index: of the task.
        kind: distribution of table sizes.
        tables: number of tables.
        ranks: number of ranks.
        fill: share of all memory that the weights take.
        solved: method -> whether it found a plan that passes the check.
        seconds: method -> wall time.
        faults: method -> what is wrong with its plan, for plans that do not pass.
        has_plan: of tasks that nobody solves: whether a plan exists; None where that is not known.
    """

    index: int
    kind: str
    tables: int
    ranks: int
    fill: float
    solved: dict[str, bool]
    seconds: dict[str, float]
    faults: dict[str, list[str]]
    has_plan: bool | None


def run_task(task: TightTask, model: CostModel, prove_seconds: float) -> TightResult:
    """Runs all methods on one task.

    Args:
        task: the task.
        model: the cost model of the full search.
        prove_seconds: limit of the integer program; 0 leaves it out.
    """
    problem = task.problem
    methods: dict[str, Callable[[], Placement | None]] = {
        "size_first_halving": lambda: size_first_halving(problem),
        "feasible_placement": lambda: feasible_placement(problem),
        "find_placement": lambda: find_placement(problem, model, SHORT_SEARCH).placement,
    }
    solved, seconds, faults = {}, {}, {}
    for name in METHODS:
        begun = time.perf_counter()
        try:
            placement = methods[name]()
        except InfeasibleError:
            placement = None
        seconds[name] = round(time.perf_counter() - begun, 4)
        wrong = check_placement(problem, placement) if placement is not None else []
        if wrong:
            faults[name] = wrong
        solved[name] = placement is not None and not wrong
    exists: bool | None = True
    if not any(solved.values()):
        exists = has_plan(problem, prove_seconds) if prove_seconds > 0 else None
    ranks = problem.cluster.world_size
    fill = round(task.fill, 4)
    return TightResult(task.index, task.kind, len(problem.tables), ranks, fill, solved, seconds, faults, exists)


def print_results(results: list[TightResult], console: Console) -> None:
    """Prints how many tasks each method solves, by kind, and the tasks that ours does not solve."""
    table = RichTable(title=f"{len(results)} tasks that fill 93 to 99 % of the memory: solved by")
    for column in ("table sizes", "tasks", *METHODS, "nobody", "of these without a plan"):
        table.add_column(column)
    for kind in (*KINDS, "all"):
        of_kind = [result for result in results if kind in (result.kind, "all")]
        if not of_kind:
            continue
        nobody = [result for result in of_kind if not any(result.solved.values())]
        none_exists = sum(result.has_plan is False for result in nobody)
        counts = [sum(result.solved[name] for result in of_kind) for name in METHODS]
        table.add_row(kind, str(len(of_kind)), *map(str, counts), str(len(nobody)), str(none_exists))
    console.print(table)
    for result in results:
        for name, wrong in result.faults.items():
            console.print(f"task {result.index}: the plan of {name} is wrong: {'; '.join(wrong)}", markup=False)
        if all(result.solved.values()):
            continue
        by = [name for name in METHODS if result.solved[name]]
        said = {True: "a plan exists", False: "there is no plan", None: "not known whether there is a plan"}
        console.print(
            f"task {result.index} ({result.kind}, {result.tables} tables, {result.ranks} ranks, "
            f"{result.fill:.1%} full): " + (f"solved by {', '.join(by)} alone" if by else said[result.has_plan]),
            markup=False,
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the tasks and reports; returns the exit code: 1 where a plan is wrong."""
    parser = argparse.ArgumentParser(description="Compare how many memory-tight tasks get a plan.")
    parser.add_argument("--tasks", type=int, default=TASKS, help=f"number of tasks ({TASKS})")
    parser.add_argument("--first", type=int, default=0, metavar="INDEX", help="index of the first task")
    parser.add_argument("--cost-model", default="auto", help="auto, a shipped name or a path")
    parser.add_argument("--prove-seconds", type=float, default=20.0, help="limit of the integer program; 0: none")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results to this file")
    args = parser.parse_args(argv)
    if args.tasks < 1 or args.first < 0:
        parser.error("--tasks must be at least 1 and --first at least 0")
    torch.set_num_threads(1)
    try:
        model = resolve_cost_model(args.cost_model, "cpu", detect_hardware("cpu"))
    except CostModelError as error:
        print(error, file=sys.stderr)
        return 2
    results = []
    for index in range(args.first, args.first + args.tasks):
        results.append(run_task(tight_task(index), model, args.prove_seconds))
        if len(results) % 50 == 0:
            print(f"{len(results)} of {args.tasks} tasks", file=sys.stderr, flush=True)
    print_results(results, Console(width=None if sys.stdout.isatty() else 150))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
