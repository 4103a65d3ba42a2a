"""The estimates of a finished plan, where TorchRec's stats and tools look for them: on its shards."""

from __future__ import annotations

from torchrec.distributed.planner.types import ShardingOption

from torchrec_neuroshard.adapters.compat import make_perf, make_storage
from torchrec_neuroshard.costs.simulator import PlanCost, PlanSimulator
from torchrec_neuroshard.problem import Placement


def set_estimates(
    options: list[ShardingOption], placement: Placement, simulator: PlanSimulator, cost: PlanCost
) -> None:
    """Sets ``shard.perf`` and ``shard.storage``, so that the shards of a rank add up to what is predicted for it.

    Args:
        options: one for each table, as made of the placement.
        placement: the plan.
        simulator: predicted it.
        cost: its prediction.
    """
    problem = simulator.problem
    all_shares = simulator.shares(placement, cost)
    for number, (option, spread, shares) in enumerate(zip(options, placement.spreads, all_shares)):
        memory = (
            problem.block_memory(number, spread)
            if spread is not None
            else [problem.shard_memory(number, int(shard.size[1])) for shard in option.shards]
        )
        for shard, share, (hbm, ddr) in zip(option.shards, shares.tolist(), memory):
            forward, backward, forward_comms, backward_comms, input_dist = share
            shard.perf = make_perf(forward, forward_comms, backward, backward_comms, input_dist)
            shard.storage = make_storage(int(hbm), int(ddr))
