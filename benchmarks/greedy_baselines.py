"""Greedy baselines of sharding papers: whole tables, balanced by one quantity of theirs.

References:
    [Zha2023neuroshard] D. Zha et al. Pre-train and Search: Efficient Embedding Table Sharding with
        Pre-trained Neural Cost Models. MLSys 2023, arXiv 2305.01868, section 4 (baselines).
"""

from __future__ import annotations

from typing import Callable

import numpy as np
from numpy.typing import NDArray

from torchrec_neuroshard.problem import Placement, ShardingProblem
from torchrec_neuroshard.search.feasibility import placement_of
from torchrec_neuroshard.search.splits import whole_tables


def _size(problem: ShardingProblem) -> NDArray[np.float64]:
    return _memory(problem).sum(axis=1)


def _dim(problem: ShardingProblem) -> NDArray[np.float64]:
    return np.asarray([table.embedding_dim for table in problem.tables], dtype=np.float64)


def _lookups(problem: ShardingProblem) -> NDArray[np.float64]:
    return _dim(problem) * np.asarray([table.pooling_factor for table in problem.tables], dtype=np.float64)


def _size_lookups(problem: ShardingProblem) -> NDArray[np.float64]:
    return _lookups(problem) * np.log10([float(table.num_embeddings) for table in problem.tables])


# What each baseline balances, [tables]: bytes, columns, columns read per sample, and those times log10 of the rows.
BALANCED: dict[str, Callable[[ShardingProblem], NDArray[np.float64]]] = {
    "greedy_size": _size,
    "greedy_dim": _dim,
    "greedy_lookups": _lookups,
    "greedy_size_lookups": _size_lookups,
}


def greedy_baseline(problem: ShardingProblem, name: str) -> Placement | None:
    """Tables by falling quantity, each to the rank that has least of it among those with enough memory.

    Args:
        problem: the tables and ranks.
        name: a key of :data:`BALANCED`.

    Returns:
        The placement; None where a table fits on no rank.
    """
    weights = BALANCED[name](problem)
    load = np.zeros(problem.cluster.world_size)

    def choose(table: int, fitting: NDArray[np.int64]) -> int:
        rank = int(fitting[np.argmin(load[fitting])])
        load[rank] += weights[table]
        return rank

    return _place(problem, np.argsort(-weights, kind="stable"), choose)


def random_baseline(problem: ShardingProblem, seed: int) -> Placement | None:
    """Tables in random order, each to a random rank with enough memory; None where a table fits on no rank."""
    rng = np.random.default_rng(seed)
    return _place(problem, rng.permutation(len(problem.tables)), lambda _, fitting: int(rng.choice(fitting)))


def _place(
    problem: ShardingProblem, order: NDArray[np.int64], choose: Callable[[int, NDArray[np.int64]], int]
) -> Placement | None:
    """Places whole tables in this order; ``choose`` takes a table and the ranks that it fits on."""
    memory = _memory(problem)
    free = problem.cluster.capacity.astype(np.float64).copy()
    ranks = np.zeros(len(problem.tables), dtype=np.int64)
    for table in order.tolist():
        fitting = np.flatnonzero((free >= memory[table]).all(axis=1))
        if not fitting.size:
            return None
        ranks[table] = choose(table, fitting)
        free[ranks[table]] -= memory[table]
    return placement_of(problem, whole_tables(problem), ranks)


def _memory(problem: ShardingProblem) -> NDArray[np.float64]:
    """[tables, 2] HBM and DDR bytes of whole tables."""
    memory = [problem.shard_memory(t, table.embedding_dim) for t, table in enumerate(problem.tables)]
    return np.asarray(memory, dtype=np.float64).reshape(-1, 2)
