"""Choice of a cost model: what ``cost_model="auto"`` means."""

from __future__ import annotations

import logging
import os

from torchrec_neuroshard.costs.hardware import machine_name
from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def resolve_cost_model(spec: str | os.PathLike[str] | CostModel, device: str, hardware: str) -> CostModel:
    """Turns the ``cost_model`` argument of a planner into a model.

    Args:
        spec: "auto", the name of a shipped model, "analytic/PRESET", a folder, or a model.
        device: "cuda" or "cpu".
        hardware: name of the hardware that plans are made for.

    ``"auto"`` takes the shipped model of this hardware; on CPU, that of this machine's processor, else the shipped
    CPU model, since CPU cores rank tables alike; else the analytic prior, and says so once.

    Raises:
        CostModelError: the named model does not exist or cannot be loaded.
    """
    if isinstance(spec, CostModel):
        return spec
    if spec != "auto":
        text = str(spec)
        if not text:
            raise CostModelError(f"cost_model is empty; give 'auto', a folder or one of {', '.join(shipped_models())}")
        if text.startswith("analytic/"):
            return CostModel.analytic(text.removeprefix("analytic/"))
        return CostModel.load(spec)
    names = shipped_models()
    if hardware in names:
        return CostModel.load(hardware)
    if device == "cpu":
        for name in (machine_name("cpu"), "cpu"):
            if name in names:
                return CostModel.load(name)
    if hardware not in _warned:
        _warned.add(hardware)
        logger.warning(
            "No measured cost model for %s: plans are made with the analytic prior (data-sheet constants). Measure "
            "this machine with `torchrec-neuroshard measure compute --device %s --out records.jsonl`, then train "
            "with `python -m torchrec_neuroshard.training --records records.jsonl --out DIR` and pass cost_model=DIR.",
            hardware,
            device,
        )
    return CostModel.analytic(hardware)


__all__ = ["CostModelError", "resolve_cost_model"]
