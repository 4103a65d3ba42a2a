"""Plans for two hosts with a slow link, by ours and by TorchRec's planner in its forms.

As a program it plans one workload, in a process with a hash seed of its own (TorchRec's plans depend on it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Sequence

import torch
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ShardingOption
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from benchmarks.neuroshard_planners import code_fingerprint
from benchmarks.torchrec_planners import MP16, RESTRICTED
from benchmarks.two_hosts_workloads import load_two_hosts_source
from torchrec_neuroshard import NeuroShardPerfModel, NeuroShardPlanner
from torchrec_neuroshard.adapters.workload_model import embedding_configs, parameter_constraints, table_stats
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    GRID_SHARD,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
)
from torchrec_neuroshard.workload import Workload

RANKS, RANKS_PER_HOST = 4, 2
LEARNING_RATE = 0.01
OURS, DEFAULT, UNTOLD = "neuroshard", "torchrec", "torchrec_untold"

_PIPELINE = "none"  # the measured step is a plain loop
_DDR_BYTES_PER_RANK = 64 << 30  # more than any of these workloads needs
_BYTES_PER_MS = (1 << 30) / 1000  # of a GB/s, as TorchRec counts
_SPREAD_OVER_RANKS = (TABLE_WISE, COLUMN_WISE, TABLE_COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE)
_EVERY_TYPE: dict[str, Any] = {
    "sharding_types": [*_SPREAD_OVER_RANKS, GRID_SHARD, DATA_PARALLEL],
    "compute_kernels": ["fused", "dense"],
}
# What the constraints of each planner say beside pooling factors.
PLANNERS: dict[str, dict[str, Any]] = {
    OURS: _EVERY_TYPE,
    DEFAULT: {},
    UNTOLD: {},  # the only one whose topology has TorchRec's own bandwidths
    "torchrec_mp16": MP16,
    "torchrec_restricted": RESTRICTED,
    "torchrec_restricted_mp16": {**RESTRICTED, **MP16},
    "torchrec_fused_mp16": {"sharding_types": list(_SPREAD_OVER_RANKS), "compute_kernels": ["fused"], **MP16},
    "torchrec_every_mp16": {**_EVERY_TYPE, **MP16},
}


class EveryTypeSharder(EmbeddingBagCollectionSharder):
    """Offers what gloo runs on a CPU beside what TorchRec offers there."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's types for the device, row_wise, table_row_wise and grid_shard (which constraints have to name)."""
        offered = super().sharding_types(compute_device_type)
        return list(dict.fromkeys([*offered, ROW_WISE, TABLE_ROW_WISE, GRID_SHARD]))


