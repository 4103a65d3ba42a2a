"""From a GPU's records to its model: training, the choice of a model, TorchRec's own formula, one command."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest
import torch

from tests.gpu_records import GPU, priced_record
from tests.gpu_records import gpu_folder as gpu_folder  # a fixture
from tests.test_calibration import quick as quick  # a fixture
from tests.test_calibration import stored
from torchrec_neuroshard import CostModel, torchrec_hardware_config
from torchrec_neuroshard.adapters.errors import UnsupportedArgumentError
from torchrec_neuroshard.cli import main
from torchrec_neuroshard.cli.calibrate import COLLECTIVES_FILE, RECORDS_FILE
from torchrec_neuroshard.costs import hardware as costs_hardware
from torchrec_neuroshard.costs import model as costs_model
from torchrec_neuroshard.costs.features import shard_features
from torchrec_neuroshard.costs.hardware import HARDWARE, gpu_preset, hardware_spec
from torchrec_neuroshard.costs.model import CostModelError
from torchrec_neuroshard.costs.registry import resolve_cost_model
from torchrec_neuroshard.measure.specs import GroupSpec, ShardSpec
from torchrec_neuroshard.measure.store import read_records
from torchrec_neuroshard.measure.timing import RepetitionPolicy
from torchrec_neuroshard.training import build, calibrate
from torchrec_neuroshard.training.dataset import spec_works
from torchrec_neuroshard.training.host_link import fit_host_link
from torchrec_neuroshard.training.torchrec_coefficients import MULTIPLIERS, fit_torchrec_coefficients

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")
POLICY = RepetitionPolicy(warmup=1, minimum=3, maximum=3, seconds=0.05)


# Training


def test_a_host_link_is_found_from_groups_in_host_memory() -> None:
    records = [priced_record(index) for index in range(400)]
    offloaded = [record for record in records if record["spec"].get("location", "device") != "device"]
    assert len(offloaded) > 30
    analytic = CostModel.analytic("h200").groups
    start = dataclasses.replace(HARDWARE["h200"], host_read_gbps=10.0, host_write_gbps=90.0)
    link = fit_host_link(offloaded, analytic, start)
    assert link is not None and link.records == len(offloaded)
    assert link.read_gbps == pytest.approx(HARDWARE["h200"].host_read_gbps, rel=0.03)
    assert min(link.read_gbps, link.write_gbps) == pytest.approx(35.2, rel=0.03)
    assert link.median_ape < 0.01 < link.preset_median_ape
    assert fit_host_link(offloaded[:5], analytic, start) is None


def test_records_of_a_gpu_give_a_card_with_its_constants(gpu_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    card = CostModel.load(gpu_folder).card
    assert card["hardware"] == GPU and card["records"]["groups_in_host_memory"] > 30
    assert card["host_link"]["read_gbps"] == pytest.approx(35.2, rel=0.25)  # of groups priced by nets, not exactly
    assert card["bandwidths"]["copy"] == {"gb_per_s": 4000.0, "data_sheet_gb_per_s": 4800}
    assert card["bandwidths"]["launch_forward"] == {"ms": 0.04, "data_sheet_ms": 0.02}
    assert card["collectives_provenance"] == "analytic" and "NVLink 4" in card["collectives_source"]
    assert "adam" in card["measured_kinds"]["optimizer"]
    records = str(gpu_folder.parent.parent / "gpu.jsonl")
    assert main(["evaluate", "--cost-model", "analytic/h200", "--records", records, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    kernels = report["groups"]["by"]["kernel"]
    assert {bin["bin"] for bin in kernels} == {"fused", "dense", "fused_uvm", "fused_uvm_caching"}
    assert all(bin["median_ape"] < 1e-6 for bin in kernels)  # records were made with these very constants


def test_host_links_of_measured_models_price_plans(gpu_folder: Path) -> None:
    model = CostModel.load(gpu_folder)
    spec = model.as_measured(HARDWARE["h200"])
    assert spec.host_read_gbps == model.card["host_link"]["read_gbps"] and spec.memory_gbps == 4800
    assert CostModel.analytic("h200").as_measured(HARDWARE["h200"]) == HARDWARE["h200"]
    assert model.scaled_to("a100_sxm_80gb").as_measured(HARDWARE["a100_sxm_80gb"]) == HARDWARE["a100_sxm_80gb"]


# The choice of a model


@pytest.fixture
def only_the_gpu_is_shipped(gpu_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(costs_model, "PRETRAINED", gpu_folder.parent)
    monkeypatch.setattr("torchrec_neuroshard.costs.registry._warned", set())
    yield


@pytest.mark.usefixtures("only_the_gpu_is_shipped")
def test_auto_takes_the_gpus_own_model_else_the_nearest_scaled(caplog: pytest.LogCaptureFixture) -> None:
    own = resolve_cost_model("auto", "cuda", "h200")
    assert own.provenance == "measured" and own.hardware == "nvidia_h200" and not caplog.messages
    scaled = resolve_cost_model("auto", "cuda", "a100_sxm_80gb")
    assert scaled.provenance == "scaled" and scaled.hardware == "a100_sxm_80gb" and "nvidia_h200" in caplog.text
    assert scaled.name == "nvidia_h200 scaled to a100_sxm_80gb" and "NVLink 3" in caplog.text
    ratio = HARDWARE["h200"].memory_gbps / HARDWARE["a100_sxm_80gb"].memory_gbps
    assert scaled.card["scaled_from"] == {"name": "nvidia_h200", "hardware": "nvidia_h200", "work_ms": ratio}
    assert scaled.ensemble is not None and own.ensemble is not None
    heavy = spec_works(GroupSpec(65_536, tuple(ShardSpec(10**6, 128, 20.0, zipf=0.5) for _ in range(8))))
    times = [
        m.groups.predict(m.groups.contributions(shard_features(heavy)).sum(axis=0)[None])[0] for m in (own, scaled)
    ]
    assert times[1].sum() / times[0].sum() == pytest.approx(ratio, rel=0.35)  # nets see a rank that is slower
    calls = [m.collectives.prior.kinds[0].intra_host_ms_per_byte for m in (scaled, CostModel.analytic("a100_sxm_80gb"))]
    assert calls[0] == calls[1]
    generic = resolve_cost_model("auto", "cuda", "generic_gpu")
    assert generic.provenance == "analytic"
    with pytest.raises(CostModelError, match="both must be GPUs with a data sheet"):
        own.scaled_to("generic_gpu")
    with pytest.raises(CostModelError, match="both must be GPUs with a data sheet"):
        CostModel.analytic("generic_cpu").scaled_to("h200")


@pytest.mark.usefixtures("only_the_gpu_is_shipped")
@pytest.mark.parametrize(
    ("hardware", "provenance"), [("h200", "measured"), ("v100", "scaled"), ("generic_gpu", "analytic")]
)
def test_plans_say_which_model_made_them(
    hardware: str, provenance: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = [{"name": f"t{i}", "num_embeddings": 10**5, "embedding_dim": 64, "pooling_factor": 5} for i in range(4)]
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps({"name": "w", "batch_size": 1024, "tables": tables}))
    assert main(["plan", str(workload), "--world-size", "2", "--hardware", hardware, "--json"]) == 0
    model = json.loads(capsys.readouterr().out)["cost_model"]
    assert model["provenance"] == provenance and model["collectives"] == hardware_spec(hardware, "cuda").links
    assert main(["plan", str(workload), "--world-size", "2", "--hardware", hardware]) == 0
    assert ("Collectives were not measured" in capsys.readouterr().out) == (provenance != "analytic")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100_sxm"),
        ("NVIDIA H100 PCIe", "generic_gpu"),
        ("NVIDIA H100 NVL", "generic_gpu"),
        ("NVIDIA GH200 480GB", "generic_gpu"),
        ("NVIDIA A100-SXM4-80GB", "a100_sxm_80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100_sxm_40gb"),
        ("Tesla V100-SXM2-32GB", "v100"),
        ("NVIDIA L4", "generic_gpu"),
    ],
)
def test_gpus_are_known_by_their_names(name: str, preset: str) -> None:
    assert gpu_preset(name) == preset
    assert hardware_spec(costs_hardware._as_name(name), "cuda") == HARDWARE[preset]


def test_a_gpu_without_a_preset_finds_the_model_of_its_name(
    gpu_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    card = json.loads((gpu_folder / "card.json").read_text())
    card["hardware"] = {"name": "nvidia_l4", "device": "cuda", "gpu": "NVIDIA L4"}
    (gpu_folder / "card.json").write_text(json.dumps(card))
    gpu_folder.rename(gpu_folder.parent / "mine")
    (gpu_folder.parent / "broken").mkdir()
    (gpu_folder.parent / "broken" / "card.json").write_text("{")
    monkeypatch.setattr(costs_model, "PRETRAINED", gpu_folder.parent)
    monkeypatch.setattr("torchrec_neuroshard.costs.registry._warned", set())
    assert resolve_cost_model("auto", "cuda", "nvidia_l4").provenance == "measured"
    assert "broken" in caplog.text
    assert resolve_cost_model("auto", "cuda", "generic_gpu").provenance == "analytic"
    monkeypatch.setattr("torchrec_neuroshard.costs.registry.machine_name", lambda device: "nvidia_l4")
    assert resolve_cost_model("auto", "cuda", "generic_gpu").hardware == "nvidia_l4"  # on that machine
    assert resolve_cost_model("auto", "cuda", "h200").provenance == "analytic"  # nothing to scale by


# TorchRec's own formula


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_torchrecs_formula_is_fitted_and_computed_by_torchrec(device: str, gpu_folder: Path) -> None:
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
    from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
    from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
    from torchrec.distributed.planner.types import ParameterConstraints, Topology
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    model = CostModel.load(gpu_folder if device == "cuda" else "cpu")
    config = torchrec_hardware_config(model)
    topology = Topology(world_size=2, compute_device=device)
    constraints = {"t": ParameterConstraints(pooling_factors=[20.0])}
    estimator = EmbeddingPerfEstimatorFactory.create_with_config(config, topology=topology, constraints=constraints)
    storage = EmbeddingStorageEstimator(topology=topology, constraints=constraints)
    enumerator = EmbeddingEnumerator(topology, 512, constraints=constraints, estimator=[estimator, storage])
    table = EmbeddingBagConfig(num_embeddings=10_000, embedding_dim=64, name="t", feature_names=["f"])
    module = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
    options = enumerator.enumerate(module, [EmbeddingBagCollectionSharder()])
    option = next(o for o in options if (o.sharding_type, o.compute_kernel) == ("table_wise", "fused"))
    perf = option.shards[0].perf
    assert perf is not None
    fitted = model.card["torchrec_coefficients"]
    lookups, outputs = 2 * 512 * 20.0, 2 * 512 * 64 * 4.0
    sizes = np.asarray([lookups * 8, lookups * 64 * 4, outputs])
    for part, half, penalty in ((perf.fwd_compute, "fwd", 1.15), (perf.bwd_compute, "bwd", 1.0)):
        multipliers = np.asarray([fitted["table_wise"][half][name] for name in MULTIPLIERS])
        assert part == pytest.approx(penalty * float(sizes @ multipliers) / fitted["mem_bw_bytes_per_ms"], rel=1e-3)


def test_torchrecs_coefficients_are_recovered_and_need_records() -> None:
    records = []
    for index in range(80):
        record = copy.deepcopy(priced_record(index))
        spec = GroupSpec.from_json(record["spec"])
        if spec.compute_kernel != "fused" or spec.pooling != "sum":
            continue
        lookups = np.asarray([spec.batch_size * s.pooling_factor for s in spec.shards])
        dims = np.asarray([float(s.dim) for s in spec.shards])
        outputs = np.asarray([spec.batch_size * s.num_features * s.dim * 4.0 for s in spec.shards])
        element = 2 if spec.data_type == "fp16" else 4
        record["backward_ms"]["median"] = float(
            (5 * 8 * lookups + 2 * lookups * dims * element + 3 * outputs).sum() / 1e9
        )
        records.append(record)
    fitted = fit_torchrec_coefficients(records, 1e9)
    assert fitted is not None and fitted["records"] == len(records)
    assert [fitted["table_wise"]["bwd"][name] for name in MULTIPLIERS] == pytest.approx([5, 2, 3], rel=0.01)
    assert fitted["median_ape"]["bwd"] < 0.01 and fitted["table_wise"]["bwd"] == fitted["row_wise"]["bwd"]
    assert fit_torchrec_coefficients(records[:5], 1e9) is None
    with pytest.raises(UnsupportedArgumentError, match="has no coefficients of TorchRec's formula"):
        torchrec_hardware_config(CostModel.analytic("h200"))


# One command


def test_without_a_base_calibrate_trains_from_the_records_alone(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a GPU, of which no model is shipped; with the collectives of the host's ranks."""
    monkeypatch.setattr(calibrate, "shipped_models", lambda: ())
    one_epoch = dataclasses.replace(build.TrainingConfig(), nets=2, epochs=1)
    monkeypatch.setattr("torchrec_neuroshard.cli.calibrate.TrainingConfig", lambda seed: one_epoch)
    from torchrec_neuroshard.measure.hardware import hardware_fingerprint

    here = {**hardware_fingerprint("cpu")}
    given = [priced_record(index, here, location="device") for index in range(120)]
    file, out = stored(tmp_path / "given.jsonl", iter(given)), tmp_path / "model"
    options = ["--records", str(file), "--device", "cpu", "--world-size", "2", "--minutes", "0.06", "--out", str(out)]
    assert main(["calibrate", *options]) == 0
    said = capsys.readouterr()
    assert "no cost model of a cpu device is shipped" in said.err and "held-out groups" in said.out
    card = CostModel.load(out).card
    assert "calibrated_from" not in card and {"copy", "launch_forward"} <= set(card["bandwidths"])
    assert {record["kind"] for record in read_records(out / RECORDS_FILE)} == {"bandwidth", "group"}
    assert {record["kind"] for record in read_records(out / COLLECTIVES_FILE)} == {"collective"}
