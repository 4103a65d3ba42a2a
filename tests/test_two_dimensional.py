"""Plans under 2D parallelism: DMPCollection replicates what a group shards, and remaps the ranks of a plan in place.

Its constructor wants CUDA, so its own methods are called on a stand-in that holds the device.
"""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from parity import AllTypesSharder
from planner_models import ANALYTIC, bag_collection, bag_config, plan_json
from torch.distributed import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.planner.types import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import NeuroShardPlanner

SHARDING_GROUP, WORLD = 2, 4
STEP = WORLD // SHARDING_GROUP
VALUES = {"whole": 1.0, "cut": 2.0, "rows": 3.0, "copies": 4.0}  # of all weights of a table
TYPES = {"whole": "table_wise", "cut": "column_wise", "rows": "row_wise", "copies": "data_parallel"}


def stand_in(device: str) -> Any:
    return SimpleNamespace(_device=torch.device(device))


def collection() -> torch.nn.Module:
    configs = [bag_config("whole", 50, 16), bag_config("cut", 40, 128), bag_config("rows", 33, 32)]
    configs.append(bag_config("copies", 20, 8))
    return bag_collection(
        *(
            dataclasses.replace(
                config, init_fn=lambda weights, value=VALUES[config.name]: torch.nn.init.constant_(weights, value)
            )
            for config in configs
        )
    )


def planner(device: str, group: int = SHARDING_GROUP) -> NeuroShardPlanner:
    """A planner for one sharding group, whose tables lie in all ways; hosts have as many of its ranks as the group."""
    limits = {
        name: ParameterConstraints(sharding_types=[kind], compute_kernels=None if name == "copies" else ["fused"])
        for name, kind in TYPES.items()
    }
    if device == "cuda":
        limits["hosts"] = ParameterConstraints(sharding_types=["table_row_wise"])
    topology = Topology(world_size=group, local_world_size=group, compute_device=device, hbm_cap=2**30, ddr_cap=2**30)
    return NeuroShardPlanner(topology, 8, limits, stats=[], cost_model=ANALYTIC, seed=1)


def remap(plan: ShardingPlan, device: str, rank: int, contiguous: bool = False) -> None:
    DMPCollection._remap_sharding_plan(stand_in(device), plan, rank, STEP, SHARDING_GROUP, contiguous)


@pytest.fixture
def one_rank() -> Iterator[None]:
    """The default group of one process, whose local size TorchRec asks for."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def ranks_of(plan: ShardingPlan) -> dict[str, list[int]]:
    """The ranks of all shards by table, as ``ranks`` and placements both have them."""
    result = {}
    for module_plan in plan.plan.values():
        for name, entry in module_plan.items():  # type: ignore[attr-defined]
            result[name] = list(entry.ranks)
            if entry.sharding_spec is not None:
                assert [shard.placement.rank() for shard in entry.sharding_spec.shards] == result[name]
    return result


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_plans_are_remapped_and_nothing_is_shared(device: str, contiguous: bool, one_rank: None) -> None:
    ours = planner(device)
    first = ours.plan(collection(), [AllTypesSharder()])
    assert {name: entry["type"] for name, entry in plan_json(first)[""].items()} == TYPES
    planned, before = ranks_of(first), plan_json(first)
    assert set(planned) == set(TYPES) and all(planned.values())  # DATA_PARALLEL names its ranks too
    kept = copy.deepcopy(first)
    selected = [[shard.rank for shard in option.shards] for option in ours.get_selected_options()]
    second = ours.plan(collection(), [AllTypesSharder()])
    for rank in range(WORLD):
        mine = copy.deepcopy(first)
        remap(mine, device, rank, contiguous)
        start = rank // SHARDING_GROUP * SHARDING_GROUP if contiguous else rank % STEP
        stride = 1 if contiguous else STEP
        expected = {name: [start + stride * owner for owner in owners] for name, owners in planned.items()}
        assert ranks_of(mine) == expected
    remap(first, device, WORLD - 1, contiguous)
    # Remapping one plan touches no other: not a copy, not the planner's next or own, nor the options.
    assert plan_json(first) != before
    assert plan_json(kept) == before and plan_json(second) == before
    assert [[shard.rank for shard in option.shards] for option in ours.get_selected_options()] == selected
    assert plan_json(ours.plan(collection(), [AllTypesSharder()])) == before


def test_tables_share_no_shards() -> None:
    plan = planner("cpu").plan(collection(), [AllTypesSharder()])
    entries = [entry for module_plan in plan.plan.values() for entry in module_plan.values()]  # type: ignore[attr-defined]
    shards = [shard for entry in entries if entry.sharding_spec for shard in entry.sharding_spec.shards]
    parts = [entry.ranks for entry in entries] + shards
    parts += [numbers for shard in shards for numbers in (shard.shard_sizes, shard.shard_offsets, shard.placement)]
    assert len({id(part) for part in parts}) == len(parts) > 10


def worker(rank: int) -> dict[str, Any]:
    ours = planner("cpu")
    plan = ours.collective_plan(collection(), [AllTypesSharder()], dist.GroupMember.WORLD)
    pieces = plan_json(plan)
    here = stand_in("cpu")
    mesh, sharding_pg, replica_pg = DMPCollection._create_process_groups(here, rank, WORLD, SHARDING_GROUP, False)
    remap(plan, "cpu", rank)
    for entry in plan.plan[""].values():  # type: ignore[attr-defined]
        for shard in entry.sharding_spec.shards if entry.sharding_spec else ():
            # The remapping numbers devices, as CUDA's are; shards on CPUs must not be.
            shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")
    env = ShardingEnv2D(
        sharding_pg=sharding_pg, replica_pg=replica_pg, global_pg=dist.GroupMember.WORLD, device_mesh=mesh,
        node_group_size=SHARDING_GROUP,
    )  # fmt: skip
    sharded = DistributedModelParallel(
        collection(), env, device=torch.device("cpu"), plan=plan, sharders=[AllTypesSharder()]
    )
    counts = torch.tensor([[rank + 1, 2], [3, rank], [1, 1], [2, rank + 2]])  # [features, samples] ids
    names = list(VALUES)
    ids = KeyedJaggedTensor(
        [f"f_{name}" for name in names], torch.arange(int(counts.sum())) % 20, lengths=counts.reshape(-1)
    )
    output = sharded(ids).to_dict()
    for name, of_feature in zip(names, counts):
        expected = VALUES[name] * of_feature[:, None].float()
        assert torch.equal(output[f"f_{name}"].detach(), expected.expand_as(output[f"f_{name}"])), name
    sum(value.sum() for value in output.values()).backward()
    return {"plan": pieces, "ranks": ranks_of(plan)}


@pytest.mark.slow
def test_two_sharding_groups_look_up_as_planned() -> None:
    results = run_ranks(worker, WORLD, local_world_size=WORLD)
    for rank, result in enumerate(results):
        assert result["plan"] == results[0]["plan"]
        assert {owner % STEP for owners in result["ranks"].values() for owner in owners} == {rank % STEP}
