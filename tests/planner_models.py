"""Small models and helpers that the planner's tests share."""

from __future__ import annotations

from typing import Any, Sequence

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

ANALYTIC = "analytic/generic_cpu"
MIB = 2**20


def bag_config(name: str, rows: int, dim: int, features: Sequence[str] | None = None) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features or [f"f_{name}"])
    )


def bag_collection(
    *configs: EmbeddingBagConfig, weighted: bool = False, device: str = "meta"
) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=list(configs), is_weighted=weighted, device=torch.device(device))


class TwoCollections(nn.Module):
    """A model whose embedding modules lie at different depths and share a table name."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        self.sparse = nn.ModuleDict(
            {
                "user": bag_collection(
                    bag_config("a", 2000, 64, ["u0"]), bag_config("b", 500, 32, ["u1", "u2"]), device=device
                )
            }
        )
        self.item = bag_collection(bag_config("a", 3000, 64, ["i0"]), bag_config("c", 800, 128, ["i1"]), device=device)
        self.over = nn.Linear(4, 4)


def cpu_topology(world_size: int, ddr_mib: int = 4096) -> Topology:
    return Topology(world_size=world_size, compute_device="cpu", local_world_size=world_size, ddr_cap=ddr_mib * MIB)


def bag_sharders(fused_params: dict[str, Any] | None = None) -> list[Any]:
    return [EmbeddingBagCollectionSharder(fused_params=fused_params)]


def plan_json(plan: ShardingPlan) -> dict[str, Any]:
    """A plan as plain data: module -> table -> type, kernel, ranks and shards."""
    return {
        path: {
            name: {
                "type": entry.sharding_type,
                "kernel": entry.compute_kernel,
                "ranks": entry.ranks,
                "shards": [
                    (list(shard.shard_offsets), list(shard.shard_sizes), str(shard.placement))
                    for shard in (entry.sharding_spec.shards if entry.sharding_spec else ())
                ],
            }
            for name, entry in module_plan.items()
        }
        for path, module_plan in plan.plan.items()
    }
