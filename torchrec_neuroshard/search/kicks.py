"""Iterated local search: random kicks out of a local optimum, each refined again [Lourenco2003iterated].

References:
    [Lourenco2003iterated] H. R. Lourenco, O. C. Martin, T. Stuetzle. Iterated local search. Handbook of
        Metaheuristics, 2003.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Callable

import numpy as np

from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import Placement
from torchrec_neuroshard.search.refine import refine

_SHARDS_MOVED = 3
_PATIENCE = 24  # kicks in a row that find nothing


def kick_and_refine(
    simulator: PlanSimulator, placement: Placement, kicks: int, seed: int, out_of_time: Callable[[], bool]
) -> list[Placement]:
    """Kicks the best placement so far at most ``kicks`` times; returns all local optima found, the given one first.

    Stops early when kicks keep failing, as they do on problems so small that nothing is left to find.
    """
    rng = np.random.default_rng(seed)
    best, best_ms = placement, simulator.cost(placement).total_ms
    optima = [placement]
    seen = {placement.shards}
    failures = 0
    for _ in range(kicks):
        if out_of_time() or failures >= _PATIENCE:
            break
        failures += 1
        kicked = _kick(simulator, best, rng)
        if kicked is None or kicked.shards in seen:
            continue
        seen.add(kicked.shards)
        candidate = refine(simulator, kicked, out_of_time)
        optima.append(candidate)
        candidate_ms = simulator.cost(candidate).total_ms
        if candidate_ms < best_ms:
            best, best_ms, failures = candidate, candidate_ms, 0
    return optima


def _kick(simulator: PlanSimulator, placement: Placement, rng: np.random.Generator) -> Placement | None:
    """Moves a few random shards to random ranks; None where memory, or a sibling there, does not allow it."""
    cluster = simulator.problem.cluster
    shards = list(placement.shards)
    if cluster.world_size < 2 or not shards:
        return None
    for index in rng.choice(len(shards), size=min(_SHARDS_MOVED, len(shards)), replace=False):
        shards[index] = replace(shards[index], rank=int(rng.integers(cluster.world_size)))
    if len({(shard.table, shard.rank) for shard in shards}) < len(shards):
        return None
    used = np.zeros_like(cluster.capacity)
    kinds = simulator.kinds((shard.table, shard.width) for shard in shards)
    np.add.at(used, [shard.rank for shard in shards], simulator.memory[kinds])
    return Placement(tuple(shards), placement.sharding_types) if (used <= cluster.capacity).all() else None
