"""NeuroShardPlanner behind TorchRec's planner executor and dry-run command line, which TorchRec has since 1.9."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
from planner_models import ANALYTIC, bag_collection, bag_config, bag_sharders, plan_json

HAS_SEAM = importlib.util.find_spec("torchrec.distributed.planner.provider") is not None
seam = pytest.mark.skipif(not HAS_SEAM, reason="TorchRec has the planner executor since 1.9")


@pytest.mark.skipif(HAS_SEAM, reason="TorchRec 1.9 and later have the planner executor")
def test_without_the_executor_the_import_says_so() -> None:
    with pytest.raises(ImportError, match=r"needs the planner executor of TorchRec 1.9 .* 1\.\d\.\d is installed"):
        importlib.import_module("torchrec_neuroshard.planner_provider")


def provider(**arguments: Any) -> Any:
    module = importlib.import_module("torchrec_neuroshard.planner_provider")
    return module.NeuroShardPlannerProvider(**{"cost_model": ANALYTIC, **arguments})


def request(**changes: Any) -> Any:
    types = importlib.import_module("torchrec.distributed.planner.types")
    arguments: dict[str, Any] = {
        "model": bag_collection(bag_config("big", 50_000, 128), bag_config("small", 900, 64)),
        "sharders": bag_sharders(),
        "launcher_hardware": "h100_sxm",
        "training_framework": types.TrainingFramework("apf"),
        "world_size": 2,
        "local_world_size": 2,
        "batch_size": 64,
        "hbm_gb": 4.0,
        "ddr_gb": 4.0,
        "planner_config": types.PlannerConfig(),
    }
    return types.ShardingPlanRequest(**{**arguments, **changes})


def run(of: Any, wanted: Any, sku: str = "h100_sxm") -> Any:
    types = importlib.import_module("torchrec.distributed.planner.types")
    executor = importlib.import_module("torchrec.distributed.planner.executor")
    context = types.PlannerSessionContext(request=wanted, results={})
    return executor.DefaultPlannerExecutor(of).run(sku, context)


@seam
def test_torchrecs_executor_plans_with_us() -> None:
    result = run(provider(column_split="never"), request())
    assert result.success and result.planner_failure_reason is None
    plan = plan_json(result.sharding_plan)[""]
    assert set(plan) == {"big", "small"} and all(entry["kernel"] == "fused" for entry in plan.values())
    assert {rank for entry in plan.values() for rank in entry["ranks"]} == {0, 1}
    assert {option.fqn for option in result.sharding_options} == {".big", ".small"}
    weights = 4 * 50_000 * 128
    assert weights <= result.estimated_max_hbm_bytes < 2 * weights
    assert result.critical_path_ms > 0 and result.max_rank_perf > 0


@seam
def test_what_does_not_fit_is_a_failure_with_its_kind() -> None:
    types = importlib.import_module("torchrec.distributed.planner.types")
    big = bag_collection(bag_config("big", 100_000_000, 128))
    result = run(provider(), request(model=lambda: big))  # the executor takes factories too
    assert not result.success and result.sharding_plan is None
    assert result.planner_error_type == types.PlannerErrorType.INSUFFICIENT_STORAGE
    assert "insufficient storage" in result.planner_failure_reason


@seam
def test_hardware_and_pipeline_follow_the_request() -> None:
    types = importlib.import_module("torchrec.distributed.planner.types")
    wanted = request(
        planner_config=types.PlannerConfig(
            pipeline_type="train_base", timeout_seconds=7, proposer_config=types.ProposerConfig()
        )
    )
    context = types.PlannerSessionContext(request=wanted, results={})

    def planned(of: Any, sku: str) -> Any:
        planner = of.build_planner(
            sku,
            topology=of.build_topology(sku, wanted, context),
            storage_reservation=of.build_storage_reservation(sku, wanted),
            ctx=context,
        )
        planner.plan(wanted.model, wanted.sharders)
        return planner

    by_name = planned(provider(cost_model="auto"), "h100_sxm")
    assert by_name.report.cluster.hardware == "h100_sxm" and by_name.report.cost_model["name"].endswith("h100_sxm")
    assert by_name.report.cost.pipeline.value == "none" and by_name._timeout_seconds == 7
    assert by_name.report.batch_size == 64
    mapped = planned(provider(hardware={"GRANDTETON": "h100_sxm"}, pipeline="prefetch"), "GRANDTETON")
    assert mapped.report.cluster.hardware == "h100_sxm" and mapped.report.cost.pipeline.value == "prefetch"


@seam
def test_what_the_search_replaces_is_refused() -> None:
    types = importlib.import_module("torchrec.distributed.planner.types")
    config = types.PlannerConfig(partitioner_type="greedy_perf", balance_modules=True)
    with pytest.raises(types.PlannerError, match="partitioner_type, balance_modules cannot be honoured"):
        run(provider(), request(planner_config=config))
    with pytest.raises(NotImplementedError, match="linear_programming"):
        run(
            provider(),
            request(planner_config=types.PlannerConfig(planner_variant=types.PlannerVariant("linear_programming"))),
        )


@seam
def test_the_dry_run_command_line_plans_with_us(capsys: pytest.CaptureFixture[str]) -> None:
    cli = importlib.import_module("torchrec.distributed.planner.dry_run.cli")
    api = importlib.import_module("torchrec.distributed.planner.dry_run.api")
    executor = importlib.import_module("torchrec.distributed.planner.executor")
    orchestrator = api.DryRunOrchestrator(executor.DefaultPlannerExecutor(provider()))
    arguments = ["--world-size", "2", "--hbm-gb", "8", "--ddr-gb", "8", "--num-tables", "3", "--print-plan"]
    assert cli.main(["--sku-list", "h100_sxm", *arguments], orchestrator) == 0
    output = capsys.readouterr().out
    assert "[OK] h100_sxm" in output and "tables=3" in output and "table_2" in output
    assert cli.main(["--sku-list", "h100_sxm", *arguments, "--num-embeddings", "100000000"], orchestrator) == 1
    assert "insufficient storage" in capsys.readouterr().out
