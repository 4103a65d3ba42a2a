"""Tables in host memory where device memory does not hold all: costs, the search's choice, plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_models import bag_collection, bag_config
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.storage import ShardStorage
from torchrec_neuroshard.costs.features import ShardWork
from torchrec_neuroshard.costs.hardware import HARDWARE
from torchrec_neuroshard.costs.host_memory import host_memory_ms
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.costs.simulator import PlanSimulator
from torchrec_neuroshard.problem import (
    FUSED,
    UVM,
    UVM_CACHING,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    TableOptions,
)

GIB = 2**30


def topology(hbm_gib: float, ddr_gib: float = 64.0, ranks: int = 2) -> Topology:
    return Topology(ranks, "cuda", local_world_size=ranks, hbm_cap=int(hbm_gib * GIB), ddr_cap=int(ddr_gib * GIB))


def planner(machines: Topology, **arguments: Any) -> NeuroShardPlanner:
    return NeuroShardPlanner(
        machines,
        512,
        cost_model="analytic/h100_sxm",
        hardware="h100_sxm",
        storage_reservation=FixedPercentageStorageReservation(0.0),
        **arguments,
    )


# 1 GiB each: four cold tables, and two hot ones.
MODEL = bag_collection(*(bag_config(f"t{index}", 4 * 2**20, 64) for index in range(6)))
POOLING = {f"t{index}": ParameterConstraints(pooling_factors=[1.0 if index < 4 else 40.0]) for index in range(6)}
SHARDERS: list[Any] = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD})]


def kernels_of(plan: Any) -> dict[str, str]:
    return {name: entry.compute_kernel for name, entry in plan.plan[""].items()}


def test_all_tables_stay_on_the_device_where_they_fit() -> None:
    plan = planner(topology(4.0), constraints=POOLING).plan(MODEL, SHARDERS)
    assert set(kernels_of(plan).values()) == {"fused"}


def test_cold_tables_go_to_host_memory_and_hot_ones_stay() -> None:
    kernels = ["fused", UVM_CACHING]
    constraints = {
        name: ParameterConstraints(compute_kernels=kernels, pooling_factors=given.pooling_factors)
        for name, given in POOLING.items()
    }
    made = planner(topology(2.2), constraints=constraints)
    plan = made.plan(MODEL, SHARDERS)
    cached = {name for name, kernel in kernels_of(plan).items() if kernel == UVM_CACHING}
    assert cached and not cached & {"t4", "t5"}
    entries = plan.plan[""]
    assert all(0 < entries[name].cache_params.load_factor < 1 for name in cached)  # type: ignore[index]
    report = made.report
    assert report is not None
    assert (report.memory_bytes <= report.cluster.capacity).all()
    assert any("host memory" in note and "'t0'" in note for note in report.notes)
    assert report.to_json()["tables"][sorted(cached)[0]]["cache_load_factor"] > 0


def test_what_fits_nowhere_is_told_with_the_numbers() -> None:
    with pytest.raises(PlannerError) as error:
        planner(topology(1.0, ddr_gib=1.5), constraints=POOLING).plan(MODEL, SHARDERS)
    assert error.value.error_type.name == "INSUFFICIENT_STORAGE"
    assert "GiB" in str(error.value)


def test_host_memory_that_holds_some_tables_gets_those() -> None:
    """6 GiB of tables in 4.4 GiB of device and 2 GiB of host memory, of which no rank's part holds them all."""
    made = planner(topology(2.2, ddr_gib=1.1), constraints=POOLING)
    kernels = kernels_of(made.plan(MODEL, SHARDERS))
    assert sorted(kernels.values()).count("fused") >= 4
    assert made.report is not None
    assert (made.report.memory_bytes <= made.report.cluster.capacity).all()


def test_a_key_value_store_is_the_last_resort() -> None:
    both = ["fused", "fused_uvm", "key_value"]
    constraints = {name: ParameterConstraints(compute_kernels=both) for name in POOLING}
    kernels = kernels_of(planner(topology(2.2), constraints=constraints).plan(MODEL, SHARDERS))
    assert set(kernels.values()) == {"fused", UVM}


def test_more_device_memory_never_costs_more() -> None:
    totals = []
    for hbm in (1.0, 1.6, 2.2, 2.8, 4.0):
        made = planner(topology(hbm), constraints=POOLING)
        made.plan(MODEL, SHARDERS)
        assert made.report is not None
        totals.append(made.report.cost.total_ms)
    assert all(after <= before * 1.001 for before, after in zip(totals, totals[1:])), totals