def every_type_sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders that every planner is given."""
    return [EveryTypeSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": LEARNING_RATE})]


@dataclass(frozen=True)
class Links:
    """What ranks are joined by; the topology that all planners get says it.

    Attributes:
        link_gbps: Gbit/s between the hosts, in each direction.
        intra_host_gb_per_s: GB/s of a rank within its host.
    """

    link_gbps: float
    intra_host_gb_per_s: float

    def topology(self, told: bool = True) -> Topology:
        """Both hosts; the ranks of a host share the link evenly, as TorchRec has one figure for each rank.

        Args:
            told: whether it says the bandwidths; else it has TorchRec's defaults.
        """
        bandwidths = {
            "intra_host_bw": self.intra_host_gb_per_s * _BYTES_PER_MS,
            "inter_host_bw": self.link_gbps / 8 / RANKS_PER_HOST * _BYTES_PER_MS,
        }
        return Topology(
            world_size=RANKS,
            local_world_size=RANKS_PER_HOST,
            compute_device="cpu",
            ddr_cap=_DDR_BYTES_PER_RANK,
            **(bandwidths if told else {}),
        )


def bag_collection(workload: Workload) -> EmbeddingBagCollection:
    """The model: one collection of all tables, without memory behind it."""
    return EmbeddingBagCollection(embedding_configs(workload, weighted=False), device=torch.device("meta"))


def planner_inputs(planner: str, links: Links, cost_model: str) -> dict[str, Any]:
    """All inputs of a planner beside the workload, as JSON; for ours with the code: a change makes new plans."""
    if planner == OURS:
        program = f"torchrec_neuroshard NeuroShardPlanner, code {code_fingerprint()}"
        own: dict[str, Any] = {"cost_model": cost_model, "pipeline": _PIPELINE, "table_stats": "true"}
    else:
        program, own = f"torchrec {torchrec.__version__} EmbeddingShardingPlanner", {"PYTHONHASHSEED": "0"}
    return {
        "planner": program,
        "constraints": {"pooling_factors": "true", **PLANNERS[planner]},
        "links": "TorchRec's defaults" if planner == UNTOLD else asdict(links),
        "ranks": RANKS,
        "local_world_size": RANKS_PER_HOST,
        **own,
    }


def plan(planner: str, workload: Workload, links: Links, cost_model: str) -> dict[str, Any]:
    """Plans with one of :data:`PLANNERS`.

    Returns:
        {"plan", "plan_id", "plan_seconds", "predicted_ms" (by our cost model), "torchrec_rating_ms" (None for ours)}.
    """
    assert workload.batch_size is not None
    batch_size = workload.batch_size // RANKS
    topology, module, sharders = links.topology(), bag_collection(workload), every_type_sharders()
    constraints = parameter_constraints(workload, **PLANNERS[planner])
    stats = table_stats(workload)
    rating = None
    begun = time.perf_counter()
    if planner == OURS:
        ours = NeuroShardPlanner(
            topology, batch_size, constraints, debug=False, cost_model=cost_model, table_stats=stats, pipeline=_PIPELINE
        )
        made, options = ours.plan(module, sharders), ours._best_plan
    else:
        told = links.topology(told=planner != UNTOLD)
        theirs = EmbeddingShardingPlanner(told, batch_size, constraints=constraints, debug=False)
        made, options = theirs.plan(module, sharders), theirs._best_plan
        rating = _rating(options or [])
    seconds = time.perf_counter() - begun
    assert options is not None
    content = plan_to_json(made)
    simulated = NeuroShardPerfModel(
        topology, constraints, cost_model, table_stats=stats, sharders=sharders, pipeline=_PIPELINE
    )
    return {
        "plan": content,
        "plan_id": hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16],
        "plan_seconds": round(seconds, 3),
        "predicted_ms": round(simulated.rate(options), 3),
        "torchrec_rating_ms": rating,
    }


def plans_in_fresh_process(planners: Sequence[str], source: str, links: Links, cost_model: str) -> dict[str, Any]:
    """Planner -> :func:`plan`, made in a process whose hash seed is 0.

    Raises:
        RuntimeError: planning failed; the message went to standard error.
    """
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "plans.json"
        command = [sys.executable, "-m", "benchmarks.two_hosts_plans", "--source", source, "--planners", *planners]
        command += ["--link-gbps", str(links.link_gbps), "--intra-host-gb-per-s", str(links.intra_host_gb_per_s)]
        command += ["--cost-model", cost_model, "--out", str(out)]
        if subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": "0"}).returncode:
            raise RuntimeError(f"planning {source} failed; see above")
        result: dict[str, Any] = json.loads(out.read_text())
        return result


def quiet() -> None:
    """Leaves out what TorchRec and torch say of their own insides, for each planner and rank."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def plan_to_json(made: ShardingPlan) -> dict[str, Any]:
    """Table name -> {"sharding_type", "compute_kernel", "ranks", "shards": [[offset, size], ...]} of the one module."""
    (parameters,) = made.plan.values()
    assert isinstance(parameters, EmbeddingModuleShardingPlan)
    result = {}
    for name, entry in sorted(parameters.items()):
        assert entry.sharding_spec is None or isinstance(entry.sharding_spec, EnumerableShardingSpec)
        shards = [] if entry.sharding_spec is None else entry.sharding_spec.shards
        result[name] = {
            "sharding_type": entry.sharding_type,
            "compute_kernel": entry.compute_kernel,
            "ranks": entry.ranks,
            "shards": [[list(shard.shard_offsets), list(shard.shard_sizes)] for shard in shards],
        }
    return result


def plan_from_json(content: dict[str, Any]) -> ShardingPlan:
    """TorchRec's form of :func:`plan_to_json`, for :func:`bag_collection` as the whole model."""
    parameters = EmbeddingModuleShardingPlan()
    for name, entry in content.items():
        shards = [
            ShardMetadata(shard_offsets=offset, shard_sizes=size, placement=f"rank:{rank}/cpu")
            for (offset, size), rank in zip(entry["shards"], entry["ranks"])
        ]
        parameters[name] = ParameterSharding(
            sharding_type=entry["sharding_type"],
            compute_kernel=entry["compute_kernel"],
            ranks=entry["ranks"],
            sharding_spec=EnumerableShardingSpec(shards) if shards else None,
        )
    return ShardingPlan({"": parameters})


def _rating(options: list[ShardingOption]) -> float:
    """What TorchRec's planner minimises: its estimate of the slowest rank, in ms."""
    loads = [0.0] * RANKS
    for option in options:
        for shard in option.shards:
            assert shard.rank is not None and shard.perf is not None
            loads[shard.rank] += shard.perf.total
    return round(max(loads), 3)


def main() -> None:
    """Plans one workload."""
    parser = argparse.ArgumentParser(description="Plan one workload for the two-host comparison.")
    parser.add_argument("--source", required=True)
    parser.add_argument("--planners", nargs="+", choices=PLANNERS, required=True)
    parser.add_argument("--link-gbps", type=float, required=True)
    parser.add_argument("--intra-host-gb-per-s", type=float, required=True)
    parser.add_argument("--cost-model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    workload = load_two_hosts_source(args.source, RANKS)
    links = Links(args.link_gbps, args.intra_host_gb_per_s)
    plans = {planner: plan(planner, workload, links, args.cost_model) for planner in args.planners}
    args.out.write_text(json.dumps(plans))


if __name__ == "__main__":
    main()
