"""A workload as TorchRec sees it: embedding modules without memory behind them, and what planners are told."""

from __future__ import annotations

from typing import Any, Iterable, Mapping

import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CacheParams, ModuleSharder
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_neuroshard.adapters.table_stats import TableStats
from torchrec_neuroshard.workload import Workload

_DATA_TYPES = {"fp32": DataType.FP32, "fp16": DataType.FP16}
_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "adam": torch.optim.Adam,
}
_LEARNING_RATE = 0.01


class WorkloadModel(nn.Module):
    """Holds a workload's tables, the weighted ones apart: one collection takes per-sample weights or it does not.

    Sequence tables are in one collection for each width, because an EmbeddingCollection has one. A collection without
    tables is absent.

    Attributes:
        ebc: the unweighted tables.
        weighted_ebc: the weighted tables.
        ec_64, ...: the sequence tables of 64 columns, and so on.
    """

    def __init__(self, workload: Workload, device: torch.device) -> None:
        super().__init__()
        for name, weighted in (("ebc", False), ("weighted_ebc", True)):
            configs = embedding_configs(workload, weighted)
            if configs:
                self.add_module(name, EmbeddingBagCollection(configs, is_weighted=weighted, device=device))
        for dim in sorted({table.embedding_dim for table in workload.tables if table.unpooled}):
            self.add_module(f"ec_{dim}", EmbeddingCollection(_sequence_configs(workload, dim), device=device))


def embedding_configs(workload: Workload, weighted: bool) -> list[EmbeddingBagConfig]:
    """TorchRec's configs of the weighted, or of the unweighted, pooled tables of a workload."""
    return [
        EmbeddingBagConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            feature_names=list(features),
            data_type=_DATA_TYPES[table.data_type],
        )
        for table, features in zip(workload.tables, workload.features)
        if table.weighted == weighted and not table.unpooled
    ]


def _sequence_configs(workload: Workload, dim: int) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name=table.name,
            num_embeddings=table.num_embeddings,
            embedding_dim=dim,
            feature_names=list(features),
            data_type=_DATA_TYPES[table.data_type],
        )
        for table, features in zip(workload.tables, workload.features)
        if table.unpooled and table.embedding_dim == dim
    ]


def embedding_model(workload: Workload, device: str = "meta") -> nn.Module:
    """Builds a workload's embedding modules, with its optimizer fused into the backward pass.

    The optimizer is attached to the parameters, because TorchRec's storage estimator looks for it there only.

    Args:
        workload: the tables.
        device: where the weights live; "meta" needs no memory.
    """
    model = WorkloadModel(workload, torch.device(device))
    # One module never mixes optimizers: a workload has one.
    optimizer = _OPTIMIZERS[workload.tables[0].optimizer]
    _apply_optimizer_in_backward(optimizer, model.parameters(), {"lr": _LEARNING_RATE})
    return model


def sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for :func:`embedding_model`."""
    return [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]


def parameter_constraints(
    workload: Workload,
    sharding_types: Iterable[str] | None = None,
    compute_kernels: Iterable[str] | None = None,
    min_partition: int | None = None,
) -> dict[str, ParameterConstraints]:
    """True pooling factors of every feature, and what the workload file demands of a table.

    Args:
        workload: the tables.
        sharding_types: allowed for tables whose file entry does not say; None allows all.
        compute_kernels: allowed for tables whose file entry does not say; None allows all.
        min_partition: narrowest column shard of tables whose file entry does not say; None is TorchRec's.
    """
    defaults: dict[str, Any] = {
        "sharding_types": None if sharding_types is None else list(sharding_types),
        "compute_kernels": None if compute_kernels is None else list(compute_kernels),
        "min_partition": min_partition,
    }
    return {
        table.name: ParameterConstraints(
            pooling_factors=list(pooling),
            is_weighted=table.weighted,
            cache_params=_cache_params(workload.caches.get(table.name)),
            feature_names=list(features),
            **{**defaults, **workload.constraints.get(table.name, {})},
        )
        for table, pooling, features in zip(workload.tables, workload.feature_pooling, workload.features)
    }


def table_stats(workload: Workload) -> TableStats:
    """Pooling factors and id orders of all tables, and the access distributions of those that have one."""
    return TableStats(
        pooling_factors={table.name: table.pooling_factor for table in workload.tables},
        access={table.name: table.access for table in workload.tables if table.access is not None},
        id_orders={table.name: table.id_order for table in workload.tables},
    )


def _cache_params(fields: Mapping[str, Any] | None) -> CacheParams | None:
    return CacheParams(**fields) if fields else None
