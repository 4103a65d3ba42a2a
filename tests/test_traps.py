"""Where TorchRec's planner surprises its users, and ours must not; other traps have their tests beside what they check.

Features in the default pooling factor, optimizers of fused params, the hash seed: ``test_planner.py``. Row blocks as
the run time cuts them: ``test_row_wise.py`` and, trained, ``test_parity.py``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from parity import AllTypesSharder
from planner_models import ANALYTIC, MIB, bag_collection, bag_config, bag_sharders, cpu_topology, plan_json
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    StorageReservation,
    Topology,
)

from torchrec_neuroshard import NeuroShardPlanner
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.storage import ShardStorage
from torchrec_neuroshard.problem import DATA_PARALLEL, ROW_WISE, Cluster, Spread


def planner(**arguments: Any) -> NeuroShardPlanner:
    defaults: dict[str, Any] = {"topology": cpu_topology(4), "batch_size": 64, "cost_model": ANALYTIC, "stats": []}
    return NeuroShardPlanner(**{**defaults, **arguments})


def test_tables_that_nobody_looks_up_are_spread_all_the_same() -> None:
    configs = [bag_config(f"t{i}", 10_000, 64) for i in range(12)]
    never = {config.name: ParameterConstraints(pooling_factors=[0.0]) for config in configs}
    plan = plan_json(planner(constraints=never).plan(bag_collection(*configs), bag_sharders()))[""]
    columns = Counter[int]()
    for entry in plan.values():
        for rank, (_, size, _) in zip(entry["ranks"], entry["shards"]):
            columns[rank] += size[1]
    assert sum(columns.values()) == 12 * 64
    assert max(columns.values()) <= 12 * 64 / 4 * 1.5  # with TorchRec one rank gets all


@pytest.mark.parametrize("kind", [FixedPercentageStorageReservation, HeuristicalStorageReservation])
def test_a_cpus_reservation_takes_ddr(kind: type[StorageReservation]) -> None:
    def capacity(percentage: float) -> float:
        ours = planner(topology=cpu_topology(2, 100), storage_reservation=kind(percentage=percentage))  # type: ignore[call-arg]
        ours.plan(bag_collection(bag_config("t", 1000, 64)), bag_sharders())
        assert ours.report is not None
        return float(ours.report.cluster.capacity[0, 1])

    assert capacity(0.0) - capacity(0.25) == 25 * MIB
    assert capacity(0.0) <= 100 * MIB


class OneMiB(StorageReservation):
    """A user's own reservation, which has no percentage."""

    def reserve(self, topology: Topology, *args: Any, **kwargs: Any) -> Topology:
        for device in topology.devices:
            device.storage.ddr -= MIB
        self._last_reserved_topology = topology
        return topology

    @property
    def last_reserved_topology(self) -> Topology | None:
        return getattr(self, "_last_reserved_topology", None)


def test_a_reservation_without_a_percentage_plans_and_fails_as_any_other() -> None:
    model = bag_collection(bag_config("t", 100_000, 64))  # 24 MiB
    ours = planner(topology=cpu_topology(2, 64), storage_reservation=OneMiB(), stats=None)
    assert set(ours.plan(model, bag_sharders()).plan) == {""}
    assert ours.report is not None
    assert (ours.report.cluster.capacity[:, 1] == 63 * MIB).all()
    # TorchRec (up to 1.8) raises AttributeError here.
    with pytest.raises(PlannerError) as caught:
        planner(topology=cpu_topology(2, 8), storage_reservation=OneMiB(), stats=None).plan(model, bag_sharders())
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_storage_of_tables_on_all_ranks_is_torchrecs_and_the_state_it_overlooks(device: str) -> None:
    rows, dim, ranks = 10_001, 64, 4
    model = bag_collection(bag_config("t", rows, dim, ["a", "b"]))
    types = [ROW_WISE, DATA_PARALLEL]
    constraints = {
        "t": ParameterConstraints(sharding_types=types, compute_kernels=["fused", "dense"], pooling_factors=[3.0, 4.0])
    }
    topology = Topology(world_size=ranks, compute_device=device, local_world_size=ranks)

    def storage(fused_params: dict[str, Any] | None) -> ShardStorage:
        sharders: list[Any] = [AllTypesSharder(fused_params=fused_params)]
        tables = collect_tables(model, sharders, constraints, device, 64)
        enumerator = EmbeddingEnumerator(topology, 64, constraints)
        cluster = Cluster(ranks, ranks, device, np.full((ranks, 2), np.inf))
        return ShardStorage(tables, enumerator, compat.sharder_maps(sharders), 64, cluster)

    plain, adam = storage(None), storage({"optimizer": EmbOptimType.ADAM})
    theirs = EmbeddingEnumerator(topology, 64, constraints).enumerate(model, [AllTypesSharder()])
    assert {option.sharding_type for option in theirs} == set(types)
    where = 1 if device == "cpu" else 0
    for option in theirs:
        ours = plain.spread(0, Spread(option.sharding_type))
        assert ours.tolist() == [[shard.storage.hbm, shard.storage.ddr] for shard in option.shards]  # type: ignore[union-attr]
        overlooked = (adam.spread(0, Spread(option.sharding_type)) - ours)[:, where].tolist()
        if option.sharding_type == ROW_WISE:  # two states for each weight of the rank's block
            assert overlooked == [2 * 4 * dim * shard.size[0] for shard in option.shards]
        else:  # the replicas' optimizer is not the fused one
            assert overlooked == [0.0] * ranks


def test_row_blocks_of_a_plan_are_the_run_times() -> None:
    rows, ranks = 91, 4
    only_rows = {"t": ParameterConstraints(sharding_types=[ROW_WISE])}
    plan = planner(constraints=only_rows).plan(bag_collection(bag_config("t", rows, 64)), [AllTypesSharder()])
    entry = plan_json(plan)[""]["t"]
    block = -(-rows // ranks)  # by which TorchRec's input dist bucketizes ids, whatever the plan says
    assert entry["ranks"] == [0, 1, 2, 3]
    assert [(offset, size) for offset, size, _ in entry["shards"]] == [
        ([rank * block, 0], [min(block, rows - rank * block), 64]) for rank in range(ranks)
    ]


def test_a_plan_says_when_load_state_dict_will_not_take_its_shards() -> None:
    def notes(ranks: int) -> tuple[set[int], list[str]]:
        none = FixedPercentageStorageReservation(percentage=0.0)
        limits = {"t": ParameterConstraints(sharding_types=["column_wise"])}
        ours = planner(topology=cpu_topology(ranks, 1), storage_reservation=none, constraints=limits)
        plan = ours.plan(bag_collection(bag_config("t", 10_000, 64)), bag_sharders())  # 2.4 MiB, on ranks of 1
        assert ours.report is not None
        widths = {size[1] for _, size, _ in plan_json(plan)[""]["t"]["shards"]}
        return widths, [note for note in ours.report.notes if "load_state_dict" in note]

    widths, found = notes(3)  # 64 columns do not divide by three
    assert len(widths) > 1 and len(found) == 1 and "1 table(s) differ in width (t)" in found[0]
    widths, found = notes(4)
    assert (len(widths) > 1) == bool(found)
