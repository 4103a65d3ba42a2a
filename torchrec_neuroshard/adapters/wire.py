"""How wide values are that travel between ranks, and which kernel settings tables of one TBE share."""

from __future__ import annotations

from typing import Any, Mapping

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import CommOp, ModuleSharder
from torchrec.modules.embedding_configs import DATA_TYPE_NUM_BITS, DataType

_FP32_BYTES = 4.0
# Per-table settings by which TorchRec groups tables into TBEs, as it names them in ParameterConstraints.
_GROUPING = ("enforce_hbm", "stochastic_rounding", "bounds_check_mode", "output_dtype")


def wire_bytes(
    sharder: ModuleSharder[Any],
    fused_params: Mapping[str, Any],
    constraint: ParameterConstraints | None,
    unpooled: bool,
) -> float:
    """Bytes of an embedding value in the output collectives, the mean of forward and backward.

    A codec of the sharder's ``qcomm_codecs_registry`` says what travels; without one the lookup's output type does.

    Args:
        sharder: of the table's module.
        fused_params: may name the output type.
        constraint: the user's, which wins over it.
        unpooled: whether the table is one of sequences.
    """
    registry = getattr(sharder, "qcomm_codecs_registry", None) or {}
    operation = CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL if unpooled else CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL
    codecs = registry.get(operation.name)
    output = _output_bytes(fused_params, constraint)
    if codecs is None:
        return output
    return (_codec_bytes(codecs.forward, output) + _codec_bytes(codecs.backward, output)) / 2


def grouping_settings(constraint: ParameterConstraints | None) -> str:
    """What a table's constraint sets of the settings that all tables of a TBE share; "" for nothing."""
    values = {name: getattr(constraint, name, None) for name in _GROUPING}
    cache = getattr(constraint, "cache_params", None)
    if cache is not None:  # the load factor is averaged over the TBE's tables
        values |= {name: getattr(cache, name, None) for name in ("algorithm", "reserved_memory", "precision")}
        values["prefetch_pipeline"] = cache.prefetch_pipeline
    return ",".join(f"{name}={value}" for name, value in sorted(values.items()) if value is not None)


def _output_bytes(fused_params: Mapping[str, Any], constraint: ParameterConstraints | None) -> float:
    given = getattr(constraint, "output_dtype", None)
    if given is None:
        given = fused_params.get("output_dtype")
    if given is None:
        return _FP32_BYTES
    if isinstance(given, DataType):
        return DATA_TYPE_NUM_BITS[given] / 8
    return float(given.bit_rate()) / 8  # FBGEMM's SparseType


def _codec_bytes(codec: Any, otherwise: float) -> float:
    data_type = getattr(codec, "quantized_dtype", None)
    return float(torch.empty(0, dtype=data_type).element_size()) if isinstance(data_type, torch.dtype) else otherwise
