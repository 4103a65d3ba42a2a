"""Plans that are saved, and loaded in place of a search."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Sequence

import pytest
import torch
from distributed import run_ranks
from parity import AllTypesSharder
from planner_models import ANALYTIC, bag_collection, bag_config, bag_sharders, cpu_topology, plan_json
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    PlanLoader,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Topology,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_neuroshard import NeuroShardPlanner, PlanFile
from torchrec_neuroshard.adapters.compat import error_type

BATCH = 64
RANKS = 2


class Stored(PlanLoader):
    """A loader of the kind that TorchRec's users write."""

    def __init__(self, options: Sequence[ShardingOption] | None, context: str | None = None) -> None:
        self._options, self._context = options, context

    def load(self) -> dict[int, ShardingOption] | None:
        return None if self._options is None else {option.storage_hash(): option for option in self._options}

    def plan_context_hash(self) -> str | None:
        return self._context

    def get_plan_id(self) -> str:
        return "stored"


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict(
        {
            "user": bag_collection(
                bag_config("cut", 900, 128), bag_config("rows", 91, 32, ["r0", "r1"]), bag_config("copies", 40, 16)
            ),
            "item": bag_collection(bag_config("cut", 700, 64, ["i"])),
        }
    )


LIMITS = {
    "rows": ParameterConstraints(sharding_types=["row_wise"]),
    "copies": ParameterConstraints(sharding_types=["data_parallel"]),
}


def planner(loader: PlanLoader | None = None, **changes: Any) -> NeuroShardPlanner:
    arguments: dict[str, Any] = {
        "topology": cpu_topology(RANKS),
        "batch_size": BATCH,
        "constraints": LIMITS,
        "cost_model": ANALYTIC,
        "stats": [],
        "plan_loader": loader,
    }
    return NeuroShardPlanner(**{**arguments, **changes})


def sharders() -> list[Any]:
    return [AllTypesSharder()]


@functools.cache
def uneven_options() -> tuple[ShardingOption, ...]:
    """A plan that no search makes: one table cut unevenly, and out of order, the other whole."""
    ours = planner()
    ours.plan(model(), sharders())
    options = ours.get_selected_options()
    for option in options:
        if option.name == "cut":
            option.sharding_type = "column_wise"
            pieces = [(1, 0, 96), (0, 96, 32)] if option.path == "user" else [(1, 0, 64)]
            rows = option.tensor.shape[0]
            option.shards = [Shard(size=[rows, w], offset=[0, o], rank=r) for r, o, w in pieces]
    return tuple(options)


def notes(ours: NeuroShardPlanner) -> str:
    assert ours.report is not None
    return "\n".join(ours.report.notes)


def test_a_loaded_plan_takes_the_place_of_a_search() -> None:
    ours = planner(Stored(uneven_options()))
    plan = plan_json(ours.plan(model(), sharders()))
    assert plan["user"]["cut"]["ranks"] == [1, 0]
    assert [shard[:2] for shard in plan["user"]["cut"]["shards"]] == [([0, 0], [900, 96]), ([0, 96], [900, 32])]
    assert plan["item"]["cut"]["ranks"] == [1]
    assert {name: entry["type"] for name, entry in plan["user"].items()} == {
        "cut": "column_wise",
        "rows": "row_wise",
        "copies": "data_parallel",
    }
    assert ours.report is not None and ours.report.search_log == () and ours.report.cost.total_ms > 0
    assert "The plan stored was loaded, not searched for." in notes(ours)
    searched = planner(Stored(None))
    assert searched.plan(model(), sharders()) is not None
    assert searched.report is not None and searched.report.search_log
    assert "stored was not loaded, as there is none yet" in notes(searched)


def test_an_uneven_plan_round_trips_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "plan.json"
    first = planner(PlanFile(path))
    first.plan(model(), sharders())  # there is no file yet
    assert first.report is not None and first.report.search_log
    made = planner(Stored(uneven_options()))
    plan = plan_json(made.plan(model(), sharders()))
    PlanFile(path).save(made)
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]  # nothing half-written is left
    loading = planner(PlanFile(path))
    assert plan_json(loading.plan(model(), sharders())) == plan
    assert made.report is not None and loading.report is not None
    assert loading.report.cost.total_ms == made.report.cost.total_ms
    assert (loading.report.memory_bytes == made.report.memory_bytes).all()
    assert f"{path} was loaded" in notes(loading)
    saved = path.read_text()
    PlanFile(path).save(loading)
    assert path.read_text() == saved


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved") / "plan.json"
    ours = planner()
    ours.plan(model(), sharders())
    PlanFile(path).save(ours)
    return path.read_text()


