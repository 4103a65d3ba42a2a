"""Why a plan spreads tables over ranks, in words."""

from __future__ import annotations

from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import Placement

_NAMED = 8  # tables whose reason is given


def spread_reasons(simulator: PlanSimulator, placement: Placement, cost: PlanCost) -> list[str]:
    """A sentence for each table that is spread over ranks, costliest first; of very many, the first few.

    Args:
        simulator: of the problem with nothing spread.
        placement: the plan.
        cost: its prediction.
    """
    problem = simulator.problem
    spread = [t for t, how in enumerate(placement.spreads) if how is not None]
    if not spread:
        return []
    alone = simulator.alone((t, problem.tables[t].embedding_dim) for t in spread).sum(axis=1).tolist()
    mean_ms = float((cost.compute_ms + cost.forward_comms_ms + cost.backward_comms_ms).mean())
    sentences = []
    for ms, t in sorted(zip(alone, spread), reverse=True)[:_NAMED]:
        kind = placement.sharding_types[t]
        whole = problem.shard_memory(t, problem.tables[t].embedding_dim)
        if not problem.options[t].has_columns:
            reason = "its constraints or its sharder leave nothing else"
        elif not (problem.cluster.capacity >= whole).all(axis=1).any():
            reason = "whole it fits on no rank"
        else:
            reason = f"whole on one rank it would take {ms:.3f} ms, where a rank takes {mean_ms:.3f} ms on average"
        sentences.append(f"Table {problem.tables[t].name!r} is {kind}: {reason}.")
    if len(spread) > _NAMED:
        sentences.append(f"{len(spread) - _NAMED} more tables are spread over ranks.")
    return sentences
