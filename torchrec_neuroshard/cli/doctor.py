"""``doctor``: says whether this installation works, and what it would plan with."""

from __future__ import annotations

import argparse
import platform

from rich.console import Console
from rich.table import Table

from torchrec_neuroshard._versions import StackError, check_tbe, clash, installed_stack, missing, unpaired


def run(options: argparse.Namespace) -> int:
    """Prints versions, checks, hardware and cost models; returns 0 when all checks pass, else 1."""
    console = Console(highlight=False)
    stack = installed_stack()
    table = Table("check", "result", title="torchrec_neuroshard doctor", title_justify="left")
    table.add_row("python", platform.python_version())
    for name, version in stack.versions.items():
        table.add_row(name, version)
    faults = missing(stack) + clash(stack) + unpaired(stack)
    table.add_row("versions fit", "no" if faults else "yes")
    if "torch" in stack.importable:
        _add_machine(table)
    if not missing(stack):
        try:
            table.add_row("a TBE runs on", check_tbe())
        except StackError as error:
            table.add_row("a TBE runs on", "nothing")
            faults.append(str(error))
    console.print(table)
    for fault in faults:
        console.print(f"PROBLEM: {fault}", markup=False)
    return 1 if faults else 0


def _add_machine(table: Table) -> None:
    import torch

    from torchrec_neuroshard.costs.hardware import detect_hardware
    from torchrec_neuroshard.costs.model import CostModel, CostModelError, shipped_models
    from torchrec_neuroshard.measure.hardware import hardware_fingerprint

    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        fingerprint = hardware_fingerprint(device)
        described = fingerprint["gpu"] if device == "cuda" else f"{fingerprint['cpu']}, {fingerprint['cores']} cores"
        table.add_row(device, f"{described} (preset {detect_hardware(device)})")
    if not torch.cuda.is_available():
        table.add_row("cuda", "none")
    names = shipped_models()
    table.add_row("shipped cost models", ", ".join(names) or "none: plans use the analytic prior")
    for name in names:
        try:
            table.add_row(f"  {name}", f"measured on {CostModel.load(name).hardware}")
        except CostModelError as error:
            table.add_row(f"  {name}", f"unusable: {error}")
