"""What a table's ``ParameterConstraints`` and its sharder leave to a plan, and what they say of its input."""

from __future__ import annotations

import math
from typing import Any, Mapping, Sequence

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_neuroshard.adapters.compat import error_type
from torchrec_neuroshard.adapters.errors import unsupported
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.problem import (
    COLUMN_TYPES,
    COLUMN_WISE,
    DATA_PARALLEL,
    FUSED_KERNELS,
    GRID_SHARD,
    PLANNED_KERNELS,
    ROW_TYPES,
    SPREAD_TYPES,
    TABLE_COLUMN_WISE,
)

DENSE = EmbeddingComputeKernel.DENSE.value

# The sharding types that are planned.
SHARDING_TYPES = (*COLUMN_TYPES, *SPREAD_TYPES)

# Types that only a constraint that names them allows: a data-parallel table has no fused optimizer (one that the user
# gave to the sharder would silently be lost, and the table stay as it is); TorchRec considers grids only when asked to.
_NAMED_ONLY = (DATA_PARALLEL, GRID_SHARD)


def allowed_options(
    table: str,
    constraint: ParameterConstraints | None,
    offered: Mapping[str, Sequence[str]],
    processed: bool,
    left_out: str = "",
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Types, and kernels with a fused optimizer, that the sharder offers and the constraints allow.

    Args:
        table: its name, for errors.
        constraint: the user's.
        offered: the sharder's kernels by sharding type.
        left_out: what the sharder offers beside, and why it is left out; for errors.
        processed: the table's module processes features; rows are then cut only where a constraint names the type, as
            in TorchRec, since a processor may go by position.
    """
    wanted_types = constraint.sharding_types if constraint else None
    wanted_kernels = constraint.compute_kernels if constraint else None
    left = {
        kind: [kernel for kernel in kernels if not wanted_kernels or kernel in wanted_kernels]
        for kind, kernels in offered.items()
        if not wanted_types or kind in wanted_types
    }
    planned = PLANNED_KERNELS if wanted_kernels else FUSED_KERNELS
    fused = {kind: [kernel for kernel in planned if kernel in left[kind]] for kind in left}
    named_only = (*_NAMED_ONLY, *ROW_TYPES) if processed else _NAMED_ONLY
    allowed = [
        kind
        for kind in SHARDING_TYPES
        if (DENSE in left.get(kind, ()) if kind == DATA_PARALLEL else fused.get(kind))
        and (kind not in named_only or kind in (wanted_types or ()))
    ]
    if COLUMN_WISE in allowed and TABLE_COLUMN_WISE in allowed:
        allowed.remove(TABLE_COLUMN_WISE)  # the run time serves both by the same code, wherever the shards lie
    by_fused_types = [fused[kind] for kind in allowed if kind != DATA_PARALLEL]
    kernels = [kernel for kernel in planned if by_fused_types and all(kernel in some for some in by_fused_types)]
    if allowed and (kernels or not by_fused_types):
        return tuple(allowed), tuple(kernels)
    pairs = [f"{kind} with kernel {kernel}" for kind, kernels in left.items() for kernel in kernels]
    if not pairs:
        raise PlannerError(
            f"Table {table!r}: no sharding type and compute kernel is left. The constraints ask for sharding types "
            f"{wanted_types or 'any'} and kernels {wanted_kernels or 'any'}, the sharder offers {dict(offered)}"
            f"{left_out}. Relax the constraints or use a sharder that offers them.",
            error_type("STRICT_CONSTRAINTS"),
        )
    raise unsupported(
        table,
        f"its constraints leave only {', '.join(pairs)}, which is not supported",
        "Allow a fused kernel (fused, fused_uvm_caching, fused_uvm, key_value), or data_parallel with the dense one, "
        "in its ParameterConstraints, or plan its module with TorchRec's planner.",
    )


def check_device(table: str, constraint: ParameterConstraints | None, device: str) -> None:
    """Refuses a constraint on another device, for which TorchRec would leave the table out of the plan."""
    group = getattr(constraint, "device_group", None)
    if group and group != device:
        raise unsupported(
            table,
            f"its constraint device_group={group!r} does not match the topology's compute device {device!r}, so it "
            "would be left out of the plan and fail at sharding time",
            f"Remove device_group, or plan the module with a topology for {group!r}.",
        )


def check_numbers(table: str, constraint: ParameterConstraints | None) -> None:
    """Refuses numbers that TorchRec would trip over without naming the table."""
    if constraint is None:
        return
    lengths = constraint.pooling_factors
    if not lengths or not all(math.isfinite(length) and length >= 0 for length in lengths):
        raise PlannerError(
            f"Table {table!r}: pooling_factors in its ParameterConstraints must be numbers of at least 0, "
            f"got {lengths}",
            error_type("INPUT_VALIDATION"),
        )
    for name in ("num_poolings", "batch_sizes"):
        values = getattr(constraint, name) or lengths
        if len(values) != len(lengths) or not all(math.isfinite(value) and value >= 0 for value in values):
            raise PlannerError(
                f"Table {table!r}: {name} in its ParameterConstraints must be numbers of at least 0, one for each of "
                f"its {len(lengths)} pooling_factors, got {values}",
                error_type("INPUT_VALIDATION"),
            )
    if constraint.min_partition is not None and constraint.min_partition < 1:
        raise PlannerError(
            f"Table {table!r}: min_partition in its ParameterConstraints must be at least 1 column, "
            f"got {constraint.min_partition}",
            error_type("INPUT_VALIDATION"),
        )


def pooling_of(
    path: str,
    config: BaseEmbeddingConfig,
    constraint: ParameterConstraints | None,
    batch_size: int,
    table_stats: TableStats | None,
) -> tuple[float, tuple[float, ...]]:
    """(mean ids per sample over all features, TorchRec's input lengths).

    Measured statistics win over the constraints' pooling factors, and those over one id per feature and sample.
    """
    features = max(1, len(config.feature_names))
    weights = _sample_weights(constraint, batch_size)
    measured = table_stats.pooling_factor(path, config.name) if table_stats else None
    if measured is not None:
        inputs = len(weights) if weights else features
        per_input = measured / (math.fsum(weights) if weights else features)
        return measured, (per_input,) * inputs
    lengths = tuple(float(length) for length in constraint.pooling_factors) if constraint else (1.0,)
    if weights:
        return math.fsum(length * weight for length, weight in zip(lengths, weights)), lengths
    if lengths == (1.0,):  # TorchRec's default, whatever the number of features
        lengths = (1.0,) * features
    return math.fsum(lengths), lengths


def _sample_weights(constraint: ParameterConstraints | None, batch_size: int) -> list[float]:
    """[inputs] poolings per sample of the planner's batch, from ``num_poolings`` and ``batch_sizes``; [] without."""
    if constraint is None or not (constraint.num_poolings or constraint.batch_sizes):
        return []
    count = len(constraint.pooling_factors)
    poolings: Sequence[Any] = constraint.num_poolings or [1.0] * count
    sizes: Sequence[Any] = constraint.batch_sizes or [batch_size] * count
    return [float(pooling) * float(size) / batch_size for pooling, size in zip(poolings, sizes)]
