"""Finds the tables that a planner has to place, as TorchRec's ``EmbeddingEnumerator`` does, and what a plan may do."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Iterator, Mapping, Sequence

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_neuroshard.access import ID_ORDERS
from torchrec_neuroshard.adapters.compat import error_type, fused_params_of, sharder_key
from torchrec_neuroshard.adapters.errors import unsupported
from torchrec_neuroshard.adapters.names import qualified_name, unique_names
from torchrec_neuroshard.adapters.optimizers import FusedOptimizer, optimizer_of
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.problem import (
    COLUMN_TYPES,
    COLUMN_WISE,
    DATA_PARALLEL,
    FUSED,
    FUSED_KERNELS,
    GRID_SHARD,
    SPREAD_TYPES,
    TABLE_COLUMN_WISE,
    WIDTH_MULTIPLE,
    Table,
    TableOptions,
)

COLUMN_SPLITS = ("auto", "any", "never")

DENSE = EmbeddingComputeKernel.DENSE.value

# The sharding types that are planned.
SHARDING_TYPES = (*COLUMN_TYPES, *SPREAD_TYPES)

# Types that only a constraint that names them allows: a data-parallel table has no fused optimizer (one that the user
# gave to the sharder would silently be lost, and the table stay as it is); TorchRec considers grids only when asked to.
_NAMED_ONLY = (DATA_PARALLEL, GRID_SHARD)

# Columns below which a split never pays, for optimizers that do not mind how columns are cut.
_AUTO_MIN_WIDTH = 16
# TorchRec's own default min_partition, kept for optimizers whose numerics a split changes.
_TORCHREC_MIN_WIDTH = 128

DATA_TYPES: dict[torch.dtype, str] = {torch.float32: "fp32", torch.float16: "fp16"}

_PLAN_APART = (
    "Plan that module with TorchRec's planner and add its part: "
    "plan.plan.update(EmbeddingShardingPlanner(...).plan(model, [its sharder]).plan), "
    "and give NeuroShardPlanner only [EmbeddingBagCollectionSharder()]."
)


@dataclass(frozen=True, eq=False)
class ShardableTable:
    """A table of the model, both as TorchRec and as the search sees it.

    Attributes:
        name: TorchRec's name, unique within its module.
        module_path: path of the module in the model.
        module: the module.
        sharder: the sharder of the module.
        parameter: the weights, often on the meta device.
        table: the table as the search sees it.
        sharding_types: allowed types.
        kernels: allowed kernels of the types whose optimizer is fused; () where there is none.
        optimizer: the optimizer fused into its backward pass.
        input_lengths: [inputs] pooling factors as TorchRec's ShardingOption takes them.
        constraints: the user's constraints; None without any.
    """

    name: str
    module_path: str
    module: nn.Module
    sharder: ModuleSharder[nn.Module]
    parameter: torch.Tensor
    table: Table
    sharding_types: tuple[str, ...]
    kernels: tuple[str, ...]
    optimizer: FusedOptimizer
    input_lengths: tuple[float, ...]
    constraints: ParameterConstraints | None

    def with_kernel(self, kernel: str, load_factor: float) -> ShardableTable:
        """The table with this kernel, and this share of its rows in the cache."""
        if (kernel, load_factor) == (self.table.kernel, self.table.load_factor):
            return self
        return replace(self, table=replace(self.table, kernel=kernel, load_factor=load_factor))

    def options(self, column_split: str) -> TableOptions:
        """What a plan may do with the table.

        Args:
            column_split: "never": no splits; "any": shards of 4 columns and more; "auto": any sensible split for
                optimizers that a split leaves alone (SGD, Adagrad, Adam), TorchRec's 128 columns and more for
                others (row-wise Adagrad). The user's ``min_partition`` wins over the last two.
        """
        dim = self.table.embedding_dim
        if column_split == "never" or not set(self.sharding_types) & {COLUMN_WISE, TABLE_COLUMN_WISE, GRID_SHARD}:
            width = dim
        elif self.constraints is not None and self.constraints.min_partition:
            width = self.constraints.min_partition
        elif column_split == "any":
            width = WIDTH_MULTIPLE
        else:
            width = _AUTO_MIN_WIDTH if self.optimizer.elementwise else _TORCHREC_MIN_WIDTH
        width = min(dim, -(-width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        cache = self.constraints.cache_params if self.constraints is not None else None
        load_factor = cache.load_factor if cache is not None else None
        return TableOptions(self.sharding_types, width, self.kernels or (FUSED,), load_factor)


def collect_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    device: str,
    batch_size: int,
    table_stats: TableStats | None = None,
) -> tuple[ShardableTable, ...]:
    """Collects every table that the sharders would shard, in the model's order.

    Args:
        module: the model.
        sharders: TorchRec's sharders.
        constraints: the user's constraints by table name.
        device: compute device of the topology.
        batch_size: samples per rank.
        table_stats: measured pooling factors and access distributions.

    Raises:
        PlannerError: a table needs something that this version does not plan, or constraints leave nothing.
    """
    found = list(_shardable(module, {sharder_key(sharder.module_type): sharder for sharder in sharders}))
    names = unique_names([(path, name) for path, _, _, name, _ in found])
    types: dict[str, dict[str, list[str]]] = {}
    configs: dict[str, dict[str, EmbeddingBagConfig]] = {}
    tables = []
    for unique, (path, child, sharder, name, parameter) in zip(names, found):
        full_name = qualified_name(path, name)
        if not isinstance(child, EmbeddingBagCollection):
            raise unsupported(full_name, f"{type(child).__name__} is not supported", _PLAN_APART)
        key = sharder_key(type(child))
        if key not in types:
            types[key] = {kind: list(sharder.compute_kernels(kind, device)) for kind in sharder.sharding_types(device)}
        if path not in configs:
            configs[path] = {config.name: config for config in child.embedding_bag_configs()}
        constraint = constraints.get(name) if constraints else None
        _check_device(full_name, constraint, device)
        _check_numbers(full_name, constraint)
        config = configs[path][name]
        allowed_types, kernels = _allowed(full_name, constraint, types[key])
        optimizer = optimizer_of(parameter, fused_params_of(sharder))
        pooling, input_lengths = _pooling(path, config, constraint, batch_size, table_stats)
        tables.append(
            ShardableTable(
                name=name,
                module_path=path,
                module=child,
                sharder=sharder,
                parameter=parameter,
                table=Table(
                    name=unique,
                    num_embeddings=config.num_embeddings,
                    embedding_dim=_dim(full_name, config, constraint),
                    pooling_factor=pooling,
                    num_features=max(1, len(config.feature_names)),
                    weighted=child.is_weighted(),
                    data_type=_data_type(full_name, parameter),
                    optimizer=optimizer.cost_name,
                    access=table_stats.distribution(path, name) if table_stats else None,
                    module=path,
                    id_order=table_stats.id_order(path, name) if table_stats else ID_ORDERS[0],
                ),
                sharding_types=allowed_types,
                kernels=kernels,
                optimizer=optimizer,
                input_lengths=input_lengths,
                constraints=constraint,
            )
        )
    return tuple(tables)


def _shardable(
    module: nn.Module, sharders: Mapping[str, ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module], str, torch.Tensor]]:
    """(module path, module, sharder, table name, weights) of all that the sharders would shard."""
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        path, child = stack.pop()
        sharder = sharders.get(sharder_key(type(child)))
        if sharder is None:
            stack.extend(
                (qualified_name(path, name), grandchild) for name, grandchild in reversed(list(child.named_children()))
            )
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            yield path, child, sharder, name, parameter


def _allowed(
    table: str, constraint: ParameterConstraints | None, offered: Mapping[str, Sequence[str]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Types, and kernels with a fused optimizer, that the sharder offers and the constraints allow."""
    wanted_types = constraint.sharding_types if constraint else None
    wanted_kernels = constraint.compute_kernels if constraint else None
    left = {
        kind: [kernel for kernel in kernels if not wanted_kernels or kernel in wanted_kernels]
        for kind, kernels in offered.items()
        if not wanted_types or kind in wanted_types
    }
    fused = {kind: [kernel for kernel in FUSED_KERNELS if kernel in left[kind]] for kind in left}
    allowed = [
        kind
        for kind in SHARDING_TYPES
        if (DENSE in left.get(kind, ()) if kind == DATA_PARALLEL else fused.get(kind))
        and (kind not in _NAMED_ONLY or kind in (wanted_types or ()))
    ]
    if COLUMN_WISE in allowed and TABLE_COLUMN_WISE in allowed:
        allowed.remove(TABLE_COLUMN_WISE)  # the run time serves both by the same code, wherever the shards lie
    by_fused_types = [fused[kind] for kind in allowed if kind != DATA_PARALLEL]
    kernels = [kernel for kernel in FUSED_KERNELS if by_fused_types and all(kernel in some for some in by_fused_types)]
    if allowed and (kernels or not by_fused_types):
        return tuple(allowed), tuple(kernels)
    pairs = [f"{kind} with kernel {kernel}" for kind, kernels in left.items() for kernel in kernels]
    if not pairs:
        raise PlannerError(
            f"Table {table!r}: no sharding type and compute kernel is left. The constraints ask for sharding types "
            f"{wanted_types or 'any'} and kernels {wanted_kernels or 'any'}, the sharder offers {dict(offered)}. "
            "Relax the constraints or use a sharder that offers them.",
            error_type("STRICT_CONSTRAINTS"),
        )
    raise unsupported(
        table,
        f"its constraints leave only {', '.join(pairs)}, which is not supported",
        "Allow a fused kernel (fused, fused_uvm_caching, fused_uvm), or data_parallel with the dense one, in its "
        "ParameterConstraints, or plan its module with TorchRec's planner.",
    )


