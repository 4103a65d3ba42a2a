from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from planner_models import (
    ANALYTIC,
    MIB,
    TwoCollections,
    bag_collection,
    bag_config,
    bag_sharders,
    cpu_topology,
    plan_json,
)
from torch import nn
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
    ShardingOption,
    Topology,
)
from torchrec.modules.embedding_configs import DataType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from torchrec_neuroshard import NeuroShardPlanner, TableStats
from torchrec_neuroshard.access import AccessDistribution
from torchrec_neuroshard.adapters import compat
from torchrec_neuroshard.adapters.module_tables import collect_tables
from torchrec_neuroshard.adapters.sharding_plan import one_shard_per_rank
from torchrec_neuroshard.adapters.storage import ShardStorage
from torchrec_neuroshard.adapters.topology import DetectedMachine
from torchrec_neuroshard.placement_check import check_placement
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    TABLE_WISE,
    Cluster,
    Placement,
    Shard,
    ShardingProblem,
    Table,
    TableOptions,
)
from torchrec_neuroshard.search import SearchConfig

NO_RESERVATION = FixedPercentageStorageReservation(percentage=0.0)


def planner(world_size: int = 2, ddr_mib: int = 4096, **arguments: Any) -> NeuroShardPlanner:
    defaults: dict[str, Any] = {
        "topology": cpu_topology(world_size, ddr_mib),
        "batch_size": 64,
        "cost_model": ANALYTIC,
        "storage_reservation": NO_RESERVATION,
        "stats": [],
    }
    return NeuroShardPlanner(**{**defaults, **arguments})


def widths(plan: dict[str, Any]) -> list[int]:
    return [size[1] for _, size, _ in plan["shards"]]


def test_plans_all_tables_of_all_modules_together() -> None:
    ours = planner()
    plan = plan_json(ours.plan(TwoCollections(), bag_sharders()))
    assert {path: set(tables) for path, tables in plan.items()} == {"sparse.user": {"a", "b"}, "item": {"a", "c"}}
    ranks = {rank for tables in plan.values() for entry in tables.values() for rank in entry["ranks"]}
    assert ranks == {0, 1}
    for path, tables in plan.items():
        for entry in tables.values():
            assert entry["kernel"] == "fused"
            assert [placement for _, _, placement in entry["shards"]] == [f"rank:{r}/cpu" for r in entry["ranks"]]
        assert path in ("sparse.user", "item")
    assert ours.report is not None
    assert set(ours.report.tables_json()) == {"sparse.user.a", "b", "item.a", "c"}


def test_report_is_consistent_with_the_plan() -> None:
    ours = planner(table_stats=TableStats({"b": 7.0, "c": 30.0}))
    plan = plan_json(ours.plan(TwoCollections(), bag_sharders()))
    assert ours.report is not None
    record = json.loads(json.dumps(ours.report.to_json()))
    assert record["tables"]["c"]["shards"] == [
        {"rank": rank, "offset": offset, "size": size}
        for rank, (offset, size, _) in zip(plan["item"]["c"]["ranks"], plan["item"]["c"]["shards"])
    ]
    assert record["cost_model"]["name"] == ANALYTIC and record["cost_model"]["provenance"] == "analytic"
    assert record["pipeline"] == "sparse_dist" and record["world_size"] == 2
    assert len(record["predicted_ms"]["per_rank"]) == 2
    slowest = max(rank["forward"] + rank["backward"] for rank in record["predicted_ms"]["per_rank"])
    assert 0 < slowest <= record["predicted_ms"]["total"]
    weights = (2000 * 64 + 500 * 32 + 3000 * 64 + 800 * 128) * 4
    assert sum(rank["ddr"] for rank in record["memory_bytes_per_rank"]) > weights
    text = str(ours.report)
    assert "4 tables" in text and "sparse_dist" in text and ANALYTIC in text


def plan_for_hash_seed_test() -> dict[str, Any]:
    limits = {"c": ParameterConstraints(sharding_types=["column_wise", "table_wise"], min_partition=32)}
    ours = NeuroShardPlanner(cpu_topology(4), 64, limits, cost_model=ANALYTIC, stats=[])
    return json.loads(json.dumps(plan_json(ours.plan(TwoCollections(), bag_sharders()))))


