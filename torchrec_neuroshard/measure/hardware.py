"""What a measurement ran on: a hardware fingerprint and the versions of what was timed."""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from torchrec_neuroshard import cuda
from torchrec_neuroshard.costs.hardware import cpu_caches, cpu_model, machine_name


@cache
def hardware_fingerprint(device_type: str) -> dict[str, Any]:
    """Describes the device under measurement; ``name`` tells kinds of machine apart.

    Args:
        device_type: "cpu" or "cuda".
    """
    host: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "caches": cpu_caches(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "transparent_hugepages": _transparent_hugepages(),
    }
    if device_type == "cuda":
        return {"name": machine_name("cuda"), "device": "cuda", **cuda.fingerprint(), **host}
    return {"name": machine_name("cpu"), "device": "cpu", **host}


@cache
def software_versions() -> dict[str, str]:
    """Versions of Python, torch, FBGEMM and TorchRec, where installed."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _transparent_hugepages() -> str:
    try:
        match = re.search(r"\[(\w+)\]", Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text())
    except OSError:
        return "unknown"
    return match.group(1) if match else "unknown"
