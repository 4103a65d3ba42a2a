"""NeuroShard planner for TorchRec: pre-trained cost models and plan search.

Names are imported on first use, so that the rooms without TorchRec (``problem``, ``costs``, ``search``) can be used
without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_neuroshard.adapters.hardware_perf_config import torchrec_hardware_config
    from torchrec_neuroshard.adapters.saved_plan import PlanFile
    from torchrec_neuroshard.adapters.table_stats import TableStats
    from torchrec_neuroshard.costs.model import CostModel
    from torchrec_neuroshard.estimator import NeuroShardPerfEstimator
    from torchrec_neuroshard.perf_model import NeuroShardPerfModel
    from torchrec_neuroshard.planner import NeuroShardPlanner

__all__ = [
    "CostModel",
    "NeuroShardPerfEstimator",
    "NeuroShardPerfModel",
    "NeuroShardPlanner",
    "PlanFile",
    "TableStats",
    "torchrec_hardware_config",
]

_HOMES = {
    "CostModel": "torchrec_neuroshard.costs.model",
    "NeuroShardPerfEstimator": "torchrec_neuroshard.estimator",
    "NeuroShardPerfModel": "torchrec_neuroshard.perf_model",
    "NeuroShardPlanner": "torchrec_neuroshard.planner",
    "PlanFile": "torchrec_neuroshard.adapters.saved_plan",
    "TableStats": "torchrec_neuroshard.adapters.table_stats",
    "torchrec_hardware_config": "torchrec_neuroshard.adapters.hardware_perf_config",
}
_NEEDS_TORCHREC = set(__all__) - {"CostModel"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _NEEDS_TORCHREC:
        from torchrec_neuroshard._versions import require_stack

        require_stack()
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