@pytest.fixture
def saved(document: str, tmp_path: Path) -> Path:
    (tmp_path / "plan.json").write_text(document)
    return tmp_path / "plan.json"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"batch_size": 32}, "batch_size was 64 and is 32"),
        ({"topology": cpu_topology(4)}, "world_size was 2 and is 4"),
        ({"topology": Topology(RANKS, "cpu", ddr_cap=2**32, local_world_size=1)}, "local_world_size was 2 and is 1"),
        ({"constraints": {"rows": LIMITS["rows"]}}, r"constraints\['copies'\] is gone"),
        (
            {"constraints": {**LIMITS, "rows": ParameterConstraints(sharding_types=["row_wise"], min_partition=64)}},
            r"constraints\['rows'\]\['min_partition'\] is new",
        ),
    ],
)
def test_other_inputs_are_named(saved: Path, changes: dict[str, Any], what: str) -> None:
    with pytest.raises(PlannerError, match=f"{saved}: the plan was saved for other inputs: .*{what}.*Delete") as info:
        planner(PlanFile(saved), **changes).plan(model(), sharders())
    assert info.value.error_type == error_type("PLANNER_INPUT_CONTEXT_MISMATCH")


def test_another_model_is_named(saved: Path) -> None:
    other = model()
    other["item"] = bag_collection(bag_config("cut", 701, 64, ["i"]), bag_config("more", 10, 16))  # type: ignore[operator]
    with pytest.raises(PlannerError) as info:
        planner(PlanFile(saved)).plan(other, sharders())
    assert "tables['item.cut']['num_embeddings'] was 700 and is 701" in str(info.value)
    assert "tables['item.more'] is new" in str(info.value)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda document: document.update(schema=2), "schema is 2, this version reads 1"),
        (lambda document: document.pop("tables"), "field 'tables' is missing"),
        (
            lambda document: document["tables"][0].pop("shards"),
            r"tables\[0\]: field 'shards' is missing",
        ),
        (
            lambda document: document["tables"][1].update(sharding_type="sideways"),
            r"tables\[1\]: sharding_type is 'sideways'",
        ),
        (
            lambda document: document["tables"][0]["shards"][0].update(rank="0"),
            r"tables\[0\]: shards\[0\]: rank must be of type int, got '0'",
        ),
        (lambda document: document["tables"][0].update(dtype="float12"), r"tables\[0\]: dtype is 'float12'"),
        (lambda document: document["tables"].pop(-1), r"item\.cut: not in the plan"),
        (lambda document: document["tables"][0]["shards"][0].update(rank=7), r"shards on ranks \[7.*of 2"),
        (
            lambda document: next(t for t in document["tables"] if t["name"] == "rows")["shards"].reverse(),
            "not cut as TorchRec's run time cuts row_wise",
        ),
        (
            lambda document: next(t for t in document["tables"] if t["name"] == "copies").update(
                sharding_type="table_wise", compute_kernel="fused"
            ),
            "table_wise",
        ),
    ],
)
def test_a_damaged_file_is_an_error_that_names_it(saved: Path, change: Any, what: str) -> None:
    document = json.loads(saved.read_text())
    change(document)
    saved.write_text(json.dumps(document))
    with pytest.raises(PlannerError, match=what) as info:
        planner(PlanFile(saved)).plan(model(), sharders())
    assert str(saved) in str(info.value) and "plan afresh" in str(info.value)
    assert info.value.error_type == error_type("PLAN_LOADING_FAILED")
    saved.write_text("{")
    with pytest.raises(PlannerError, match=f"{saved}: cannot be read as JSON"):
        planner(PlanFile(saved)).plan(model(), sharders())


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda document: "[" * 200_000, "cannot be read as JSON"),
        (lambda document: edited(document, num_embeddings=-5), "num_embeddings and embedding_dim must be"),
        (lambda document: edited(document, num_embeddings=10**30), "num_embeddings and embedding_dim must be"),
        (lambda document: edited(document, cache_load_factor="abc"), "cache_load_factor must be a share"),
        (lambda document: edited(document, cache_load_factor=float("nan")), "cache_load_factor must be a share"),
        (lambda document: edited(document, sharding_type="grid_shard", shards=[]), "there are no shards"),
    ],
)
def test_an_absurd_file_is_an_error_that_names_it(saved: Path, change: Any, what: str) -> None:
    saved.write_text(change(saved.read_text()))
    with pytest.raises(PlannerError, match=what) as error:
        planner(PlanFile(saved)).plan(model(), sharders())
    assert str(saved) in str(error.value)


def edited(document: str, **fields: Any) -> str:
    content = json.loads(document)
    content["tables"][0] |= fields
    return json.dumps(content)


