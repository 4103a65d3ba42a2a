"""Measured groups in the form of TorchRec's own cost formula: its ``HardwarePerfConfig`` coefficients.

TorchRec prices a shard as bytes of ids read, rows looked up and outputs written, each times a coefficient, over the
memory's bandwidth; forward of table-wise shards with at least 32 columns and a penalty for narrow ones. Fitted by
non-negative least squares on relative error, these coefficients serve users who keep TorchRec's planner. The formula
has no launch, no reuse of rows and no fusion, so the errors stated beside the coefficients are far above our models'.
"""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from torchrec_neuroshard.measure.specs import DATA_TYPES, GroupSpec

# Names of TorchRec's PerfCoefficient; a table's rows cost nothing by themselves.
MULTIPLIERS = ("input_read_size_multiplier", "lookup_size_multiplier", "embedding_output_multiplier")
MINIMUM_RECORDS = 20
_ID_BYTES = 8
_LEAST_COLUMNS = 32  # that TorchRec counts for a lookup of a table-wise shard
_NARROW = ((128, 1.0), (64, 1.15), (32, 1.75))  # (dim from which, penalty), FULL, HALF and QUARTER_BLOCK_PENALTY


def fit_torchrec_coefficients(records: Sequence[dict[str, Any]], bytes_per_ms: float) -> dict[str, Any] | None:
    """Fits TorchRec's formula to fused, pooled groups in the device's memory; None with too few of them.

    Args:
        records: group records of one machine.
        bytes_per_ms: bandwidth of the memory, by which the coefficients are scaled (``hbm_mem_bw`` on a GPU).

    Returns:
        A JSON object: coefficients by TorchRec's names for "table_wise" (column_wise, table_column_wise) and "row_wise"
        (table_row_wise, grid_shard), what TorchRec's form leaves out, and the errors.
    """
    usable = []
    for record in records:
        spec = GroupSpec.from_json(record["spec"])
        if spec.compute_kernel == "fused" and spec.pooling == "sum" and spec.lookups > 0:
            usable.append((spec, record))
    if len(usable) < MINIMUM_RECORDS:
        return None
    measured = np.asarray([[r["forward_ms"]["median"], r["backward_ms"]["median"]] for _, r in usable])
    specs = [spec for spec, _ in usable]
    plain = np.asarray([_sizes(spec, blocks=False) for spec in specs]) / bytes_per_ms
    blocks = np.asarray([_sizes(spec, blocks=True) for spec in specs]) / bytes_per_ms
    table_forward, launch_forward, table_error = _fit(blocks, measured[:, 0])
    row_forward, _, row_error = _fit(plain, measured[:, 0])
    backward, launch_backward, backward_error = _fit(plain, measured[:, 1])
    return {
        "mem_bw_bytes_per_ms": bytes_per_ms,
        "table_wise": {"fwd": table_forward, "bwd": backward},
        "row_wise": {"fwd": row_forward, "bwd": backward},
        "left_out_by_the_formula": {"launch_ms": [launch_forward, launch_backward]},
        "records": len(usable),
        "median_ape": {
            "table_wise_fwd": table_error,
            "row_wise_fwd": row_error,
            "bwd": backward_error,
        },
    }


def _sizes(spec: GroupSpec, blocks: bool) -> NDArray[np.float64]:
    """[3] bytes of ids, lookups and outputs of a group, with TorchRec's treatment of narrow shards or without."""
    total = np.zeros(len(MULTIPLIERS))
    for shard in spec.shards:
        lookups = spec.batch_size * shard.pooling_factor
        columns = max(shard.dim, _LEAST_COLUMNS) if blocks else shard.dim
        outputs = spec.batch_size * shard.num_features * shard.dim * 4.0
        sizes = np.asarray([lookups * _ID_BYTES, lookups * columns * DATA_TYPES[spec.data_type], outputs])
        total += sizes * (_block_penalty(shard.dim) if blocks else 1.0)
    return total


def _block_penalty(dim: int) -> float:
    """TorchRec's ``compute_block_usage_penalty``."""
    return next((penalty for least, penalty in _NARROW if dim >= least), _NARROW[-1][1])


def _fit(work_ms: NDArray[np.float64], measured: NDArray[np.float64]) -> tuple[dict[str, float], float, float]:
    """Coefficients by name, ms of a launch, and the median absolute percentage error of the formula without it."""
    design = np.column_stack([work_ms, np.ones(len(measured))]) / measured[:, None]
    scale = np.maximum(design.mean(axis=0), 1e-12)
    solution = nnls(design / scale, np.ones(len(measured)))[0] / scale
    error = np.abs(work_ms @ solution[:-1] / measured - 1.0)
    named = {name: round(float(value), 4) for name, value in zip(MULTIPLIERS, solution)}
    return named, round(float(solution[-1]), 5), round(float(np.median(error)), 4)
