"""Our plans against the specifications that TorchRec's own builders make of the same choice, on CUDA topologies.

What only runs on CUDA cannot be trained here; what DistributedModelParallel is handed there can be compared.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planner_models import bag_collection, bag_config
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.problem import FUSED_KERNELS, UVM_CACHING

RANKS, RANKS_PER_HOST = 4, 2
KINDS = ("table_wise", "column_wise", "row_wise", "table_row_wise", "grid_shard", "data_parallel")


def planned(model: Any, sharder: Any, kind: str, kernel: str | None = None) -> Any:
    """Our plan of a table that may only be of one type."""
    constraints = {
        "t": ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel] if kernel else None, min_partition=64)
    }
    planner = NeuroShardPlanner(
        Topology(RANKS, "cuda", local_world_size=RANKS_PER_HOST),
        256,
        constraints,
        cost_model="analytic/h100_sxm",
        hardware="h100_sxm",
        stats=[],
    )
    return planner.plan(model, [sharder]).plan[""]["t"]  # type: ignore[index]


def built(model: Any, sharder: Any, ours: Any, kind: str, kernel: str) -> Any:
    """What TorchRec's builder of the type makes of the same ranks."""
    first = ours.ranks[0]
    generator: Any = {
        "table_wise": lambda: table_wise(rank=first, compute_kernel=kernel),
        "column_wise": lambda: column_wise(ranks=list(ours.ranks), compute_kernel=kernel),
        "row_wise": lambda: row_wise(compute_kernel=kernel),
        "table_row_wise": lambda: table_row_wise(host_index=first // RANKS_PER_HOST),
        "grid_shard": lambda: grid_shard(
            host_indexes=[rank // RANKS_PER_HOST for rank in ours.ranks[::RANKS_PER_HOST]]
        ),
        "data_parallel": lambda: data_parallel(),
    }[kind]()
    plan = construct_module_sharding_plan(
        model,
        {"t": generator},
        sharder=sharder,
        local_size=RANKS_PER_HOST,
        world_size=RANKS,
        device_type="cuda",
    )
    if kind in ("table_row_wise", "grid_shard"):  # whose builders take no kernel
        plan["t"].compute_kernel = kernel
    return plan["t"]


def shards_of(sharding: Any) -> list[tuple[list[int], list[int], str]] | None:
    if sharding.sharding_spec is None:
        return None
    return [
        (list(shard.shard_sizes), list(shard.shard_offsets), str(shard.placement))
        for shard in sharding.sharding_spec.shards
    ]


def same(ours: Any, theirs: Any) -> None:
    assert (ours.sharding_type, ours.compute_kernel) == (theirs.sharding_type, theirs.compute_kernel)
    assert shards_of(ours) == shards_of(theirs)
    if ours.sharding_spec is not None and ours.sharding_type != "row_wise":  # row_wise ignores ranks
        assert list(ours.ranks) == list(theirs.ranks)


@pytest.mark.parametrize("kernel", FUSED_KERNELS)
@pytest.mark.parametrize("kind", KINDS)
def test_plans_of_bags_are_as_torchrec_builds_them(kind: str, kernel: str) -> None:
    model = bag_collection(bag_config("t", 1_003, 256, ["a", "b"]))
    sharder: Any = EmbeddingBagCollectionSharder()
    if kind == "data_parallel":
        kernel = "dense"
    ours = planned(model, sharder, kind, kernel)
    same(ours, built(model, sharder, ours, kind, kernel))
    if kernel == UVM_CACHING:
        assert 0.0 < ours.cache_params.load_factor <= 1.0


@pytest.mark.parametrize("kind", ["table_wise", "column_wise", "row_wise", "data_parallel"])
def test_plans_of_sequences_are_as_torchrec_builds_them(kind: str) -> None:
    config = EmbeddingConfig(name="t", num_embeddings=1_003, embedding_dim=256, feature_names=["a"])
    model = EmbeddingCollection(tables=[config], device=torch.device("meta"))
    sharder: Any = EmbeddingCollectionSharder()
    kernel = "dense" if kind == "data_parallel" else "fused"
    ours = planned(model, sharder, kind, kernel)
    same(ours, built(model, sharder, ours, kind, kernel))
