"""Finds the tables that a planner has to place, as TorchRec's ``EmbeddingEnumerator`` does, and what a plan may do."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Iterator, Mapping, Sequence

import torch
from torch import nn
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torchrec_neuroshard.access import ID_ORDERS
from torchrec_neuroshard.adapters.compat import error_type, fused_params_of, sharder_key
from torchrec_neuroshard.adapters.errors import unsupported
from torchrec_neuroshard.adapters.module_kinds import ModuleKind, delegation_reason, module_kind
from torchrec_neuroshard.adapters.names import qualified_name, unique_names
from torchrec_neuroshard.adapters.optimizers import FusedOptimizer, optimizer_of
from torchrec_neuroshard.adapters.table_constraints import allowed_options, check_device, check_numbers, pooling_of
from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.adapters.wire import grouping_settings, wire_bytes
from torchrec_neuroshard.problem import (
    COLUMN_WISE,
    DATA_PARALLEL,
    FUSED,
    GRID_SHARD,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    WIDTH_MULTIPLE,
    Table,
    TableOptions,
)

COLUMN_SPLITS = ("auto", "any", "never")

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
        even_width = self._even_width() if self.table.unpooled and COLUMN_WISE in self.sharding_types else 0
        return TableOptions(self.sharding_types, width, self.kernels or (FUSED,), load_factor, even_width)

    def _even_width(self) -> int:
        """Columns of each shard of a column-wise table of an EmbeddingCollection, by TorchRec's own rule.

        Its run time needs equal shards, in order: others fail, or are silently wrong.
        """
        dim = self.table.embedding_dim
        least = (self.constraints.min_partition if self.constraints is not None else None) or _TORCHREC_MIN_WIDTH
        return next((w for w in range(least, dim) if dim % w == 0 and w % WIDTH_MULTIPLE == 0), dim)


def collect_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[nn.Module]],
    constraints: Mapping[str, ParameterConstraints] | None,
    device: str,
    batch_size: int,
    table_stats: TableStats | None = None,
    whole_hosts: bool = True,
) -> tuple[ShardableTable, ...]:
    """Collects the tables that the sharders would shard, in the model's order, but those left to TorchRec's planner.

    Args:
        module: the model.
        sharders: TorchRec's sharders.
        constraints: the user's constraints by table name.
        device: compute device of the topology.
        batch_size: samples per rank.
        table_stats: measured pooling factors and access distributions.
        whole_hosts: whether all hosts have as many ranks; else rows cannot be cut within hosts, because TorchRec's
            run time then takes all ranks for one host.

    Raises:
        PlannerError: a table needs something that this version does not plan, or constraints leave nothing.
    """
    found = [entry for entry in shardable_tables(module, sharders) if delegation_reason(entry[1]) is None]
    names = unique_names([(path, name) for path, _, _, name, _ in found])
    types: dict[str, dict[str, list[str]]] = {}
    left_out: defaultdict[str, str] = defaultdict(str)
    kinds: dict[str, ModuleKind] = {}
    configs: dict[str, dict[str, BaseEmbeddingConfig]] = {}
    tables = []
    for unique, (path, child, sharder, name, parameter) in zip(names, found):
        full_name = qualified_name(path, name)
        if path not in kinds:
            kinds[path] = _kind_of(full_name, child)
            configs[path] = {config.name: config for config in kinds[path].configs}
        kind = kinds[path]
        key = sharder_key(type(child))
        if key not in types:
            offered = list(sharder.sharding_types(device))
            if kind.unpooled and device == "cpu" and DATA_PARALLEL in offered:
                offered.remove(DATA_PARALLEL)
                left_out[key] += f"; {DATA_PARALLEL} is left out, as FBGEMM's dense kernel sums sequences up on a CPU"
            if not whole_hosts:
                offered = [type_ for type_ in offered if type_ not in (TABLE_ROW_WISE, GRID_SHARD)]
                left_out[key] += (
                    "; what cuts rows within a host needs a world size that is a multiple of a host's ranks"
                )
            types[key] = {type_: list(sharder.compute_kernels(type_, device)) for type_ in offered}
        constraint = constraints.get(name) if constraints else None
        check_device(full_name, constraint, device)
        check_numbers(full_name, constraint)
        config = configs[path][name]
        allowed_types, kernels = allowed_options(full_name, constraint, types[key], kind.processed, left_out[key])
        if kind.unpooled and set(allowed_types) - {COLUMN_WISE, DATA_PARALLEL}:  # equal shards only: a last resort
            allowed_types = tuple(type_ for type_ in allowed_types if type_ != COLUMN_WISE)
        fused_params = {**fused_params_of(sharder), **kind.fused_params}
        optimizer = optimizer_of(parameter, fused_params)
        pooling, input_lengths = pooling_of(path, config, constraint, batch_size, table_stats)
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
                    weighted=kind.weighted,
                    data_type=_data_type(full_name, parameter),
                    optimizer=optimizer.cost_name,
                    access=table_stats.distribution(path, name) if table_stats else None,
                    module=path,
                    id_order=table_stats.id_order(path, name) if table_stats else ID_ORDERS[0],
                    unpooled=kind.unpooled,
                    wire_bytes=wire_bytes(sharder, fused_params, constraint, kind.unpooled),
                    settings=grouping_settings(constraint),
                ),
                sharding_types=allowed_types,
                kernels=kernels,
                optimizer=optimizer,
                input_lengths=input_lengths,
                constraints=constraint,
            )
        )
    _check_even_widths(tables)
    return tuple(tables)


def _check_even_widths(tables: Sequence[ShardableTable]) -> None:
    """Refuses column shards of several widths in one EmbeddingCollection, which fail at run time."""
    first: dict[str, tuple[str, int]] = {}
    for entry in tables:
        width = entry.options("auto").even_width
        other, other_width = first.setdefault(entry.module_path, (entry.name, width)) if width else ("", width)
        if width != other_width:
            raise PlannerError(
                f"Table {entry.name!r} would be cut into column shards of {width} and table {other!r} into such of "
                f"{other_width}, but all column-wise tables of an EmbeddingCollection need shards of one width. Give "
                "them the same min_partition in their ParameterConstraints.",
                error_type("STRICT_CONSTRAINTS"),
            )


def shardable_tables(
    module: nn.Module, sharders: Sequence[ModuleSharder[nn.Module]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[nn.Module], str, torch.Tensor]]:
    """All that the sharders would shard, in the model's order: module path, module, sharder, table name, weights."""
    by_key = {sharder_key(sharder.module_type): sharder for sharder in sharders}
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        path, child = stack.pop()
        sharder = by_key.get(sharder_key(type(child)))
        if sharder is None:
            stack.extend(
                (qualified_name(path, name), grandchild) for name, grandchild in reversed(list(child.named_children()))
            )
            continue
        for name, parameter in sharder.shardable_parameters(child).items():
            yield path, child, sharder, name, parameter


def _kind_of(table: str, module: nn.Module) -> ModuleKind:
    kind = module_kind(module)
    if kind is None:
        raise unsupported(table, f"{type(module).__name__} is not supported", _PLAN_APART)
    return kind


def _dim(table: str, config: BaseEmbeddingConfig, constraint: ParameterConstraints | None) -> int:
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
