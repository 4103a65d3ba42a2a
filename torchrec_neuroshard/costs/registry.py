"""Choice of a cost model: what ``cost_model="auto"`` means."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from typing import Sequence

from torchrec_neuroshard.costs.hardware import HARDWARE, detect_hardware, gpu_preset, machine_name
from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models

logger = logging.getLogger(__name__)

_warned: set[str] = set()


def resolve_cost_model(spec: str | os.PathLike[str] | CostModel, device: str, hardware: str) -> CostModel:
    """Turns the ``cost_model`` argument of a planner into a model.

    Args:
        spec: "auto", the name of a shipped model, "analytic/PRESET", a folder, or a model.
        device: "cuda" or "cpu".
        hardware: name of the hardware that plans are made for.

    ``"auto"`` takes the shipped model of this hardware; on CPU, that of this machine's processor, else that of
    another one, which ranks groups better than data-sheet constants do (the shipped models on each other's records
    of plans: Kendall tau 0.75 and 0.59 against 0.38 and 0.27); for a GPU with a data sheet, the measured model of the
    GPU whose memory is nearest in bandwidth, scaled to it; else the analytic prior. What is not the machine's own model
    is said once.

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
        machine = machine_name("cpu")
        if machine in names:
            return CostModel.load(machine)
        if "cpu" in names:
            model = CostModel.load("cpu")
            if model.hardware != machine:
                # Collectives of ranks that shared another machine's cores say nothing about this one's.
                model = replace(model, collectives=CostModel.analytic("generic_cpu").collectives)
                _warn_once(
                    machine,
                    f"No cost model was measured on {machine}: plans are made with that of {model.hardware} cores. "
                    "Predicted times are off by a factor; which plan is better is told less surely. Collectives are "
                    f"predicted from data-sheet constants. {_remedy(device)}",
                )
            return model
    gpus = _shipped_gpus(names) if device == "cuda" else []
    own = next((model for model in gpus if _is_of(model, hardware)), None)
    if own is not None:
        return own
    nearest = _nearest(gpus, hardware)
    if nearest is not None:
        scaled = nearest.scaled_to(hardware)
        _warn_once(
            hardware,
            f"No cost model was measured on {hardware}: plans are made with that of {nearest.hardware}, scaled by the "
            "ratio of the data sheets' memory bandwidths; speeds of collectives are "
            f"{scaled.collectives_source}. {_remedy(device)}",
        )
        return scaled
    _warn_once(
        hardware,
        f"No measured cost model for {hardware}: plans are made with the analytic prior (data-sheet constants). "
        f"{_remedy(device)}",
    )
    return CostModel.analytic(hardware)


def _shipped_gpus(names: Sequence[str]) -> list[CostModel]:
    """The shipped models of GPUs; one that cannot be loaded is told and left out."""
    models = []
    for name in names:
        try:
            model = CostModel.load(name)
        except CostModelError as error:
            _warn_once(f"broken {name}", f"Cost model {name} is left out: {error}")
            continue
        if model.card["hardware"].get("gpu"):
            models.append(model)
    return models


def _is_of(model: CostModel, hardware: str) -> bool:
    """Whether a model was measured on this GPU: by its own name, by its preset, or by that of this machine's GPU."""
    preset = gpu_preset(str(model.card["hardware"]["gpu"]))
    return (
        hardware == model.hardware
        or (hardware == preset and HARDWARE[preset].has_data_sheet)
        or (hardware == detect_hardware("cuda") and model.hardware == machine_name("cuda"))
    )


def _nearest(gpus: Sequence[CostModel], hardware: str) -> CostModel | None:
    """The model of the GPU whose memory bandwidth is nearest; None without one or without data sheets."""
    target = HARDWARE.get(hardware)
    if target is None or not target.has_data_sheet:
        return None
    found = []
    for number, model in enumerate(gpus):
        source = HARDWARE[gpu_preset(str(model.card["hardware"]["gpu"]))]
        if source.has_data_sheet:
            found.append((abs(math.log(source.memory_gbps / target.memory_gbps)), number))
    return gpus[min(found)[1]] if found else None


def _warn_once(key: str, message: str) -> None:
    if key not in _warned:
        _warned.add(key)
        logger.warning(message)


def _remedy(device: str) -> str:
    return (
        f"`torchrec-neuroshard calibrate --device {device} --out DIR` measures this machine for ten minutes and fits a "
        "model to it; pass cost_model=DIR."
    )


__all__ = ["CostModelError", "resolve_cost_model"]
