"""The kinds of embedding modules that are planned, and those that are left to TorchRec's planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    convert_optimizer_type_and_kwargs,
)

PLANNED_KINDS = (
    "EmbeddingBagCollection",
    "FusedEmbeddingBagCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "EmbeddingCollection",
    "FusedEmbeddingCollection",
)

# Kinds whose tables TorchRec's planner places, and why: what they cost was never measured.
DELEGATED_KINDS: dict[str, str] = {
    "EmbeddingTower": "a tower's tables must lie on one host",
    "EmbeddingTowerCollection": "each tower's tables must lie on one host",
    "ManagedCollisionEmbeddingBagCollection": "ids are remapped on the ranks that hold the rows",
    "ManagedCollisionEmbeddingCollection": "ids are remapped on the ranks that hold the rows",
    "ITEPEmbeddingBagCollection": "rows are pruned in training",
    "ITEPEmbeddingCollection": "rows are pruned in training",
    "PECEmbeddingCollection": "its kernels were not measured",
    "EmbeddingBag": "a single table without a collection",
    "KeyedJaggedTensorPool": "a pool, not a table",
    "TensorPool": "a pool, not a table",
}
# Modules of torchrec.quant, which share names with the others.
_QUANTIZED = "torchrec.quant."


@dataclass(frozen=True)
class ModuleKind:
    """What planning needs to know of a module.

    Attributes:
        configs: of its tables.
        unpooled: rows are returned one by one, not summed over bags.
        weighted: lookups carry weights.
        processed: a feature processor computes those weights; TorchRec then cuts no rows unless it is told to.
        fused_params: which the module sets, over those of its sharder.
    """

    configs: Sequence[BaseEmbeddingConfig]
    unpooled: bool = False
    weighted: bool = False
    processed: bool = False
    fused_params: Mapping[str, Any] = field(default_factory=dict)


def module_kind(module: nn.Module) -> ModuleKind | None:
    """How the module's tables are looked up; None for kinds that are not planned."""
    if isinstance(module, EmbeddingBagCollection):
        return ModuleKind(module.embedding_bag_configs(), weighted=module.is_weighted())
    if isinstance(module, FeatureProcessedEmbeddingBagCollection):
        inner = module._embedding_bag_collection
        return ModuleKind(inner.embedding_bag_configs(), weighted=inner.is_weighted(), processed=True)
    if isinstance(module, FusedEmbeddingBagCollection):
        return ModuleKind(
            module.embedding_bag_configs(), weighted=module.is_weighted(), fused_params=_optimizer_params(module)
        )
    if isinstance(module, EmbeddingCollection):
        return ModuleKind(module.embedding_configs(), unpooled=True)
    if isinstance(module, FusedEmbeddingCollection):
        return ModuleKind(module.embedding_configs(), unpooled=True, fused_params=_optimizer_params(module))
    return None


def delegation_reason(module: nn.Module) -> str | None:
    """Why the module is left to TorchRec's planner; None where it is not."""
    if type(module).__module__.startswith(_QUANTIZED):
        return "it is quantized, for inference"
    return next((DELEGATED_KINDS[k.__name__] for k in type(module).__mro__ if k.__name__ in DELEGATED_KINDS), None)


def _optimizer_params(module: FusedEmbeddingBagCollection | FusedEmbeddingCollection) -> Mapping[str, Any]:
    """The optimizer that a fused collection brings along, as TorchRec hands it to FBGEMM."""
    converted = convert_optimizer_type_and_kwargs(module.optimizer_type(), module.optimizer_kwargs())
    return {} if converted is None else {"optimizer": converted[0]}
