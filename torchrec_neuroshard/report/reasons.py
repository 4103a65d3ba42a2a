"""Why a plan places tables as it does, and what follows from it, in words."""

from __future__ import annotations

from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import FUSED, KEY_VALUE, UVM_CACHING, Placement, ShardingProblem

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
    mean_ms = float(cost.compute_ms.mean())
    shares = simulator.shares(placement, cost)
    sentences = []
    for ms, t in sorted(zip(alone, spread), reverse=True)[:_NAMED]:
        kind = placement.sharding_types[t]
        whole = problem.shard_memory(t, problem.tables[t].embedding_dim)
        if not problem.options[t].has_columns:
            reason = "its constraints or its sharder leave nothing else"
        elif not (problem.cluster.capacity >= whole).all(axis=1).any():
            reason = "whole it fits on no rank"
        elif ms > mean_ms:
            reason = (
                f"whole on one rank its lookups would take {ms:.3f} ms, where a rank takes {mean_ms:.3f} ms on average"
            )
        else:
            each = float(shares[t][:, :2].sum(axis=1).mean())
            reason = f"its lookups take {each:.3f} ms on each of its ranks, whole they would take {ms:.3f} ms on one"
        sentences.append(f"Table {problem.tables[t].name!r} is {kind}: {reason}.")
    if len(spread) > _NAMED:
        sentences.append(f"{len(spread) - _NAMED} more tables are spread over ranks.")
    return sentences


def host_memory_reasons(problem: ShardingProblem) -> list[str]:
    """Says which tables lie in host memory or beyond, and why; nothing where none do.

    Args:
        problem: with the kernels that the plan has.
    """
    result = []
    for table, option in zip(problem.tables, problem.options):
        if table.kernel == KEY_VALUE:
            reason = "its constraints leave nothing else"
            if FUSED in option.kernels:
                reason = "the tables do not fit in the devices' memory, and its constraints leave nothing else off them"
            result.append(
                f"Table {table.name!r} lies in a key-value store ({table.kernel}): {reason}. No cost model covers "
                "that, its time counts as that of a table on the device."
            )
        elif table.kernel != FUSED:
            cache = f" with {table.load_factor:.0%} of its rows cached" if table.kernel == UVM_CACHING else ""
            reason = "the tables do not fit in the devices' memory, and it has few lookups for its size"
            if FUSED not in option.kernels:
                reason = "its constraints leave nothing else"
            result.append(f"Table {table.name!r} lies in host memory ({table.kernel}{cache}): {reason}.")
    if len(result) > _NAMED:
        result[_NAMED:] = [f"{len(result) - _NAMED} more tables lie in host memory or beyond."]
    return result


def checkpoint_notes(problem: ShardingProblem, placement: Placement) -> list[str]:
    """Says how to load weights where TorchRec's ``load_state_dict`` cannot; nothing where it can.

    TorchRec (up to 1.9) views every column shard of a table as if it were as wide as the table's first one.

    Args:
        problem: what was planned.
        placement: the plan.
    """
    widths: dict[int, set[int]] = {}
    for shard in placement.shards:
        widths.setdefault(shard.table, set()).add(shard.width)
    for table, spread in enumerate(placement.spreads):
        if spread is not None:
            widths[table] = {width for width, _ in spread.pieces}
    uneven = [problem.tables[table].name for table, found in sorted(widths.items()) if len(found) > 1]
    if not uneven:
        return []
    return [
        f"Column shards of {len(uneven)} table(s) differ in width ({', '.join(uneven[:_NAMED])}"
        f"{', ...' if len(uneven) > _NAMED else ''}): torch.distributed.checkpoint.load into model.state_dict() loads "
        "them, and model.load_state_dict of that sharded state, which TorchRec refuses, is not to be called after it."
    ]
