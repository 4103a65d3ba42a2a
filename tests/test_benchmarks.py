"""Tests of the planner comparison: generator, plan conversion, pricing, statistics, one small run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner

from benchmarks.all_types import chosen_sharders
from benchmarks.compare_planners import main
from benchmarks.measure_plans import complete_rounds, matching_records, near_bottleneck
from benchmarks.neuroshard_planners import plan_with_neuroshard, priced_collectives
from benchmarks.plan_cache import PlanRequest
from benchmarks.plan_records import PlannedResult, check_columns, placement_of
from benchmarks.planners import ALL_TORCHREC_FORMS, TORCHREC_FORMS
from benchmarks.rank_costs import BANDWIDTH_GB_PER_S, collectives_ms, rank_work
from benchmarks.row_blocks import RowBlock, RowWiseTables, bucketize
from benchmarks.significance import geometric_mean, ratio_estimate
from benchmarks.skewed_workloads import SEEDS, skewed_workload, skewed_workload_json
from benchmarks.sources import load_source, samples_per_rank, workload_id
from benchmarks.summary import losses, summarize, undecided
from benchmarks.torchrec_planners import plan_with_torchrec, topology
from torchrec_neuroshard.adapters.workload_model import embedding_model, parameter_constraints
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.timing import RepetitionPolicy
from torchrec_neuroshard.problem import DATA_PARALLEL, ROW_WISE, Placement, Shard
from torchrec_neuroshard.workload import Workload, WorkloadError

ROOT = Path(__file__).parent.parent
FROZEN_TABLES = "a388636a55d9d9c5c381b7766c67bb6a0f475cec41716952fd079cab20beb001"
TABLES = [
    {"name": "a", "num_embeddings": 300, "embedding_dim": 32, "pooling_factor": 4, "alpha": 0.6},
    {"name": "b", "num_embeddings": 50, "embedding_dim": 16, "pooling_factor": 2, "alpha": 0.2},
]


def small_workload() -> Workload:
    return Workload.parse({"name": "small", "batch_size": 64, "tables": TABLES})


def small_file(folder: Path) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps({"name": "small", "batch_size": 64, "tables": TABLES}))
    return path


def test_the_generated_workloads_never_change() -> None:
    tables = [skewed_workload_json(seed, None)["tables"] for seed in SEEDS]
    assert hashlib.sha256(json.dumps(tables, sort_keys=True).encode()).hexdigest() == FROZEN_TABLES


@pytest.mark.parametrize("seed", SEEDS)
def test_generated_workloads_stay_in_their_ranges(seed: int) -> None:
    workload = skewed_workload(seed)
    assert 40 <= len(workload.tables) <= 60
    for table, zipf in zip(workload.tables, workload.zipf):
        assert 1_000 <= table.num_embeddings <= 2_000_000
        assert table.embedding_dim in (16, 32, 64, 128)
        assert 1 <= table.pooling_factor <= 120
        assert zipf is not None and 0 <= zipf <= 1.2
        assert table.optimizer == "sgd"
    assert sum(table.num_embeddings * table.embedding_dim * 4 for table in workload.tables) < 6e9


def test_generated_workloads_are_skewed() -> None:
    pooling = np.asarray([table.pooling_factor for seed in SEEDS for table in skewed_workload(seed).tables])
    assert 6 < np.median(pooling) < 10
    assert pooling.max() == 120


def test_the_generator_is_a_program() -> None:
    command = [sys.executable, "-m", "benchmarks.skewed_workloads", "--seed", "3", "--world-size", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    written = Workload.parse(json.loads(done.stdout))
    assert written.batch_size == 8 * 256
    assert written.tables[0].num_embeddings == skewed_workload(3).tables[0].num_embeddings


def test_sources(tmp_path: Path) -> None:
    path = small_file(tmp_path)
    workload = load_source(str(path))
    assert samples_per_rank(workload, 4) == 16
    assert samples_per_rank(load_source("skewed:2"), 8) == 256
    assert workload_id(workload) == workload_id(small_workload())
    assert workload_id(workload) != workload_id(load_source("skewed:2"))
    assert workload_id(load_source("skewed:2")) == "668e6ce9c5b995fe"  # stored records name it
    sorted_ids = [dataclasses.replace(table, id_order="frequency") for table in workload.tables]
    assert workload_id(workload) != workload_id(dataclasses.replace(workload, tables=tuple(sorted_ids)))
    with pytest.raises(WorkloadError, match="64 does not divide over 3 ranks"):
        samples_per_rank(workload, 3)
    with pytest.raises(WorkloadError, match="whole number"):
        load_source("skewed:two")


def first_tables(workload: Workload, count: int) -> Workload:
    return dataclasses.replace(
        workload,
        tables=workload.tables[:count],
        zipf=workload.zipf[:count],
        features=workload.features[:count],
        feature_pooling=workload.feature_pooling[:count],
    )


@pytest.mark.parametrize("form", ALL_TORCHREC_FORMS)
def test_torchrec_plans_are_converted_column_for_column(form: str) -> None:
    workload = first_tables(skewed_workload(1), 6)
    planned = plan_with_torchrec(form, workload, 4, 256, None)
    check_columns(planned.placement, workload)
    assert len(planned.placement.sharding_types) == 6
    assert {shard.rank for shard in planned.placement.shards} <= {0, 1, 2, 3}
    assert planned.predicted_ms > 0 and planned.plan_seconds > 0
    again = PlannedResult.from_json(json.loads(json.dumps(planned.to_json())))
    assert again.placement == planned.placement and again.plan_id == planned.plan_id


def test_plans_with_tables_on_all_ranks_are_converted_and_kept() -> None:
    workload = first_tables(skewed_workload(0), 10)
    theirs = plan_with_torchrec("torchrec_restricted", workload, 8, 256, None, "all")
    ours = plan_with_neuroshard("neuroshard", workload, 8, 256, "auto", "all")
    for planned in (theirs, ours):
        kinds = planned.placement.sharding_types
        assert ROW_WISE in kinds
        spread = [index for index, kind in enumerate(kinds) if kind in (ROW_WISE, DATA_PARALLEL)]
        assert not {shard.table for shard in planned.placement.shards} & set(spread)
        again = PlannedResult.from_json(json.loads(json.dumps(planned.to_json())))
        assert again.placement == planned.placement and again.plan_id == planned.plan_id
    assert theirs.inputs["constraints"]["sharding_types"] == ["table_wise", "column_wise", "row_wise"]
    assert ours.inputs["sharders"] == "all" and "data_parallel" in ours.inputs["constraints"]["sharding_types"]
    assert theirs.inputs["topology"]["bandwidths"] == ours.inputs["topology"]["bandwidths"] == "12.5 GB/s for each rank"


def test_rows_cut_in_another_way_than_torchrec_runs_them_are_refused() -> None:
    workload = first_tables(skewed_workload(0), 2)
    options = {"sharding_types": ["row_wise"], "compute_kernels": ["fused"]}
    planner = EmbeddingShardingPlanner(
        topology=topology(4), batch_size=256, constraints=parameter_constraints(workload, **options)
    )
    plan = planner.plan(embedding_model(workload), chosen_sharders("all"))
    assert placement_of(plan, workload) == Placement((), ("row_wise", "row_wise"))
    (parameters,) = plan.plan.values()
    first, second, *_ = parameters["t0"].sharding_spec.shards
    first.shard_sizes[0] -= 1
    second.shard_offsets[0] -= 1
    with pytest.raises(ValueError, match="t0: row_wise blocks"):
        placement_of(plan, workload)


def test_columns_left_out_or_placed_twice_are_noticed() -> None:
    workload = small_workload()
    kinds = ("column_wise", DATA_PARALLEL)
    check_columns(Placement((Shard(0, 0, 16, 0), Shard(0, 16, 16, 1)), kinds), workload)
    with pytest.raises(ValueError, match="a: 16 of 32 columns"):
        check_columns(Placement((Shard(0, 0, 16, 0),), kinds), workload)
    with pytest.raises(ValueError, match="a: a shard starts at column 12, expected 16"):
        check_columns(Placement((Shard(0, 0, 16, 0), Shard(0, 12, 20, 1)), kinds), workload)
    with pytest.raises(ValueError, match="b: 16 of 16 columns"):  # a data_parallel table has no shards
        check_columns(Placement((Shard(0, 0, 32, 0), Shard(1, 0, 16, 1)), kinds), workload)


def test_ranks_run_what_the_placement_says() -> None:
    workload = small_workload()
    mixed = Placement((Shard(0, 0, 16, 0), Shard(0, 16, 16, 1), Shard(1, 0, 16, 1)), ("column_wise", "table_wise"))
    work = rank_work(workload, mixed, 2, 32)
    assert [len(groups) for groups in work.groups] == [1, 2]  # one TBE for each sharding type
    assert all(group.batch_size == 64 for groups in work.groups for group in groups)
    assert not work.replicated
    merged = rank_work(workload, Placement(mixed.shards, ("column_wise", "column_wise")), 2, 32)
    assert [[shard.dim for shard in group.shards] for group in merged.groups[1]] == [[16, 16]]
    # Equal groups of different plans are the same measurement; another round draws other batches.
    assert work.groups[0] == merged.groups[0]
    assert work.groups[0] != rank_work(workload, mixed, 2, 32, seed=1).groups[0]


def test_data_parallel_tables_run_on_the_local_batch() -> None:
    placement = Placement((Shard(0, 0, 32, 1),), ("table_wise", DATA_PARALLEL))
    work = rank_work(small_workload(), placement, 2, 32)
    assert [len(groups) for groups in work.groups] == [0, 1]
    (replicated,) = work.replicated
    assert replicated.batch_size == 32 and [shard.rows for shard in replicated.shards] == [50]


def hot_tables(ranks: int, samples: int) -> RowWiseTables:
    shards = (
        ShardSpec(1000, 8, 6.0, num_features=2, zipf=1.1),
        ShardSpec(7, 4, 2.0, zipf=0.3),  # on 4 ranks the last block has one row
        ShardSpec(301, 16, 3.0, zipf=0.9),
    )
    return RowWiseTables(GroupSpec(ranks * samples, shards, weighted=True, seed=5), (400, 3, None), ranks)


def test_each_rank_looks_up_what_bucketizing_sends_it() -> None:
    tables = hot_tables(ranks=4, samples=16)
    whole = tables.global_batch(np.random.default_rng(1))
    lengths, ids = bucketize(whole, tables)
    blocks = [tables.block_batch(np.random.default_rng(1), rank) for rank in range(4)]
    assert torch.equal(torch.cat([block.offsets.diff() for block in blocks]), lengths)
    assert torch.equal(torch.cat([block.indices for block in blocks]), ids)
    weights = [block.per_sample_weights for block in blocks if block.per_sample_weights is not None]
    assert whole.per_sample_weights is not None
    assert torch.cat(weights).sum() == pytest.approx(float(whole.per_sample_weights.sum()), rel=1e-5)
    for rank, block in enumerate(blocks):
        spec = tables.block(rank)
        assert [shard.rows for shard in spec.shards] == [250, (2, 2, 2, 1)[rank], (76, 76, 76, 73)[rank]]
        assert block.offsets.numel() == 4 * tables.whole.batch_size + 1  # all bags of four features
        assert RowBlock(tables, rank).measure_ms(torch.device("cpu"), RepetitionPolicy(1, 2, 2)) > 0
    # Popular rows of scattered ids lie in different blocks; where ids count up from the most popular, in the first.
    third = whole.indices[int(whole.offsets[3 * 64]) :]
    assert int(third.bincount().argmax()) == 0
    first = whole.indices[: int(whole.offsets[2 * 64])]
    assert int(first.bincount().argmax()) == (7 + 400) % 1000


def test_row_wise_tables_run_on_every_rank() -> None:
    placement = Placement((Shard(1, 0, 16, 1),), (ROW_WISE, "table_wise"))
    work = rank_work(small_workload(), placement, 2, 32)
    assert [len(work.of_rank(rank)) for rank in range(2)] == [1, 2]
    (tables,) = work.row_wise
    assert work.of_rank(0) == (RowBlock(tables, 0),)
    assert tables.whole.batch_size == 64 and tables.whole.shards[0].rows == 300
    assert tables.local_batch(np.random.default_rng(0)).offsets.numel() == 33
    # The same in another plan is the same measurement; in another round batches differ, but not where hot rows lie.
    alone = rank_work(small_workload(), Placement((), (ROW_WISE, DATA_PARALLEL)), 2, 32)
    assert alone.row_wise[0].id == tables.id
    later = rank_work(small_workload(), placement, 2, 32, seed=1).row_wise[0]
    assert later.id != tables.id and later.turns == tables.turns
    sequence = dataclasses.replace(small_workload().tables[0], unpooled=True)
    with pytest.raises(ValueError, match="a: sequence tables are measured as column shards only"):
        rank_work(
            dataclasses.replace(small_workload(), tables=(sequence, small_workload().tables[1])), placement, 2, 32
        )


def test_collectives_are_priced_by_the_busiest_rank() -> None:
    workload = small_workload()
    placement = Placement((Shard(0, 0, 32, 0), Shard(1, 0, 16, 1)), ("table_wise", "table_wise"))
    # Two ranks of 32 samples. Rank 0 sends 32 columns and takes 4 ids a sample: more than rank 1 does.
    input_bytes, output_bytes = 32 * 4 * 8, 32 * 32 * 4
    expected = (input_bytes + 2 * output_bytes) / (BANDWIDTH_GB_PER_S * 1e6)
    assert collectives_ms(workload, placement, 2, 32) == pytest.approx(expected)
    # Two sharding types do not share their collectives.
    mixed = Placement(placement.shards, ("table_wise", "column_wise"))
    extra = (32 * 2 * 8 + 2 * 32 * 16 * 4) / (BANDWIDTH_GB_PER_S * 1e6)
    assert collectives_ms(workload, mixed, 2, 32) == pytest.approx(expected + extra)
    replicated = Placement(placement.shards[:1], ("table_wise", DATA_PARALLEL))
    all_reduce = 2 * (50 * 16 * 4) / 2 / (BANDWIDTH_GB_PER_S * 1e6)
    assert collectives_ms(workload, replicated, 2, 32) == pytest.approx(expected + all_reduce)


def test_row_wise_collectives_are_priced_by_hand() -> None:
    workload = small_workload()
    placement = Placement((), (ROW_WISE, ROW_WISE))
    # 4 ranks of 16 samples. Each sends three quarters of its samples' 6 ids each (the last block of 50 rows has 11,
    # the others 13, of which the share of lookups follows), and passes on 3 blocks of 16 samples in 48 columns, twice.
    output_bytes = 3 * 16 * 48 * 4
    share = np.asarray([13, 13, 13, 11]) / 50
    ids = 4 / 4 + 2 * share  # per sample, that each rank looks up
    input_bytes = 16 * 8 * max((3 * ids).max(), (ids.sum() - ids).max())
    expected = (input_bytes + 2 * output_bytes) / (BANDWIDTH_GB_PER_S * 1e6)
    assert collectives_ms(workload, placement, 4, 16) == pytest.approx(expected, rel=1e-3)
    # The planner that chooses among such plans sees the same price of forward and backward.
    priced = priced_collectives()
    columns = np.asarray([48.0])
    both = priced.reduce_scatter(16, columns, 4, 4) + priced.all_gather(16, columns, 4, 4)
    assert float(both[0]) == pytest.approx(2 * output_bytes / (BANDWIDTH_GB_PER_S * 1e6))
    replicas = priced.all_reduce(np.asarray([50.0 * 16]), 4, 4)
    assert float(replicas[0]) == pytest.approx(2 * 50 * 16 * 4 * 3 / 4 / (BANDWIDTH_GB_PER_S * 1e6))


def test_ratios_on_known_data() -> None:
    estimate = ratio_estimate([2.0, 8.0], [1.0, 1.0])
    assert estimate.ratio == pytest.approx(4.0)
    # t(0.975, 1 degree) = 12.706; the logarithms' standard error is ln 2.
    assert estimate.high == pytest.approx(4.0 * math.exp(12.7062 * math.log(2)), rel=1e-3)
    assert estimate.low * estimate.high == pytest.approx(16.0)
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="pair"):
        ratio_estimate([1.0], [])


def test_what_counts_as_a_loss() -> None:
    steady = [1.05, 1.051, 1.049, 1.05, 1.052, 1.048, 1.05]
    assert ratio_estimate(steady, [1.0] * 7).is_loss()
    assert not ratio_estimate(steady[:6], [1.0] * 6).is_loss()  # too few rounds
    assert ratio_estimate(steady[:6], [1.0] * 6).may_be_loss()
    noisy = [1.3, 0.9, 1.2, 0.85, 1.25, 1.0, 0.95]
    assert ratio_estimate(noisy, [1.0] * 7).ratio > 1.03
    assert not ratio_estimate(noisy, [1.0] * 7).is_loss()


def record(planner: str, process: str, bottleneck: float, plan_id: str = "p") -> dict[str, object]:
    return {
        "workload": "skewed:0",
        "workload_id": "w",
        "world_size": 4,
        "batch_size_per_rank": 256,
        "planner": planner,
        "plan_id": plan_id + planner,
        "process": process,
        "plan_seconds": 1.0,
        "plan_cpu_seconds": 1.0,
        "predicted_ms": 1.0,
        "bottleneck_ms": bottleneck,
        "imbalance": 1.2,
        "collectives_ms": 1.0,
    }


def test_summary_compares_with_the_best_form_round_by_round() -> None:
    records = [record("neuroshard", "old", 500.0, plan_id="replaced")]
    for number in range(7):
        drift = 1.0 + number  # the machine slows down: only ratios within a round are steady
        records += [
            record("torchrec", f"{number}", 40.0 * drift),
            record("torchrec_restricted", f"{number}", 20.0 * drift),
            record("neuroshard", f"{number}", (22.0 + 0.01 * number) * drift),
        ]
    (case,) = summarize(records)
    assert case.reference == "torchrec_restricted"
    results = {result.planner: result for result in case.planners}
    compute = results["neuroshard"].compute
    assert compute is not None and compute.rounds == 7
    assert compute.ratio == pytest.approx(1.1, rel=0.01) and compute.low > 1.09
    assert [result.planner for _, result in losses([case])] == ["neuroshard"]
    assert undecided([case]) == []
    (short,) = summarize(records[:4])
    assert losses([short]) == [] and [result.planner for _, result in undecided([short])] == ["neuroshard"]


def test_all_sharding_types_are_judged_with_collectives_and_apart() -> None:
    records = [record("torchrec", "0", 10.0), record("neuroshard", "0", 9.0)]
    for number in range(7):
        rows = {**record("torchrec", f"{number}", 10.0 + number), "collectives_ms": 10.0}
        columns = {**record("torchrec_columns_mp16", f"{number}", 11.5 + number), "collectives_ms": 1.0}
        ours = {**record("neuroshard", f"{number}", 10.5 + number), "collectives_ms": 2.0 + 0.025 * (12.5 + number)}
        records += [{**each, "sharders": "all"} for each in (rows, columns, ours)]
    default, every = summarize(records)
    assert (default.sharders, every.sharders) == ("default", "all")
    assert [planner.planner for planner in default.planners] == ["torchrec", "neuroshard"]
    assert every.reference == "torchrec" and every.total_reference == "torchrec_columns_mp16"
    ours_result = every.planners[-1]
    assert ours_result.compute is not None and ours_result.compute.ratio > 1.02
    assert ours_result.total is not None and 1.02 < ours_result.total.ratio < 1.03
    assert [result.planner for _, result in losses([every])] == ["neuroshard"]
    assert losses([default]) == []


def test_only_whole_rounds_count() -> None:
    records = [record("torchrec", "1", 1.0), record("neuroshard", "1", 1.0), record("torchrec", "2", 1.0)]
    assert complete_rounds(records, {"torchrec": "ptorchrec"}) == 2
    assert complete_rounds(records, {"torchrec": "ptorchrec", "neuroshard": "pneuroshard"}) == 1
    assert complete_rounds(records, {"neuroshard": "another"}) == 0


def test_later_rounds_keep_every_rank_that_may_be_slowest() -> None:
    assert near_bottleneck({0: 10.0, 1: 9.1, 2: 8.9, 3: 2.0}) == [0, 1]


def test_a_kept_plan_is_named_after_its_inputs(tmp_path: Path) -> None:
    source = str(small_file(tmp_path))
    names = {
        PlanRequest(source, world_size, planner, timeout).path(tmp_path)
        for planner in TORCHREC_FORMS
        for world_size in (2, 4)
        for timeout in (None, 300)
    }
    assert len(names) == 12


def test_comparison_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # planning and measuring run in processes of their own
    out, store = tmp_path / "result.json", tmp_path / "rounds.jsonl"
    arguments = ["--workload", str(small_file(tmp_path)), "--world-size", "2", "--rounds", "1"]
    arguments += ["--planners", "torchrec", "torchrec_restricted", "neuroshard"]
    arguments += ["--store", str(store), "--plans", str(tmp_path / "plans"), "--json", str(out)]
    assert main(arguments) == 0
    assert '"PYTHONHASHSEED": "0"' in capsys.readouterr().out  # every planner's inputs are shown
    (case,) = json.loads(out.read_text())["cases"]
    assert [planner["planner"] for planner in case["planners"]] == ["torchrec", "torchrec_restricted", "neuroshard"]
    for planner in case["planners"]:
        assert planner["bottleneck_ms"] > 0 and planner["compute"]["rounds"] == 1
    lines = store.read_text().splitlines()
    assert len(lines) == 3
    assert main(arguments) == 0  # plans and measures nothing again
    assert store.read_text().splitlines() == lines


def test_comparison_over_all_sharding_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    content = json.loads(small_file(tmp_path).read_text())
    content["tables"][0]["constraint"] = "row_wise"
    content["tables"][1]["constraint"] = "data_parallel"
    path, store = tmp_path / "spread.json", tmp_path / "rounds.jsonl"
    path.write_text(json.dumps(content))
    arguments = ["--workload", str(path), "--world-size", "2", "--sharders", "all", "--planners", "torchrec"]
    arguments += ["neuroshard", "--store", str(store), "--plans", str(tmp_path / "plans")]
    assert main(arguments) == 0
    assert "all sharding types" in capsys.readouterr().out
    assert matching_records(store, str(path), 2) == []  # those of the default sharders
    theirs, ours = matching_records(store, str(path), 2, "all")
    for measured in (theirs, ours):
        parts = measured["bucketize_ms"], measured["replicated_ms"]
        assert min(*parts, *measured["rank_ms"].values()) > 0 and len(measured["rank_ms"]) == 2
        assert measured["bottleneck_ms"] == pytest.approx(max(measured["rank_ms"].values()) + sum(parts), abs=1e-3)
    assert theirs["plan_id"] == ours["plan_id"]  # and so measured once
    assert theirs["bottleneck_ms"] == ours["bottleneck_ms"]
    out = tmp_path / "out.json"
    assert main([*arguments, "--plan-only", "--real-step", "--json", str(out)]) == 0  # a row-wise table and a replica
    steps = json.loads(out.read_text())["real_steps"]
    assert [step["planner"] for step in steps] == ["torchrec", "neuroshard"] and all(s["ranks"] == 2 for s in steps)
    assert all(len(step["step_ms"]) == 3 and step["median_ms"] > 0 for step in steps)
    with pytest.raises(SystemExit):
        main([*arguments, "--real-step", "1"])
    assert "--real-step trains at least 2 ranks" in capsys.readouterr().err


def test_bad_input_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--summary", "--store", str(tmp_path / "none.jsonl")]) == 2
    assert "measure first" in capsys.readouterr().err
    assert main(["--workload", str(small_file(tmp_path)), "--world-size", "3", "--plan-only"]) == 2
    assert "does not divide over 3 ranks" in capsys.readouterr().err
