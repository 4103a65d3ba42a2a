"""What a run on a GPU brought home: records by kernel, time per record, and how far data-sheet constants are off.

    python -m benchmarks.gpu.summary OUTDIR

Writes OUTDIR/summary.json too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from torchrec_neuroshard.costs.hardware import gpu_preset, hardware_spec
from torchrec_neuroshard.costs.model import CostModel
from torchrec_neuroshard.measure.specs import GroupSpec
from torchrec_neuroshard.training.dataset import group_data
from torchrec_neuroshard.training.evaluate import predict_groups
from torchrec_neuroshard.training.host_link import host_memory_times
from torchrec_neuroshard.training.machine_records import MachineRecords, bandwidths_json


def summarize(folder: Path) -> dict[str, Any]:
    """Figures of a folder that ``run_all.sh`` filled."""
    records = MachineRecords.load([folder / "records.jsonl"])
    groups = [*records.groups, *records.host_memory]
    if not groups:
        raise ValueError(f"{folder / 'records.jsonl'}: there are no group records")
    described = groups[0]["hardware"]
    preset = hardware_spec(str(described.get("gpu", described["name"])), described["device"])
    tested = folder / "load_test.jsonl"
    load_test = [json.loads(line) for line in tested.read_text().splitlines()] if tested.exists() else []
    specs = [GroupSpec.from_json(record["spec"]) for record in groups]
    seconds = np.asarray([float(record["seconds"]) for record in groups])
    return {
        "hardware": described,
        "versions": groups[0]["versions"],
        "load_test": dict(Counter("passed" if case["passed"] else "failed" for case in load_test)),
        "records": dict(sorted(Counter(spec.compute_kernel for spec in specs).items())),
        "host_bound": sum(float(record.get("host_bound", 0.0)) > 0.1 for record in groups),
        "seconds_per_record": {"median": round(float(np.median(seconds)), 3), "mean": round(float(seconds.mean()), 3)},
        "bandwidths": bandwidths_json(records.bandwidths, preset),
        "analytic_prior": {preset.source: _analytic_errors(groups, specs, described)},
    }


def _analytic_errors(groups: list[dict[str, Any]], specs: list[GroupSpec], described: dict[str, Any]) -> dict[str, Any]:
    """Errors of the data sheet's constants by kernel and largest dim, and the median of predicted over measured."""
    on_gpu = described["device"] == "cuda"
    model = CostModel.analytic(gpu_preset(str(described["gpu"])) if on_gpu else "generic_cpu")
    data = group_data(groups)
    ratio = (predict_groups(model.groups, data) + host_memory_times(model, groups)).sum(axis=1) / data.measured_ms.sum(
        axis=1
    )
    result = {}
    kinds = [(spec.compute_kernel, int(2 ** np.ceil(np.log2(max(s.dim for s in spec.shards))))) for spec in specs]
    for kind in sorted(set(kinds)):
        of_kind = ratio[[other == kind for other in kinds]]
        result[f"{kind[0]}, dims up to {kind[1]}"] = {
            "records": len(of_kind),
            "median_ape": round(float(np.median(np.abs(of_kind - 1))), 3),
            "median_ratio": round(float(np.median(of_kind)), 3),
        }
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Prints and writes the figures."""
    parser = argparse.ArgumentParser(description="Summarise a folder that benchmarks/gpu/run_all.sh filled.")
    parser.add_argument("folder", type=Path, metavar="OUTDIR")
    folder = parser.parse_args(argv).folder
    try:
        summary = summarize(folder)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    text = json.dumps(summary, indent=1)
    (folder / "summary.json").write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
