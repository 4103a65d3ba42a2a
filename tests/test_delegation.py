"""Modules that are left to TorchRec's planner: placed first, counted, and said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from planner_models import ANALYTIC, bag_collection, bag_config, cpu_topology
from test_planner_distributed import LOCAL_BATCH, SGD, columns_of, random_batch, state_error
from torch import nn
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, EmbeddingBagSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError, Topology
from torchrec.distributed.quant_embeddingbag import QuantEmbeddingBagCollectionSharder
from torchrec.inference.modules import quantize_embeddings
from torchrec.modules.embedding_tower import EmbeddingTower

from tests.problems import random_problem, untrained_model
from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.search import find_placement

WHOLE_ON_DEVICE = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])

TOWER_ON_DEVICE = ParameterConstraints(
    sharding_types=["table_column_wise"], compute_kernels=["fused"], min_partition=64
)


class Mixed(nn.Module):
    """A module of ours beside one that is delegated."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.bags = bag_collection(bag_config("a", 60, 32, ["a"]), bag_config("b", 50, 16, ["b"]), device=device)
        self.single = nn.EmbeddingBag(40, 16, mode="sum", include_last_offset=True, device=device)
        self.over = nn.Linear(16, 1, device=device)

    def forward(self, bags: Any, ids: torch.Tensor, offsets: torch.Tensor) -> tuple[Any, Any]:
        return self.bags(bags), self.over(self.single(ids, offsets))


def mixed_worker(rank: int) -> dict[str, Any]:
    torch.manual_seed(3)
    reference, model = Mixed("cpu"), Mixed("cpu")
    sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params=SGD), EmbeddingBagSharder(fused_params=SGD)]
    replicated = {"weight": ParameterConstraints(sharding_types=["data_parallel"])}
    planner = NeuroShardPlanner(cpu_topology(2), LOCAL_BATCH, replicated, cost_model=ANALYTIC)
    plan = planner.collective_plan(model, sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    with torch.no_grad():
        state_error(sharded, reference.state_dict(), copy=True)
    batch = random_batch(rank, {"a": 60, "b": 50})
    ids = random_batch(rank, {"single": 40})
    inputs = batch, ids.values(), ids.offsets()
    outputs = [output.wait() if hasattr(output, "wait") else output for output in sharded(*inputs)]
    expected = reference(*inputs)
    report = planner.report
    assert report is not None
    return {
        "bags": float((columns_of(outputs[0]) - columns_of(expected[0])).abs().max().detach()),
        "single": float((outputs[1] - expected[1]).abs().max().detach()),
        "report": report.to_json(),
    }


def test_a_model_with_a_delegated_module_runs() -> None:
    for result in run_ranks(mixed_worker, 2):
        assert result["bags"] < 1e-6
        assert result["single"] < 1e-6
        assert result["report"]["delegated"]["single"]["tables"] == 1
        assert set(result["report"]["tables"]) == {"a", "b"}


def cuda_planner(**arguments: Any) -> NeuroShardPlanner:
    topology = Topology(2, "cuda", local_world_size=2, hbm_cap=2**30)
    return NeuroShardPlanner(
        topology,
        64,
        cost_model="analytic/h100_sxm",
        hardware="h100_sxm",
        storage_reservation=FixedPercentageStorageReservation(0.0),
        **arguments,
    )


def test_delegated_tables_count_in_memory_and_time_and_ours_go_around_them() -> None:
    """A tower's table fills one rank; the table of ours goes to the other."""
    tower = EmbeddingTower(bag_collection(bag_config("tower", 2_000_000, 64)), nn.Linear(64, 64))
    model = nn.ModuleDict({"tower": tower, "ours": bag_collection(bag_config("t", 2_200_000, 64))})
    sharders: list[Any] = [EmbeddingTowerSharder(), EmbeddingBagCollectionSharder()]
    planner = cuda_planner(constraints={"tower": TOWER_ON_DEVICE, "t": WHOLE_ON_DEVICE})
    plan = planner.plan(model, sharders)
    report = planner.report
    assert report is not None
    (tower_rank,) = plan.plan["tower"]["tower"].ranks  # type: ignore[index]
    assert plan.plan["ours"]["t"].ranks == [1 - tower_rank]  # type: ignore[index]
    assert (report.memory_bytes[:, 0] > 500e6).all()
    assert (report.memory_bytes <= report.cluster.capacity).all()
    assert report.cost.compute_ms[tower_rank] > 0
    assert any("EmbeddingTower" in note and "'tower'" in note for note in report.notes)
    assert {option.name for option in planner.get_selected_options()} == {"tower", "t"}


def test_a_model_of_delegated_modules_alone_is_torchrecs_plan() -> None:
    model = nn.ModuleDict({"one": nn.EmbeddingBag(1_000, 64, mode="sum", device="meta")})
    planner = cuda_planner()
    plan = planner.plan(model, [EmbeddingBagSharder()])  # type: ignore[list-item]
    assert set(plan.plan) == {"one"}
    assert planner.report is None and len(planner.get_selected_options()) == 1


def test_quantized_modules_for_inference_are_torchrecs() -> None:
    model = nn.Sequential(bag_collection(bag_config("t", 1_000, 64), device="cpu"))
    quantized = quantize_embeddings(model, dtype=torch.int8, inplace=False)
    planner = cuda_planner()
    plan = planner.plan(quantized, [QuantEmbeddingBagCollectionSharder()])  # type: ignore[list-item]
    assert plan.plan["0"]["t"].compute_kernel == EmbeddingComputeKernel.QUANT.value  # type: ignore[index]


def test_what_is_delegated_and_does_not_fit_is_torchrecs_error() -> None:
    tower = EmbeddingTower(bag_collection(bag_config("tower", 20_000_000, 64)), nn.Linear(64, 64))
    planner = cuda_planner(constraints={"tower": TOWER_ON_DEVICE})
    with pytest.raises(PlannerError) as error:
        planner.plan(nn.ModuleDict({"tower": tower}), [EmbeddingTowerSharder()])  # type: ignore[list-item]
    assert "storage" in str(error.value).lower()


def test_occupied_time_is_balanced_around() -> None:
    """What a rank spends on delegated tables counts as its load: the hotter of two tables goes to the other rank."""
    base = random_problem(5, tables=2, ranks=2, fill=0.1, min_width=1024)
    free = find_placement(base, untrained_model())
    busy = replace(base, occupied_ms=np.asarray([[500.0, 500.0], [0.0, 0.0]]))
    found = find_placement(busy, untrained_model())
    assert {shard.rank for shard in found.placement.shards} == {1}
    assert found.cost.compute_ms[0] == pytest.approx(1000.0, rel=1e-6)
    assert found.cost.total_ms >= 1000.0 > free.cost.total_ms