@pytest.mark.parametrize(
    "limits",
    [
        {"rows": ParameterConstraints(compute_kernels=["key_value"])},
        {
            "copies": ParameterConstraints(
                sharding_types=["data_parallel", "table_wise"], compute_kernels=["dense", "fused_uvm_caching"]
            )
        },
    ],
)
def test_what_was_planned_can_be_loaded_again(tmp_path: Path, limits: dict[str, ParameterConstraints]) -> None:
    file = PlanFile(tmp_path / "plan.json")
    cuda: dict[str, Any] = {
        "topology": Topology(RANKS, "cuda", local_world_size=RANKS),
        "constraints": limits,
        "cost_model": "analytic/h100_sxm",
        "hardware": "h100_sxm",
    }
    ours = planner(**cuda)
    first = plan_json(ours.plan(model(), sharders()))
    file.save(ours)
    again = planner(file, **cuda)
    assert plan_json(again.plan(model(), sharders())) == first
    assert "was loaded" in notes(again)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_no_longer_fits_is_refused(saved: Path) -> None:
    with pytest.raises(PlannerError, match=r"cannot be used: rank \d: .* bytes used of"):
        small = Topology(world_size=RANKS, local_world_size=RANKS, compute_device="cpu", ddr_cap=300_000)
        nothing = FixedPercentageStorageReservation(0.0)
        planner(PlanFile(saved), topology=small, storage_reservation=nothing).plan(model(), sharders())


def test_there_has_to_be_a_plan_to_save(tmp_path: Path) -> None:
    with pytest.raises(PlannerError, match="there is no plan to save yet"):
        PlanFile(tmp_path / "plan.json").save(planner())
    assert not list(tmp_path.iterdir())


def test_a_plan_of_torchrecs_planner_is_loaded_where_its_inputs_hash_the_same() -> None:
    collection = bag_collection(bag_config("a", 900, 64), bag_config("b", 500, 32))
    theirs = EmbeddingShardingPlanner(cpu_topology(RANKS), BATCH, stats=[])
    plan = theirs.plan(collection, bag_sharders())
    context = theirs.hash_planner_context_inputs_str()
    assert theirs._best_plan is not None
    loader = Stored(theirs._best_plan, context)
    ours = planner(loader, constraints=None)
    assert plan_json(ours.plan(collection, bag_sharders())) == plan_json(plan)
    with pytest.raises(PlannerError, match="plan stored was saved for other inputs: their hash is") as info:
        planner(loader, constraints=None, batch_size=BATCH + 1).plan(collection, bag_sharders())
    assert info.value.error_type == PlannerErrorType.PLANNER_INPUT_CONTEXT_MISMATCH


def loading_worker(rank: int, path: str) -> dict[str, Any]:
    limits = {"rows": LIMITS["rows"]}
    meta = bag_collection(bag_config("cut", 90, 128, ["c"]), bag_config("rows", 91, 32, ["r"]))
    arguments: dict[str, Any] = {"topology": cpu_topology(RANKS), "constraints": limits}
    made = planner(**arguments)
    made.collective_plan(meta, sharders(), None)
    options = made.get_selected_options()
    for option in options:
        if option.name == "cut":
            option.sharding_type = "column_wise"
            option.shards = [
                Shard(size=[90, width], offset=[0, offset], rank=owner)
                for owner, offset, width in ((1, 0, 96), (0, 96, 32))
            ]
    uneven = planner(Stored(options), **arguments)
    uneven.collective_plan(meta, sharders(), None)
    PlanFile(path).save(uneven)  # on every rank, of which one has something to write
    loading = planner(PlanFile(path), **arguments)
    plan = loading.collective_plan(meta, sharders(), None)
    try:
        planner(PlanFile(path), **arguments, batch_size=BATCH + 1).collective_plan(meta, sharders(), None)
        failure = ""
    except PlannerError as error:
        failure = str(error)
    result = {"plan": plan_json(plan), "notes": notes(loading), "failure": failure}
    sharded = DistributedModelParallel(meta, device=torch.device("cpu"), plan=plan, sharders=sharders())
    ids = KeyedJaggedTensor(["c", "r"], torch.arange(8) * 10 + rank, lengths=torch.ones(8, dtype=torch.int64))
    output = sharded(ids).to_dict()
    (output["c"].sum() + output["r"].sum()).backward()
    result["columns"] = {key: value.shape[1] for key, value in output.items()}
    return result


def test_every_rank_gets_the_loaded_plan_and_trains(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    results = run_ranks(loading_worker, RANKS, str(path))
    first = results[0]
    assert [shard[1] for shard in first["plan"][""]["cut"]["shards"]] == [[90, 96], [90, 32]]
    assert first["plan"][""]["cut"]["ranks"] == [1, 0]
    for result in results:
        assert result["plan"] == first["plan"] and f"{path} was loaded" in result["notes"]
        assert "batch_size was 64 and is 65" in result["failure"]
        assert result["columns"] == {"c": 128, "r": 32}