@pytest.mark.parametrize("kernel", [UVM, UVM_CACHING])
def test_a_kernel_that_a_constraint_names_reaches_the_plan(kernel: str) -> None:
    constraints = {
        "t0": ParameterConstraints(
            compute_kernels=[kernel], cache_params=CacheParams(load_factor=0.25) if kernel == UVM_CACHING else None
        )
    }
    plan = planner(topology(8.0), constraints=constraints).plan(MODEL, SHARDERS)
    entry = plan.plan[""]["t0"]  # type: ignore[index]
    assert entry.compute_kernel == kernel
    assert kernels_of(plan)["t1"] == "fused"
    if kernel == UVM_CACHING:
        assert entry.cache_params.load_factor == 0.25


def test_a_table_in_a_key_value_store_is_passed_through_and_said_so() -> None:
    constraints = {"t0": ParameterConstraints(compute_kernels=["key_value"])}
    made = planner(topology(8.0), constraints=constraints)
    kernels = kernels_of(made.plan(MODEL, SHARDERS))
    assert kernels.pop("t0") == "key_value"
    assert set(kernels.values()) == {"fused"}
    assert made.report is not None
    assert any("'t0' lies in a key-value store" in note for note in made.report.notes)


def test_a_group_costs_its_host_memory_on_top() -> None:
    """The simulator's group of two cached shards: the model's time, plus host_memory_ms of both together."""
    tables = tuple(entry.with_kernel(UVM_CACHING, 0.1).table for entry in collected()[:2])
    cluster = Cluster(2, 2, "cuda", torch.full((2, 2), 1e12).numpy().astype(float), hardware="h100_sxm")
    problem = ShardingProblem(
        tables, (TableOptions(("table_wise",), 64, (UVM_CACHING,)),) * 2, cluster, 512, lambda table, width: (0.0, 0.0)
    )
    model = CostModel.analytic("h100_sxm")
    placement = Placement((Shard(0, 0, 64, 0), Shard(1, 0, 64, 0)), ("table_wise", "table_wise"))
    cost = PlanSimulator(problem, model).cost(placement)
    fused = ShardingProblem(
        tuple(replace(table, kernel=FUSED, load_factor=0.0) for table in tables),
        (TableOptions(("table_wise",), 64),) * 2,
        cluster,
        512,
        problem.memory,
    )
    base = PlanSimulator(fused, model).cost(placement)
    works = [ShardWork.whole(table, problem.global_batch_size) for table in tables]
    forward, backward = host_memory_ms(HARDWARE["h100_sxm"], works, UVM_CACHING, 0.1)
    assert cost.forward_ms[0] == pytest.approx(base.forward_ms[0] + forward)
    assert cost.backward_ms[0] == pytest.approx(base.backward_ms[0] + backward)


def collected() -> Any:
    return collect_tables(MODEL, SHARDERS, POOLING, "cuda", 512)


def test_cache_slots_are_as_wide_as_the_widest_cached_table() -> None:
    """TorchRec charges a cached table its own width; FBGEMM's cache has slots of one width for the whole TBE."""
    model = bag_collection(bag_config("narrow", 10_000, 32), bag_config("wide", 10_000, 256))
    tables = collect_tables(model, SHARDERS, None, "cuda", 64)
    machines = topology(8.0)
    enumerator = planner(machines)._enumerator
    cluster = Cluster(2, 2, "cuda", torch.zeros(2, 2).numpy().astype(float))
    storage = ShardStorage(tables, enumerator, compat.sharder_maps(SHARDERS), 64, cluster)
    alone = storage.with_kernels(((UVM_CACHING, 0.2), ("fused", 0.0)))
    together = storage.with_kernels(((UVM_CACHING, 0.2), (UVM_CACHING, 0.2)))
    assert together(0, 32)[0] - alone(0, 32)[0] == 2_000 * (256 - 32) * 4
    assert together(0, 32)[1] == alone(0, 32)[1] >= 10_000 * 32 * 4
    assert storage(0, 32)[0] > 10_000 * 32 * 4


@pytest.mark.parametrize("kernel", [(UVM, 0.0), (UVM_CACHING, 0.2)])
def test_row_wise_state_counts_on_the_device_wherever_the_rows_lie(kernel: tuple[str, float]) -> None:
    """FBGEMM's construct_split_state keeps it there; element-wise state goes with the rows."""
    rows, dim = 10_000, 64
    bytes_of = {}
    for optimizer in (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.ADAM):
        sharders: list[Any] = [EmbeddingBagCollectionSharder(fused_params={"optimizer": optimizer})]
        tables = collect_tables(bag_collection(bag_config("t", rows, dim)), sharders, None, "cuda", 64)
        cluster = Cluster(2, 2, "cuda", torch.zeros(2, 2).numpy().astype(float))
        storage = ShardStorage(tables, planner(topology(8.0))._enumerator, compat.sharder_maps(sharders), 64, cluster)
        bytes_of[optimizer] = storage.with_kernels((kernel,))(0, dim)
    (hbm, ddr), row_wise, adam = bytes_of.values()
    assert row_wise == (hbm + rows * 4, ddr)
    assert adam == (hbm, ddr + rows * dim * 8)