def test_two_runs_and_another_hash_seed_give_the_same_plan() -> None:
    script = (
        "import json, sys; sys.path.insert(0, sys.argv[1])\n"
        "from test_planner import plan_for_hash_seed_test\n"
        "print(json.dumps(plan_for_hash_seed_test()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, str(Path(__file__).parent)],
        env={**os.environ, "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    here = plan_for_hash_seed_test()
    assert json.loads(done.stdout.strip().splitlines()[-1]) == here == plan_for_hash_seed_test()
    assert set(here) == {"sparse.user", "item"}


def test_constraints_are_honoured() -> None:
    model = bag_collection(*(bag_config(f"t{i}", 20_000, 128) for i in range(3)))
    constraints = {
        "t0": ParameterConstraints(sharding_types=["table_wise"], pooling_factors=[50.0]),
        "t1": ParameterConstraints(sharding_types=["column_wise"], min_partition=64, pooling_factors=[50.0]),
        "t2": ParameterConstraints(compute_kernels=["fused"], min_partition=40, pooling_factors=[50.0]),
    }
    ours = planner(4, constraints=constraints, column_split="any")
    plan = plan_json(ours.plan(model, bag_sharders()))[""]
    assert plan["t0"]["type"] == "table_wise" and widths(plan["t0"]) == [128]
    assert plan["t1"]["type"] == "column_wise" and min(widths(plan["t1"])) >= 64
    assert min(widths(plan["t2"])) >= 40
    assert all(table.pooling_factor == 50.0 for table in ours.report.tables)  # type: ignore[union-attr]


def test_a_hot_table_is_split_and_never_means_never() -> None:
    model = bag_collection(bag_config("hot", 200_000, 256))
    stats = TableStats({"hot": 20.0}, {"hot": AccessDistribution.zipf(200_000, 0.3)})
    split = plan_json(planner(4, table_stats=stats).plan(model, bag_sharders()))[""]["hot"]
    assert split["type"] == "column_wise" and len(split["ranks"]) > 1 and sum(widths(split)) == 256
    assert [offset[1] for offset, _, _ in split["shards"]] == np.cumsum([0, *widths(split)])[:-1].tolist()
    whole = plan_json(planner(4, table_stats=stats, column_split="never").plan(model, bag_sharders()))[""]["hot"]
    assert widths(whole) == [256]


def test_rowwise_optimizers_keep_torchrecs_width_unless_nothing_else_fits(caplog: pytest.LogCaptureFixture) -> None:
    model = bag_collection(bag_config("t", 100_000, 128))  # 48.8 MiB
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    stats = TableStats({"t": 20.0})
    roomy = planner(4, table_stats=stats)
    assert widths(plan_json(roomy.plan(model, bag_sharders()))[""]["t"]) == [128]
    tight = planner(4, ddr_mib=40, table_stats=stats)
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard"):
        plan = plan_json(tight.plan(model, bag_sharders()))[""]["t"]
        tight.plan(model, bag_sharders())
    assert len(plan["ranks"]) > 1 and sum(widths(plan)) == 128
    assert tight.report is not None
    assert any("narrower" in note for note in tight.report.notes)
    assert any("numerics" in note for note in tight.report.notes)
    assert sum("numerics" in record.getMessage() for record in caplog.records) == 1  # once per planner
    assert (tight.report.memory_bytes[:, 1] <= 40 * MIB).all()


def test_plans_beyond_what_the_model_was_trained_on_are_warned_of() -> None:
    model = bag_collection(bag_config("t", 20_000, 64))
    apply_optimizer_in_backward(torch.optim.Adam, model.parameters(), {"lr": 0.1})
    ours = planner(2, table_stats=TableStats({"t": 5.0}), cost_model="cpu")
    ours.plan(model, bag_sharders())
    (note,) = [note for note in ours.report.notes if "a guess" in note]  # type: ignore[union-attr]
    assert "optimizer adam" in note and "1 of the tables" in note
    plain = planner(2, table_stats=TableStats({"t": 5.0}), cost_model="cpu")
    plain.plan(bag_collection(bag_config("t", 20_000, 64)), bag_sharders())
    assert not any("a guess" in note for note in plain.report.notes)  # type: ignore[union-attr]


def test_report_says_what_narrower_splits_would_save() -> None:
    config = bag_config("hot", 200_000, 128)
    stats = TableStats({"hot": 20.0}, {"hot": AccessDistribution.zipf(200_000, 0.0)})
    model = bag_collection(config)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    auto = planner(4, table_stats=stats)
    assert widths(plan_json(auto.plan(model, bag_sharders()))[""]["hot"]) == [128]
    (note,) = [note for note in auto.report.notes if "would save" in note]  # type: ignore[union-attr]
    least = int(re.search(r"at least (\d+)%", note).group(1)) / 100  # type: ignore[union-attr]
    anyhow = planner(4, table_stats=stats, column_split="any")
    anyhow.plan(model, bag_sharders())
    saved = 1 - anyhow.report.cost.total_ms / auto.report.cost.total_ms  # type: ignore[union-attr]
    assert 0.02 <= least <= saved + 0.01
    assert not any("would save" in note for note in anyhow.report.notes)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("world_size", "ddr_mib", "words"),
    [(2, 300, ["tables together"]), (4, 80, ["'huge'"])],
)
def test_what_cannot_fit_is_an_insufficient_storage_error_with_numbers(
    world_size: int, ddr_mib: int, words: list[str]
) -> None:
    names = ("huge", "vast", "great") if world_size == 2 else ("huge",)
    model = bag_collection(*(bag_config(name, 1_000_000, 64) for name in names))  # 244 MiB each
    with pytest.raises(PlannerError) as caught:
        planner(world_size, ddr_mib, column_split="never").plan(model, bag_sharders())
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    for word in [*words, "GiB", "available", "Reduce the local batch size (64)"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("module", "constraints", "words"),
    [
        (
            bag_collection(bag_config("t", 100, 64)),
            {"t": ParameterConstraints(sharding_types=["row_wise"])},
            ["'t'", "row_wise", "Relax"],  # the CPU sharder does not offer it at all
        ),
        (
            bag_collection(bag_config("t", 100, 64)),
            {"t": ParameterConstraints(device_group="cuda")},
            ["'t'", "device_group"],
        ),
        (bag_collection(bag_config("t", 100, 30)), None, ["'t'", "multiple of 4"]),
    ],
)
def test_what_is_not_supported_names_the_table_and_the_remedy(
    module: nn.Module, constraints: dict[str, ParameterConstraints] | None, words: list[str]
) -> None:
    with pytest.raises(PlannerError) as caught:
        planner(constraints=constraints).plan(nn.ModuleDict({"inner": module}))
    for word in words:
        assert word.replace("'t'", "'inner.t'") in str(caught.value)


def test_half_precision_is_planned_and_other_types_are_refused() -> None:
    config = bag_config("t", 100, 64)
    config.data_type = DataType.FP16
    ours = planner()
    ours.plan(bag_collection(config), bag_sharders())
    assert ours.report is not None and ours.report.tables[0].data_type == "fp16"
    with pytest.raises(PlannerError, match="'t'.*bfloat16"):
        planner().plan(bag_collection(config).to(torch.bfloat16), bag_sharders())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"proposer": GreedyProposer()}, ["proposer", "search="]),
        ({"partitioner": GreedyPerfPartitioner()}, ["partitioner", "drop"]),
        ({"column_split": "sometimes"}, ["column_split", "'auto'"]),
        ({"pipeline": "fast"}, ["pipeline", "'sparse_dist'"]),
        ({"batch_size": 0}, ["batch_size"]),
        ({"timeout_seconds": 0}, ["timeout_seconds"]),
    ],
)
def test_arguments_that_cannot_be_honoured_are_errors(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        planner(**arguments)
    assert isinstance(caught.value, PlannerError)
    for word in words:
        assert word in str(caught.value)


def test_missing_statistics_and_batch_size_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    ours = planner(batch_size=None)
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.planner"):
        ours.plan(TwoCollections(), bag_sharders())
        ours.plan(TwoCollections(), bag_sharders())
    messages = [record.getMessage() for record in caplog.records if record.name == "torchrec_neuroshard.planner"]
    assert len(messages) == 2
    assert "512" in messages[0] and "TableStats.from_batches" in messages[1]
    assert ours.report is not None and ours.report.batch_size == 512
    caplog.clear()
    with caplog.at_level(logging.WARNING, "torchrec_neuroshard.planner"):
        planner(table_stats=TableStats({"a": 2.0})).plan(TwoCollections(), bag_sharders())
    assert not [record for record in caplog.records if record.name == "torchrec_neuroshard.planner"]


def test_a_model_without_tables_has_an_empty_plan() -> None:
    ours = planner()
    assert ours.plan(nn.Linear(2, 2), bag_sharders()).plan == {}
    assert ours.report is None


def test_callbacks_and_torchrecs_stats_see_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[list[ShardingOption]] = []

    def swap_ranks(options: list[ShardingOption]) -> list[ShardingOption]:
        seen.append(options)
        for option in options:
            for shard in option.shards:
                shard.rank = 1 - shard.rank  # type: ignore[operator]
        return options

    before = plan_json(planner().plan(TwoCollections(), bag_sharders()))
    ours = planner(stats=None, callbacks=[swap_ranks])
    with caplog.at_level(logging.INFO, "torchrec.distributed.planner.stats"):
        after = plan_json(ours.plan(TwoCollections(), bag_sharders()))
    assert len(seen) == 1 and all(shard.perf and shard.storage for option in seen[0] for shard in option.shards)
    assert after["item"]["c"]["ranks"] == [1 - rank for rank in before["item"]["c"]["ranks"]]
    printed = caplog.text
    assert "Planner Statistics" in printed and "sparse.user.b" in printed
    assert ours._best_plan is seen[0] and ours._num_plans == 1


def test_pooling_factors_and_features() -> None:
    constraints = {
        "two": ParameterConstraints(pooling_factors=[3.0, 4.0]),
        "scaled": ParameterConstraints(pooling_factors=[3.0], num_poolings=[2.0], batch_sizes=[32]),
    }
    model = bag_collection(
        bag_config("default", 100, 16, ["a", "b", "c"]),
        bag_config("two", 100, 16, ["d", "e"]),
        bag_config("scaled", 100, 16, ["f"]),
        weighted=True,
    )
    tables = {t.name: t for t in collect_tables(model, bag_sharders(), constraints, "cpu", 64)}
    assert tables["default"].table.pooling_factor == 3.0 and tables["default"].table.num_features == 3
    assert tables["two"].table.pooling_factor == 7.0 and tables["two"].input_lengths == (3.0, 4.0)
    assert tables["scaled"].table.pooling_factor == 3.0 * 2.0 * 32 / 64
    assert tables["two"].table.weighted
    measured = TableStats({"two": 10.0, "scaled": 6.0})
    tables = {t.name: t for t in collect_tables(model, bag_sharders(), constraints, "cpu", 64, measured)}
    assert tables["two"].table.pooling_factor == 10.0 and tables["two"].input_lengths == (5.0, 5.0)
    assert tables["scaled"].table.pooling_factor == 6.0
    assert sum(tables["scaled"].input_lengths) * 2.0 * 32 / 64 == pytest.approx(6.0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("optimizer", [None, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_storage_equals_torchrecs_for_even_shards(device: str, optimizer: type[torch.optim.Optimizer] | None) -> None:
    model = bag_collection(bag_config("t", 12_345, 256, ["a"]), bag_config("u", 777, 64, ["b"]))
    if optimizer is not None:
        apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
    constraints = {
        name: ParameterConstraints(
            sharding_types=["table_wise", "column_wise"],
            compute_kernels=["fused"],
            min_partition=32,
            pooling_factors=[7.0],
        )
        for name in "tu"
    }
    topology = Topology(world_size=4, compute_device=device, local_world_size=4)
    enumerator = EmbeddingEnumerator(topology, 64, constraints)
    theirs = enumerator.enumerate(model, bag_sharders())
    tables = collect_tables(model, bag_sharders(), constraints, device, 64)
    ours = ShardStorage(
        tables,
        EmbeddingEnumerator(topology, 64, constraints),
        compat.sharder_maps(bag_sharders()),
        64,
        ranks(4, device),
    )
    compared = 0
    for option in theirs:
        for shard in option.shards:
            index = [table.name for table in tables].index(option.name)
            assert shard.storage is not None
            assert ours(index, shard.size[1]) == (shard.storage.hbm, shard.storage.ddr)
            compared += 1
    assert compared == 1 + 8 + 1 + 2


def ranks(count: int, device: str) -> Cluster:
    """One host without any memory to speak of."""
    return Cluster(count, count, device, np.zeros((count, 2)))


def test_storage_counts_state_that_torchrec_overlooks() -> None:
    topology = Topology(world_size=2, compute_device="cuda")
    rows, dim = 10_000, 128

    def bytes_of(sharders: list[Any], width: int, optimizer: type[torch.optim.Optimizer] | None = None) -> float:
        model = bag_collection(bag_config("t", rows, dim))
        if optimizer is not None:
            apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": 0.1})
        tables = collect_tables(model, sharders, None, "cuda", 64)
        enumerator = EmbeddingEnumerator(topology, 64)
        return ShardStorage(tables, enumerator, compat.sharder_maps(sharders), 64, ranks(2, "cuda"))(0, width)[0]

    plain = bytes_of(bag_sharders(), 32)
    adam = bytes_of(bag_sharders({"optimizer": EmbOptimType.ADAM}), 32)
    assert adam - plain == 2 * rows * 32 * 4
    assert adam == bytes_of(bag_sharders(), 32, torch.optim.Adam)
    for rowwise in (
        bytes_of(bag_sharders({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}), 32),
        bytes_of(bag_sharders(), 32, RowWiseAdagrad),
    ):
        assert rowwise - plain == rows * 4  # each shard keeps one momentum per row


def test_the_users_storage_estimator_and_reservation_count() -> None:
    topology = cpu_topology(2, ddr_mib=100)
    model = bag_collection(bag_config("t", 100_000, 64))

    class Doubled(EmbeddingStorageEstimator):
        def estimate(self, sharding_options: Any, *args: Any, **kwargs: Any) -> None:
            super().estimate(sharding_options, *args, **kwargs)
            for option in sharding_options:
                for shard in option.shards:
                    shard.storage.ddr *= 2

    usual = planner(topology=topology)
    usual.plan(model, bag_sharders())
    doubled = planner(topology=topology, enumerator=EmbeddingEnumerator(topology, 64, estimator=[Doubled(topology)]))
    doubled.plan(model, bag_sharders())
    assert usual.report is not None and doubled.report is not None
    assert doubled.report.memory_bytes.sum() == pytest.approx(2 * usual.report.memory_bytes.sum())

    class Half(FixedPercentageStorageReservation):
        def reserve(self, topology: Topology, *args: Any, **kwargs: Any) -> Topology:
            for device in topology.devices:  # in place: the planner must hand over a copy
                device.storage.ddr //= 2
            return topology

    halved = planner(topology=topology, storage_reservation=Half(0.0))
    halved.plan(model, bag_sharders())
    assert halved.report is not None
    assert (halved.report.cluster.capacity[:, 1] == 50 * MIB).all()
    assert all(device.storage.ddr == 100 * MIB for device in topology.devices)


def test_topology_is_detected_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    ours = planner(topology=None, hardware="generic_cpu")
    topology = ours._topology
    assert (topology.world_size, topology.local_world_size) == (6, 3)
    ours.plan(TwoCollections(), bag_sharders())
    assert ours.report is not None
    assert any("Topology detected: 6 rank(s), 3 per host" in note for note in ours.report.notes)


def test_detected_memory_is_the_smallest_over_ranks() -> None:
    ranks = [
        DetectedMachine(2, 2, "cuda", hbm, ddr, "h200") for hbm, ddr in ((80 * MIB, 30 * MIB), (40 * MIB, 60 * MIB))
    ]
    for machine in ranks:
        storage = machine.smallest(ranks).topology().devices[1].storage
        assert (storage.hbm, storage.ddr) == (40 * MIB, 30 * MIB)


def test_the_hardware_and_the_users_links_reach_the_search() -> None:
    topology = Topology(world_size=2, compute_device="cuda", hbm_cap=2**30, intra_host_bw=50e6)
    ours = planner(topology=topology, hardware="h200", cost_model="auto")
    ours.plan(TwoCollections(), bag_sharders())
    assert ours.report is not None
    assert ours.report.cluster.hardware == "h200" and ours.report.cluster.intra_host_gbps == pytest.approx(50.0)


def test_search_settings_pass_through() -> None:
    config = SearchConfig(levels=0, refine=False)
    ours = planner(search=config, timeout_seconds=30)
    assert ours._search == SearchConfig(levels=0, refine=False, timeout_seconds=30.0)
    ours.plan(TwoCollections(), bag_sharders())
    assert ours.report is not None
    assert not any("refined" in record["step"] for record in ours.report.search_log)


def test_shards_of_a_table_on_one_rank_are_joined() -> None:
    tables = (Table("a", 100, 96), Table("b", 100, 64), Table("c", 100, 32))
    options = (TableOptions((TABLE_WISE, COLUMN_WISE), 16),) * 3
    cluster = Cluster(2, 2, "cpu", np.full((2, 2), np.inf))
    problem = ShardingProblem(tables, options, cluster, 8, lambda table, width: (0.0, 100.0 * width))
    split = Placement(
        (Shard(0, 0, 16, 1), Shard(0, 16, 48, 0), Shard(0, 64, 32, 1), Shard(1, 0, 32, 0), Shard(1, 32, 32, 0))
        + (Shard(2, 0, 32, 1),),
        (COLUMN_WISE,) * 3,
    )
    joined = one_shard_per_rank(problem, split)
    assert joined.shards == (Shard(0, 0, 48, 1), Shard(0, 48, 48, 0), Shard(1, 0, 64, 0), Shard(2, 0, 32, 1))
    assert joined.sharding_types == (COLUMN_WISE,) * 3 and check_placement(problem, joined) == []
    assert one_shard_per_rank(problem, joined) is joined
    whole = Placement((Shard(0, 0, 48, 1), Shard(0, 48, 48, 1), *joined.shards[2:]), (COLUMN_WISE,) * 3)
    assert one_shard_per_rank(problem, whole).sharding_types == (TABLE_WISE,) * 3


def test_collective_plan_without_a_process_group_says_so() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        planner().collective_plan(TwoCollections())


@pytest.mark.parametrize(
    ("numbers", "word"),
    [
        ({"pooling_factors": [-3.0]}, "pooling_factors"),
        ({"pooling_factors": [float("nan")]}, "pooling_factors"),
        ({"min_partition": -5}, "min_partition"),
    ],
)
def test_impossible_numbers_in_constraints_name_the_table(numbers: dict[str, Any], word: str) -> None:
    planner = NeuroShardPlanner(
        topology=cpu_topology(2),
        batch_size=64,
        constraints={"a": ParameterConstraints(**numbers)},
        cost_model=ANALYTIC,
        stats=[],
    )
    with pytest.raises(PlannerError, match="'a'") as caught:
        planner.plan(bag_collection(bag_config("a", 100, 64)), bag_sharders())
    assert word in str(caught.value)


def test_constraints_of_unknown_tables_are_mentioned(caplog: pytest.LogCaptureFixture) -> None:
    planner = NeuroShardPlanner(
        topology=cpu_topology(2),
        batch_size=64,
        constraints={"a": ParameterConstraints(pooling_factors=[2.0]), "typo": ParameterConstraints()},
        cost_model=ANALYTIC,
        stats=[],
    )
    with caplog.at_level(logging.WARNING):
        planner.plan(bag_collection(bag_config("a", 100, 64)), bag_sharders())
    assert any("typo" in message for message in caplog.messages)
    assert planner.report is not None and any("typo" in note for note in planner.report.notes)
