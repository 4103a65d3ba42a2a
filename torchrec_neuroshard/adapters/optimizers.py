"""The optimizer fused into a table's backward pass: which one, what state it keeps, whether columns are independent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

import torch

_STATE_BYTES = 4  # FBGEMM keeps optimizer state in fp32, whatever the weights are


@dataclass(frozen=True)
class FusedOptimizer:
    """What planning needs to know of an optimizer.

    Attributes:
        cost_name: optimizer of the cost models that reads and writes the same state (see ``problem.Table``).
        elementwise: a column split leaves the updates unchanged.
        full_states: states with one value per weight.
        row_states: states with one value per row *and shard*.
    """

    cost_name: str
    elementwise: bool
    full_states: int = 0
    row_states: int = 0

    def state_bytes(self, rows: int, width: int) -> int:
        """Bytes of state of a shard of ``rows`` x ``width``."""
        return (self.full_states * rows * width + self.row_states * rows) * _STATE_BYTES


_SGD = FusedOptimizer("sgd", True)
_ADAGRAD = FusedOptimizer("adagrad", True, full_states=1)
_ADAM = FusedOptimizer("adam", True, full_states=2)
_ROWWISE_ADAGRAD = FusedOptimizer("rowwise_adagrad", False, row_states=1)
_PARTIAL_ROWWISE = FusedOptimizer("adagrad", False, full_states=1, row_states=1)
# An optimizer nobody here knows: treated as row-wise, and with the one state that TorchRec assumes.
_UNKNOWN = FusedOptimizer("adagrad", False, full_states=1)

# By the value of fbgemm's EmbOptimType. LAMB and LARS scale by the norm of a whole row or table.
_BY_FBGEMM_VALUE: dict[str, FusedOptimizer] = {
    "sgd": _SGD,
    "exact_sgd": _SGD,
    "none": _SGD,
    "exact_adagrad": _ADAGRAD,
    "adam": _ADAM,
    "exact_row_wise_adagrad": _ROWWISE_ADAGRAD,
    "row_wise_adagrad": _ROWWISE_ADAGRAD,
    "partial_row_wise_adam": _PARTIAL_ROWWISE,
    "partial_row_wise_lamb": _PARTIAL_ROWWISE,
    "lamb": FusedOptimizer("adam", False, full_states=2),
    "lars_sgd": FusedOptimizer("adagrad", False, full_states=1),
}

# By the name of the class given to apply_optimizer_in_backward (torch.optim's and torchrec.optim's agree).
_BY_CLASS_NAME: dict[str, FusedOptimizer] = {
    "SGD": _SGD,
    "Adagrad": _ADAGRAD,
    "Adam": _ADAM,
    "RowWiseAdagrad": _ROWWISE_ADAGRAD,
    "PartialRowWiseAdam": _PARTIAL_ROWWISE,
    "PartialRowWiseLAMB": _PARTIAL_ROWWISE,
    "LAMB": _BY_FBGEMM_VALUE["lamb"],
    "LarsSGD": _BY_FBGEMM_VALUE["lars_sgd"],
}

_BY_COST_NAME = {"sgd": _SGD, "adagrad": _ADAGRAD, "adam": _ADAM, "rowwise_adagrad": _ROWWISE_ADAGRAD}


def optimizer_of(
    parameter: torch.Tensor, fused_params: Mapping[str, Any], default: FusedOptimizer = _SGD
) -> FusedOptimizer:
    """The optimizer that TorchRec will fuse into the backward pass of a parameter.

    As in TorchRec, one set by ``apply_optimizer_in_backward`` wins over the sharder's fused params; with
    neither, FBGEMM's default EXACT_SGD runs.

    Args:
        parameter: the table's parameter.
        fused_params: the sharder's fused params.
        default: what to assume when neither says anything.
    """
    optimizer_class = getattr(parameter, "_optimizer_classes", [None])[0]
    keywords = getattr(parameter, "_optimizer_kwargs", [{}])[0]
    explicit = keywords.get("optimizer")
    if explicit is None and optimizer_class is not None:
        return _BY_CLASS_NAME.get(optimizer_class.__name__, _UNKNOWN)
    explicit = explicit if explicit is not None else fused_params.get("optimizer")
    if explicit is None:
        return default
    return _BY_FBGEMM_VALUE.get(str(getattr(explicit, "value", explicit)), _UNKNOWN)


def optimizer_by_name(name: str) -> FusedOptimizer:
    """The optimizer of a cost model's name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _BY_COST_NAME:
        raise ValueError(f"optimizer must be one of {', '.join(_BY_COST_NAME)}, got {name!r}")
    return _BY_COST_NAME[name]