def _check_device(table: str, constraint: ParameterConstraints | None, device: str) -> None:
    group = getattr(constraint, "device_group", None)
    if group and group != device:
        raise unsupported(
            table,
            f"its constraint device_group={group!r} does not match the topology's compute device {device!r}, so it "
            "would be left out of the plan and fail at sharding time",
            f"Remove device_group, or plan the module with a topology for {group!r}.",
        )


def _check_numbers(table: str, constraint: ParameterConstraints | None) -> None:
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


def _dim(table: str, config: EmbeddingBagConfig, constraint: ParameterConstraints | None) -> int:
    if getattr(config, "use_virtual_table", False) or getattr(constraint, "use_virtual_table", False):
        raise unsupported(table, "virtual tables (use_virtual_table) are not supported", _PLAN_APART)
    if config.embedding_dim % WIDTH_MULTIPLE:
        raise unsupported(
            table,
            f"embedding_dim is {config.embedding_dim}, but FBGEMM's fused kernel needs a multiple of {WIDTH_MULTIPLE}",
            "Round embedding_dim up.",
        )
    return int(config.embedding_dim)


def _data_type(table: str, parameter: torch.Tensor) -> str:
    if parameter.dtype not in DATA_TYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DATA_TYPES)
        raise unsupported(
            table, f"weights of type {parameter.dtype} are not supported (only {known})", "Change its data_type."
        )
    return DATA_TYPES[parameter.dtype]


def _pooling(
    path: str,
    config: EmbeddingBagConfig,
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
