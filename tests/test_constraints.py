"""What becomes of every field of ParameterConstraints: it reaches the plan as in TorchRec's enumerator, or raises."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_ranks
from fbgemm_gpu.split_embedding_configs import SparseType
from planner_models import ANALYTIC, MIB, bag_collection, bag_config, bag_sharders, cpu_topology, plan_json
from torchrec.distributed.batched_embedding_kernel import BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams, KeyValueParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters.compat import error_type
from torchrec_neuroshard.search import SearchConfig

BATCH = 64
ROWS, DIM = 5000, 256

# Of an option; those that EmbeddingEnumerator sets besides the shards.
OPTION_ATTRIBUTES = (
    "name",
    "batch_size",
    "compute_kernel",
    "sharding_type",
    "partition_by",
    "input_lengths",
    "num_inputs",
    "cache_params",
    "enforce_hbm",
    "stochastic_rounding",
    "bounds_check_mode",
    "dependency",
    "feature_names",
    "output_dtype",
    "key_value_params",
    "is_pooled",
    "is_weighted",
)
CACHE = CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.1, reserved_memory=1.0, precision=DataType.FP16)

# By field, constraints that a plan can honour. A new version's new field is to be added here, and thought about.
HONOURED: dict[str, dict[str, Any]] = {
    "sharding_types": {"sharding_types": ["column_wise"], "min_partition": 128},
    "compute_kernels": {"compute_kernels": ["fused"]},
    "min_partition": {"min_partition": 64, "sharding_types": ["table_wise"]},
    "pooling_factors": {"pooling_factors": [3.0, 9.0]},
    "num_poolings": {"pooling_factors": [3.0, 9.0], "num_poolings": [2.0, 1.0]},
    "batch_sizes": {"pooling_factors": [3.0, 9.0], "batch_sizes": [32, 128]},
    "is_weighted": {"is_weighted": True},
    "cache_params": {"cache_params": CACHE},
    "enforce_hbm": {"enforce_hbm": True},
    "stochastic_rounding": {"stochastic_rounding": False},
    "bounds_check_mode": {"bounds_check_mode": BoundsCheckMode.FATAL},
    "feature_names": {"feature_names": ["a", "b"]},
    "output_dtype": {"output_dtype": DataType.FP16},
    "device_group": {"device_group": "cuda"},
    "key_value_params": {"key_value_params": KeyValueParams(l2_cache_size=64)},
}
# By field, constraints that no plan of ours can honour, and a word of the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sharding_types": ({"sharding_types": ["none_such"]}, "none_such"),
    "compute_kernels": ({"compute_kernels": ["fused_triton"]}, "fused_triton"),
    "min_partition": ({"min_partition": 0}, "min_partition"),
    "pooling_factors": ({"pooling_factors": []}, "pooling_factors"),
    "num_poolings": ({"num_poolings": [1.0, 2.0]}, "num_poolings"),
    "batch_sizes": ({"batch_sizes": [1, 2, 3]}, "batch_sizes"),
    "device_group": ({"device_group": "cpu"}, "device_group"),
    "use_virtual_table": ({"use_virtual_table": True}, "use_virtual_table"),
}


def fields() -> list[str]:
    return [field.name for field in dataclasses.fields(ParameterConstraints)]


def model(weighted: bool = False) -> EmbeddingBagCollection:
    return bag_collection(
        bag_config("t", ROWS, DIM, ["a", "b"]), bag_config("other", 100, 16, ["c"]), weighted=weighted
    )


def topology() -> Topology:
    return Topology(world_size=2, local_world_size=2, compute_device="cuda", hbm_cap=2**31, ddr_cap=2**31)


def planned(arguments: dict[str, Any], weighted: bool = False) -> tuple[NeuroShardPlanner, ShardingPlan]:
    planner = NeuroShardPlanner(
        topology(),
        BATCH,
        {"t": ParameterConstraints(**arguments)},
        cost_model="analytic/h200",
        column_split="never",
        stats=[],
        search=SearchConfig(levels=0, repack_rounds=0),  # two tables
    )
    return planner, planner.plan(model(weighted), bag_sharders())


def option_of(planner: NeuroShardPlanner) -> ShardingOption:
    (option,) = (option for option in planner.get_selected_options() if option.name == "t")
    return option


def test_every_field_is_accounted_for() -> None:
    assert set(fields()) <= {*HONOURED, *REFUSED}  # older versions have fewer


@pytest.mark.parametrize(
    ("field", "weighted"),
    # Of is_weighted the module decides, as in TorchRec: the constraint speaks for modules that cannot tell.
    [(field, False) for field in fields() if field in HONOURED] + [("is_weighted", True), ("num_poolings", True)],
)
def test_an_honoured_field_makes_the_option_that_torchrec_makes(field: str, weighted: bool) -> None:
    arguments = HONOURED[field]
    planner, plan = planned(arguments, weighted)
    ours = option_of(planner)
    constraints = {"t": ParameterConstraints(**arguments)}
    enumerated = EmbeddingEnumerator(topology(), BATCH, constraints).enumerate(model(weighted), bag_sharders())
    (theirs,) = (
        option
        for option in enumerated
        if (option.name, option.sharding_type, option.compute_kernel) == ("t", ours.sharding_type, ours.compute_kernel)
    )
    different = {
        name: (getattr(ours, name, None), getattr(theirs, name, None))
        for name in OPTION_ATTRIBUTES
        if getattr(ours, name, None) != getattr(theirs, name, None)
    }
    if not arguments.get("pooling_factors"):
        # On purpose: TorchRec's default is one id per sample whatever the number of features, here two.
        assert different.pop("input_lengths") == ([1.0, 1.0], [1.0])
        assert different.pop("num_inputs", None) in (None, (2, 1))
    assert different == {}
    entry = plan.plan[""]["t"]  # type: ignore[index]
    assert (entry.sharding_type, entry.compute_kernel) == (theirs.sharding_type, theirs.compute_kernel)
    for name in (
        "cache_params",
        "enforce_hbm",
        "stochastic_rounding",
        "bounds_check_mode",
        "output_dtype",
        "key_value_params",
    ):
        assert getattr(entry, name) == getattr(theirs, name)
    if arguments.get("pooling_factors") and ours.num_shards == 1:
        assert [shard.storage for shard in ours.shards] == [shard.storage for shard in theirs.shards]


@pytest.mark.parametrize("field", [field for field in fields() if field in REFUSED])
def test_what_cannot_be_honoured_is_refused(field: str) -> None:
    arguments, word = REFUSED[field]
    with pytest.raises(PlannerError, match="'t'") as caught:
        planned(arguments)
    assert word in str(caught.value)
    assert caught.value.error_type in (PlannerErrorType.STRICT_CONSTRAINTS, error_type("INPUT_VALIDATION"))


def test_numbers_of_a_constraint_reach_the_costs() -> None:
    def pooling(arguments: dict[str, Any]) -> float:
        planner, _ = planned(arguments)
        assert planner.report is not None
        (table,) = (table for table in planner.report.tables if table.name == "t")
        return table.pooling_factor

    assert pooling({}) == 2.0  # one id for each of its two features
    assert pooling(HONOURED["pooling_factors"]) == 12.0
    assert pooling(HONOURED["num_poolings"]) == 3.0 * 2.0 + 9.0
    assert pooling(HONOURED["batch_sizes"]) == 3.0 * 32 / BATCH + 9.0 * 128 / BATCH


def test_half_precision_outputs_take_less_memory() -> None:
    def output_bytes(arguments: dict[str, Any]) -> int:
        storage = option_of(planned(arguments)[0]).shards[0].storage
        assert storage is not None
        return storage.hbm

    # Two features' bags of all ranks' samples, at two bytes less a column.
    saved = output_bytes({}) - output_bytes({"output_dtype": DataType.FP16})
    assert saved == 2 * BATCH * 2 * DIM * 2


def test_min_partition_bounds_column_shards() -> None:
    planner = NeuroShardPlanner(
        cpu_topology(4, 3),  # MiB: 4.9 of table "t"
        BATCH,
        {"t": ParameterConstraints(min_partition=128)},
        FixedPercentageStorageReservation(percentage=0.0),
        cost_model=ANALYTIC,
        stats=[],
    )
    entry = plan_json(planner.plan(model(), bag_sharders()))[""]["t"]
    assert ROWS * DIM * 4 > 3 * MIB
    assert sorted(size[1] for _, size, _ in entry["shards"]) == [128, 128]


def kernels_worker(rank: int) -> dict[str, Any]:
    """Plans and shards with constraints that kernels see; what the kernels were made with."""
    constraints = {
        "t": ParameterConstraints(
            bounds_check_mode=BoundsCheckMode.FATAL, output_dtype=DataType.FP16, sharding_types=["table_wise"]
        ),
        "other": ParameterConstraints(
            bounds_check_mode=BoundsCheckMode.WARNING, stochastic_rounding=False, sharding_types=["table_wise"]
        ),
    }
    planner = NeuroShardPlanner(cpu_topology(1), BATCH, constraints, cost_model=ANALYTIC, stats=[])
    sharders = bag_sharders()
    plan = planner.collective_plan(model(), sharders, dist.GroupMember.WORLD)
    sharded = DistributedModelParallel(model(), device=torch.device("cpu"), plan=plan, sharders=sharders)
    return {
        config.embedding_tables[0].name: (
            kernel.emb_module.bounds_check_mode_int,
            kernel.emb_module.output_dtype,
            kernel.emb_module.stochastic_rounding,
        )
        for module in sharded.modules()
        if isinstance(module, ShardedEmbeddingBagCollection)
        for lookup in module._lookups  # a plain list: not among modules()
        for kernel in lookup.modules()
        if isinstance(kernel, BatchedFusedEmbeddingBag)
        for config in [kernel.config]
    }


def test_constraints_reach_the_kernels() -> None:
    (kernels,) = run_ranks(kernels_worker, 1)
    fp32, fp16 = SparseType.FP32.as_int(), SparseType.FP16.as_int()
    assert kernels == {
        "t": (BoundsCheckMode.FATAL.value, fp16, True),
        "other": (BoundsCheckMode.WARNING.value, fp32, False),
    }
