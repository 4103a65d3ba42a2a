"""The two-host comparison: its workloads, plans, bytes over the link and summary."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from planner_models import ANALYTIC

from benchmarks.two_hosts import case_of, main, records_of
from benchmarks.two_hosts_plans import DEFAULT, OURS, UNTOLD, Links
from benchmarks.two_hosts_rank import link_bytes_sent
from benchmarks.two_hosts_summary import PLAN_KIND, ROUND_KIND, complete_rounds, summarize
from benchmarks.two_hosts_traffic import least_link_bytes
from benchmarks.two_hosts_workloads import SEEDS, load_two_hosts_source, two_hosts_workload_json
from torchrec_neuroshard.measure import netns
from torchrec_neuroshard.workload import WorkloadError

ROOT = Path(__file__).parent.parent
BATCH = 512  # samples per rank


def test_generated_workloads_never_change() -> None:
    content = json.dumps([two_hosts_workload_json(seed, 4) for seed in SEEDS], sort_keys=True)
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "82e1698a3913cc02"


def small_file(folder: Path, **changes: Any) -> Path:
    tables = [
        {"name": "wide", "num_embeddings": 4000, "embedding_dim": 64, "pooling_factor": 3.0},
        {"name": "rows", "num_embeddings": 4001, "embedding_dim": 32, "pooling_factor": 2.0},
        {"name": "copies", "num_embeddings": 10, "embedding_dim": 16, "pooling_factor": 1.0},
    ]
    constraints = ("table_wise", "row_wise", "data_parallel")
    for table, constraint in zip(tables, constraints):
        table["constraint"] = constraint
    tables[0].update(changes)
    path = folder / "small.json"
    path.write_text(json.dumps({"name": "small", "batch_size": 4 * BATCH, "optimizer": "sgd", "tables": tables}))
    return path


@pytest.mark.parametrize("changes", [{"weighted": True}, {"data_type": "fp16"}])
def test_tables_that_are_not_trained_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="table 'wide' is weighted, not fp32"):
        load_two_hosts_source(str(small_file(tmp_path, **changes)), 4)


def test_a_batch_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="batch_size must be a multiple of 3, got 2048"):
        load_two_hosts_source(str(small_file(tmp_path)), 3)
    with pytest.raises(WorkloadError, match="whole number"):
        load_two_hosts_source("two_hosts:first", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--link-gbps", "0"], "--link-gbps 0.0 must be a positive number"),
        (["--rounds", "0"], "--rounds 0 must be a positive number"),
        (["--summary"], "measure first"),
        (["--plan-only", "--workload", "none.json"], "none.json: cannot be read"),
    ],
)
def test_bad_input_is_explained(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--store", str(tmp_path / "store.jsonl")]) == 2
    assert message in capsys.readouterr().err


def test_ranks_refuse_to_count_where_there_is_no_link() -> None:
    with pytest.raises(RuntimeError, match="start this program through benchmarks.two_hosts"):
        link_bytes_sent()


def test_the_planners_are_told_each_ranks_share_of_the_link() -> None:
    gb_per_s = (1 << 30) / 1000  # TorchRec keeps bytes per ms
    told, untold = Links(0.8, 2.0).topology(), Links(0.8, 2.0).topology(told=False)
    assert told.inter_host_bw == pytest.approx(0.05 * gb_per_s)  # 0.1 GB/s for two ranks
    assert told.intra_host_bw == pytest.approx(2.0 * gb_per_s)
    assert untold.inter_host_bw == pytest.approx(12.5 * gb_per_s)
    assert (told.world_size, told.local_world_size) == (4, 2)


CASE = {"workload": "w", "workload_id": "i", "link_gbps": 0.2, "intra_host_gb_per_s": 1.0}


def plan_record(planner: str, plan_id: str) -> dict[str, Any]:
    entry = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [0], "shards": [[[0, 0], [8, 8]]]}
    rating = None if planner == OURS else 7.0
    fields = {"plan": {"a": entry, "b": entry}, "predicted_ms": 5.0, "torchrec_rating_ms": rating}
    return {"kind": PLAN_KIND, **CASE, "planner": planner, "plan_id": plan_id, **fields}


def round_record(plan_id: str, number: int, step_ms: float, link_bytes: list[int]) -> dict[str, Any]:
    times = [step_ms, 100 * step_ms, step_ms]  # a disturbed step does not count
    measured = {"step_ms": times, "link_bytes": link_bytes}
    return {"kind": ROUND_KIND, **CASE, "plan_id": plan_id, "round": str(number), **measured}


def test_summary_compares_within_rounds() -> None:
    plans = [plan_record(OURS, "replaced"), plan_record(DEFAULT, "d"), plan_record("torchrec_mp16", "m")]
    plans += [plan_record(UNTOLD, "m"), plan_record(OURS, "o")]
    rounds = []
    for number in range(5):
        drift = 1.0 + number  # the machine slows down: only ratios within a round are steady
        rounds.append(round_record("o", number, 8.0 * drift, [100, 300]))
        rounds.append(round_record("d", number, 10.0 * drift, [500, 300]))
        rounds.append(round_record("m", number, 9.0 * drift, [250, 250]))
    torn = round_record("o", 5, 1.0, [1, 1])
    assert complete_rounds([*rounds, torn], {"o", "d", "m"}) == ["0", "1", "2", "3", "4"]
    assert summarize(plans, []) == []
    (case,) = summarize(plans, [*rounds, torn])
    ours, default = case.of(OURS), case.of(DEFAULT)
    assert (ours.plan_id, ours.step_ms, ours.link_bytes, ours.busiest_bytes) == ("o", 24.0, 400, 300)
    assert (default.link_bytes, default.busiest_bytes, default.types) == (800, 500, {"table_wise": 2})
    assert default.ours_to_this.ratio == pytest.approx(0.8) and default.ours_to_this.high == pytest.approx(0.8)
    assert default.ours_to_this.rounds == 5
    assert case.best_of_torchrec.plan_id == "m"
    assert case.least_bytes is None  # no such workload


def test_least_bytes_are_those_of_the_best_type_of_each_table(tmp_path: Path) -> None:
    workload = load_two_hosts_source(str(small_file(tmp_path)), 4)
    crossing = 4 * BATCH / 2
    wide = crossing * (2 * 64 * 4 + 3 * 8 + 8)  # outputs and their gradients, ids, a length
    rows = crossing * (2 * 32 * 4 + 2 * 8 + 8)
    copies = 2 * 2 * 3 / 4 * 10 * 16 * 4  # a ring's two hops between the hosts
    assert least_link_bytes(workload) == pytest.approx(wide + rows + copies)


def test_no_shipped_plan_sends_less_than_the_least() -> None:
    store = ROOT / "benchmarks/records/intel_xeon_l2_2m_l3_300m/two_hosts.jsonl.xz"
    cases = summarize(records_of(store, PLAN_KIND), records_of(store, ROUND_KIND))
    assert len(cases) == len(SEEDS)
    for case in cases:
        assert case.least_bytes is not None
        over = [result.link_bytes / case.least_bytes for result in case.planners]
        assert min(over) > 1.02  # headers
        assert case.of(OURS).link_bytes < 1.05 * case.least_bytes


@pytest.fixture
def emulation() -> None:
    try:
        with netns.joined_hosts(1.0):
            pass
    except netns.NetnsError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("emulation")
def test_what_crosses_the_link_is_what_the_plan_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)  # plans and ranks are programs of their own
    source, store = str(small_file(tmp_path)), tmp_path / "store.jsonl"
    arguments = ["--workload", source, "--planners", OURS, DEFAULT, "--rounds", "1", "--steps", "4"]
    arguments += ["--cost-model", ANALYTIC, "--link-gbps", "1", "--store", str(store)]
    assert main(arguments) == 0
    assert "ours to TorchRec's default" in capsys.readouterr().out
    ours, theirs = records_of(store, PLAN_KIND)
    kinds = {name: entry["sharding_type"] for name, entry in ours["plan"].items()}
    assert kinds == {"wide": "table_wise", "rows": "row_wise", "copies": "data_parallel"}
    assert ours["predicted_ms"] > 0 and ours["torchrec_rating_ms"] is None and theirs["torchrec_rating_ms"] > 0
    rounds = records_of(store, ROUND_KIND)
    assert len(rounds) == len({ours["plan_id"], theirs["plan_id"]})  # equal plans are trained once
    wide = 2 * BATCH * 64 * 4  # each direction: the other host's samples forward, their gradients backward
    ids = 2 * BATCH * 8 * 3 + 2 * BATCH * 8 * 2  # one way those of wide, both ways half of the rows'
    rows = 2 * 3 * BATCH * 32 * 4 + 3 * BATCH * 32 * 4  # gloo's reduce-scatter is an all-reduce; then an all-gather
    replicas = 2 * 3 / 4 * 10 * 16 * 4
    for record in rounds:
        payload = 2 * wide + ids + 2 * rows + 2 * replicas
        assert payload < sum(record["link_bytes"]) < 1.1 * payload  # lengths and headers
        assert min(record["step_ms"]) > 1e3 * 8 * wide / 1e9  # no faster than the link
    written = store.read_text()
    assert main(arguments) == 0  # plans and measures nothing again
    assert store.read_text() == written
    assert case_of(source, Links(1.0, 1.0)).items() <= rounds[0].items()
