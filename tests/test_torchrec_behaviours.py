"""Behaviours that TorchRec's own planner tests check, on our planner; TORCHREC_BEHAVIOURS.md says which is which."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist
from planner_models import bag_collection, bag_config, bag_sharders, plan_json
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_tower_sharding import EmbeddingTowerSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import planners as torchrec_planners
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.planners import EmbeddingPlannerBase, EmbeddingShardingPlanner
from torchrec.distributed.planner.stats import EmbeddingStats, NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.test_utils.test_model import TestSparseNN as SparseModel  # not a test class to pytest
from torchrec.distributed.types import BoundsCheckMode, CacheAlgorithm, CacheParams, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError

MIB = 2**20
HERE = Path(__file__).parent
TABLE = HERE / "TORCHREC_BEHAVIOURS.md"


class FusedSharder(EmbeddingBagCollectionSharder):
    """Offers some sharding types with the fused kernel only, and maybe only some of the tables."""

    def __init__(self, types: list[str], tables: list[str] | None = None) -> None:
        super().__init__()
        self._types, self._tables = types, tables

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return self._types

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        found = super().shardable_parameters(module)
        return {name: weight for name, weight in found.items() if self._tables is None or name in self._tables}


TABLE_WISE_ONLY = FusedSharder(["table_wise"])
TABLE_OR_ROW_WISE = FusedSharder(["row_wise", "table_wise"])


def topology(world_size: int = 2, hbm: int = 2 * MIB, device: str = "cuda") -> Topology:
    return Topology(world_size=world_size, hbm_cap=hbm, compute_device=device, local_world_size=world_size)


def planner(**arguments: Any) -> NeuroShardPlanner:
    return NeuroShardPlanner(**{"topology": topology(), "hardware": "h200", **arguments})


def bag_configs(count: int, rows: int = 100, dim: int = 64, prefix: str = "") -> list[EmbeddingBagConfig]:
    return [bag_config(f"{prefix}table_{i}", rows, dim, [f"{prefix}feature_{i}"]) for i in range(count)]


def sparse_model(*args: Any, **kwargs: Any) -> SparseModel:
    return SparseModel(tables=bag_configs(*args, **kwargs), sparse_device=torch.device("meta"))


def test_each_table_lies_whole_on_a_rank_of_the_topology() -> None:
    plan = planner().plan(module=sparse_model(4), sharders=[TABLE_WISE_ONLY])
    entries = plan_json(plan)["sparse.ebc"]
    assert [entry["type"] for entry in entries.values()] == ["table_wise"] * 4
    assert sorted(rank for entry in entries.values() for rank in entry["ranks"]) == [0, 0, 1, 1]


def test_a_model_that_never_fits_is_insufficient_storage() -> None:
    ours = planner()
    with pytest.raises(PlannerError) as caught:
        ours.plan(module=sparse_model(2, 10_000_000, 10_000_000), sharders=[TABLE_OR_ROW_WISE])
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    assert ours._num_proposals == 0 and ours.report is None


def test_the_same_planner_plans_after_a_failure() -> None:
    ours = planner()
    with pytest.raises(PlannerError) as caught:
        ours.plan(module=sparse_model(1, 4096, 128), sharders=[TABLE_WISE_ONLY])
    # TorchRec says STRICT_CONSTRAINTS here, as the ranks together had the memory that the whole table needs on one.
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    plan = ours.plan(module=sparse_model(1, 4096, 128), sharders=[TABLE_OR_ROW_WISE])
    entry = plan_json(plan)["sparse.ebc"]["table_0"]
    assert (entry["type"], entry["ranks"]) == ("row_wise", [0, 1])


def test_without_sharders_the_plan_is_empty() -> None:
    ours = planner()
    assert ours.plan(module=sparse_model(4), sharders=[]) == ShardingPlan({})
    assert ours.get_selected_options() == []


def test_default_sharders_plan_what_constraints_ask_for() -> None:
    lfu = CacheParams(algorithm=CacheAlgorithm.LFU)
    small = CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.1, reserved_memory=1.0, precision=DataType.FP16)
    tables = bag_configs(4)
    constraints = {
        "table_0": ParameterConstraints(enforce_hbm=True, cache_params=lfu),
        "table_1": ParameterConstraints(enforce_hbm=False, stochastic_rounding=True),
        "table_2": ParameterConstraints(bounds_check_mode=BoundsCheckMode.FATAL),
        "table_3": ParameterConstraints(cache_params=small),
    }
    for table in tables:
        constraints[table.name].feature_names = table.feature_names
    ours = planner(constraints=constraints)
    plan = ours.plan(module=sparse_model(4), sharders=get_default_sharders())
    entries = plan.plan["sparse.ebc"]
    assert {
        name: (e.cache_params, e.enforce_hbm, e.stochastic_rounding, e.bounds_check_mode)
        for name, e in entries.items()  # type: ignore[attr-defined]
    } == {
        "table_0": (lfu, True, None, None),
        "table_1": (None, False, True, None),
        "table_2": (None, None, None, BoundsCheckMode.FATAL),
        "table_3": (small, None, None, None),
    }
    options = {option.name: option for option in ours._best_plan or []}
    assert set(options) == set(constraints)
    for table in tables:
        option, constraint = options[table.name], constraints[table.name]
        assert option.feature_names == table.feature_names
        assert option.is_weighted == constraint.is_weighted
        assert option.cache_params == constraint.cache_params


def test_the_context_hash_is_torchrecs() -> None:
    module = bag_collection(bag_config("table_0", 10_000, 160, ["f1"]))
    sharders = bag_sharders()
    here = topology(hbm=2**33)
    enumerator = EmbeddingEnumerator(topology=here, batch_size=128)
    enumerator.enumerate(module, sharders)
    reservation = HeuristicalStorageReservation(percentage=0.15)
    constraints = {"table_0": ParameterConstraints()}
    reservation.reserve(topology=here, batch_size=128, module=module, sharders=sharders, constraints=constraints)
    arguments: dict[str, Any] = {
        "topology": here,
        "batch_size": 128,
        "enumerator": enumerator,
        "storage_reservation": reservation,
        "constraints": constraints,
    }
    first, second = planner(**arguments), planner(**arguments)
    theirs = EmbeddingShardingPlanner(**arguments)
    assert first.hash_planner_context_inputs() == second.hash_planner_context_inputs()
    assert first.hash_planner_context_inputs() == theirs.hash_planner_context_inputs()
    other = planner(**{**arguments, "topology": topology(4, 2**33), "batch_size": 256})
    assert other.hash_planner_context_inputs() != first.hash_planner_context_inputs()
    # A plan leaves the inputs as they were.
    before = first.hash_planner_context_inputs()
    first.plan(module, sharders)
    assert first.hash_planner_context_inputs() == before


@pytest.mark.parametrize("argument", ["proposer", "partitioner", "performance_model"])
def test_components_that_the_search_replaces_are_refused_with_a_remedy(argument: str) -> None:
    with pytest.raises(UnsupportedArgumentError, match=f"{argument}= is not supported: .{{20,}}"):
        planner(**{argument: object()})


def test_virtual_tables_are_refused_by_name() -> None:
    config = EmbeddingConfig(
        name="t",
        num_embeddings=1_125_899_902_955_520,
        embedding_dim=64,
        feature_names=["f"],
        use_virtual_table=True,
        total_num_buckets=3_991_680,
    )
    model = SparseModel(tables=[config], sparse_device=torch.device("meta"))
    with pytest.raises(PlannerError, match="'sparse.ec.t'.*virtual"):
        planner().plan(module=model, sharders=[EmbeddingCollectionSharder()])


def test_towers_are_left_to_torchrecs_planner() -> None:
    tower = EmbeddingTower(bag_collection(*bag_configs(2)), nn.Linear(64, 4))
    module = nn.ModuleDict({"inner": tower})
    ours = planner()
    plan = ours.plan(module=module, sharders=[EmbeddingTowerSharder()])
    assert set(plan.plan["inner"]) == {"table_0", "table_1"}  # type: ignore[arg-type]
    options = ours.get_selected_options()
    assert len({option.dependency for option in options}) == 1  # TorchRec keeps the tables of a tower together


def test_what_torchrecs_planner_cannot_do_names_the_modules_left_to_it() -> None:
    """A table of one bucket on two ranks, which TorchRec 1.8 refuses to plan."""
    bags = bag_collection(*bag_configs(1))
    eviction = DistanceLFU_EvictionPolicy()
    collision = MCHManagedCollisionModule(100, torch.device("meta"), eviction, eviction_interval=2)
    module = ManagedCollisionEmbeddingBagCollection(
        bags, ManagedCollisionCollection({"table_0": collision}, bags.embedding_bag_configs())
    )
    if "uneven" not in inspect.getsource(EmbeddingEnumerator._get_num_buckets):
        pytest.skip("this TorchRec plans it")
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder()]
    with pytest.raises(PlannerError, match="TorchRec's planner.*inner.*ManagedCollision"):
        planner().plan(module=nn.ModuleDict({"inner": module}), sharders=sharders)


def test_plans_pass_torchrecs_validators() -> None:
    # Only one of two modules has tables that the sharder shards: the other must not be in the plan, nor be missed.
    model = SparseModel(
        tables=bag_configs(2),
        weighted_tables=bag_configs(2, dim=32, prefix="weighted_"),
        sparse_device=torch.device("meta"),
    )
    sharders = [FusedSharder(["table_wise"], ["table_0", "table_1"])]
    ours = planner()
    plan = ours.plan(module=model, sharders=sharders)
    assert set(plan.plan) == {"sparse.ebc"}
    arguments: dict[str, tuple[Any, ...]] = {
        "validate_modules_inclusion_in_sharding_plan": (plan, model, sharders),
        "validate_rank_assignment": (plan, ours._topology),
        "validate_compute_kernels": (ours.get_selected_options(),),
    }
    known = [name for name in dir(torchrec_planners) if name.startswith("validate_")]
    assert "validate_rank_assignment" in known and set(known) <= set(arguments)
    for name in known:
        getattr(torchrec_planners, name)(*arguments[name])


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process: TorchRec's message about a wrong rank asks for its size."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def without_item(options: list[ShardingOption]) -> list[ShardingOption]:
    return [option for option in options if option.path != "item"]


def on_rank_seven(options: list[ShardingOption]) -> list[ShardingOption]:
    options[0].shards[0].rank = 7
    return options


def with_unknown_kernel(options: list[ShardingOption]) -> list[ShardingOption]:
    options[0].compute_kernel = "none_such"
    return options


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("spoil", "kind"),
    [
        (without_item, "MISSING_MODULE_IN_PLAN"),
        (on_rank_seven, "INVALID_RANK_ASSIGNMENT"),
        (with_unknown_kernel, "INVALID_COMPUTE_KERNEL"),
    ],
)
def test_a_callback_that_spoils_the_plan_is_caught_by_torchrecs_validators(spoil: Any, kind: str) -> None:
    if not hasattr(PlannerErrorType, kind):
        pytest.skip(f"this TorchRec has no {kind}")
    model = nn.ModuleDict({"user": bag_collection(*bag_configs(2)), "item": bag_collection(*bag_configs(1))})
    with pytest.raises(PlannerError) as caught:
        planner(callbacks=[spoil]).plan(module=model, sharders=[TABLE_WISE_ONLY])
    assert caught.value.error_type is PlannerErrorType[kind]


def test_stats_are_torchrecs_or_none() -> None:
    ours = planner()
    ours.plan(module=sparse_model(4), sharders=[TABLE_OR_ROW_WISE])
    (stats,) = ours._stats
    assert isinstance(stats, EmbeddingStats)
    assert stats._stats_table[0].startswith("####")
    (usage,) = (row for row in stats._stats_table if "Top HBM Memory Usage Estimation:" in row)
    assert float(re.search(r"Estimation: ([\d.]+) GB", usage).group(1)) >= 0  # type: ignore[union-attr]
    for given, count in (([], 0), (NoopEmbeddingStats(), 1)):
        quiet = planner(stats=given)
        quiet.plan(module=sparse_model(4), sharders=[TABLE_OR_ROW_WISE])
        assert len(quiet._stats) == count


def test_a_table_without_any_option_is_named() -> None:
    limits = {"table_1": ParameterConstraints(sharding_types=["table_row_wise"], compute_kernels=["fused_uvm_caching"])}
    with pytest.raises(PlannerError, match=r"'sparse.ebc.table_1'.*no sharding type.*table_row_wise") as caught:
        planner(constraints=limits).plan(module=sparse_model(4), sharders=[FusedSharder(["column_wise"])])
    assert caught.value.error_type is PlannerErrorType.STRICT_CONSTRAINTS


def test_a_reservation_that_takes_all_memory_is_insufficient_storage() -> None:
    with pytest.raises(PlannerError) as caught:
        planner(storage_reservation=HeuristicalStorageReservation(percentage=1)).plan(
            module=sparse_model(1, 1_000_000, 1024), sharders=bag_sharders()
        )
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_the_dense_estimate_of_the_reservation_leaves_less_for_tables() -> None:
    def capacity(**arguments: Any) -> float:
        ours = planner(
            topology=topology(hbm=2**30),
            storage_reservation=HeuristicalStorageReservation(percentage=0.0, **arguments),
            batch_size=10,
        )
        ours.plan(module=sparse_model(1), sharders=bag_sharders())
        assert ours.report is not None
        return float(ours.report.cluster.capacity[0, 0])

    assert capacity(dense_tensor_estimate=1_000_000) - capacity(dense_tensor_estimate=3_000_000) == 2_000_000


def test_every_argument_and_method_of_torchrecs_planner_is_taken() -> None:
    theirs, ours = (set(inspect.signature(kind).parameters) for kind in (EmbeddingShardingPlanner, NeuroShardPlanner))
    assert theirs <= ours
    assert issubclass(NeuroShardPlanner, EmbeddingPlannerBase)
    for name in ("plan", "collective_plan"):
        assert list(inspect.signature(getattr(EmbeddingShardingPlanner, name)).parameters) == list(
            inspect.signature(getattr(NeuroShardPlanner, name)).parameters
        )


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((HERE / file).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_the_table_names_tests_that_exist() -> None:
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| test_")]
    assert len(rows) > 60
    named = 0
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 3 and all(cells), row
        for file, name in re.findall(r"`(test_\w+\.py)::(test_\w+)`", cells[2]):
            assert name in names_in(file), row
            named += 1
    assert named > 25
