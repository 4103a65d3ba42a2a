"""Sharders for the comparison over all sharding types that run on a CPU, row_wise included."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder

from torchrec_neuroshard.adapters.workload_model import sharders
from torchrec_neuroshard.problem import COLUMN_WISE, DATA_PARALLEL, ROW_WISE, TABLE_WISE

# What NeuroShardPlanner is to choose from: it replicates only tables whose constraint names the type.
NAMED_TYPES = (TABLE_WISE, COLUMN_WISE, ROW_WISE, DATA_PARALLEL)
NAMED_KERNELS = ("fused", "dense")


class AllTypesSharder(EmbeddingBagCollectionSharder):
    """Offers row_wise on a CPU too, where gloo runs it although TorchRec does not offer it; data_parallel it offers."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """TorchRec's types for the device, and row_wise."""
        return list(dict.fromkeys([*super().sharding_types(compute_device_type), ROW_WISE]))


def chosen_sharders(choice: str) -> list[ModuleSharder[nn.Module]]:
    """The sharders that every planner is given.

    Args:
        choice: "default" (TorchRec's) or "all", see :data:`benchmarks.planners.SHARDERS`.
    """
    return [AllTypesSharder()] if choice == "all" else sharders()
