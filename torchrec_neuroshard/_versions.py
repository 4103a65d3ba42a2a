"""Which torch, TorchRec and FBGEMM are installed, and whether they belong together.

The three are released together, and FBGEMM's binary fits one minor version of torch only. None of them is a
dependency in this package's metadata (pip could replace a GPU user's nightly), so the check is made here, before
TorchRec is first imported. ``python -m torchrec_neuroshard._versions`` also runs a small TBE.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import warnings
from dataclasses import dataclass
from importlib import metadata

# torch minor version -> minor version of torchrec and fbgemm released with it.
PAIRS: dict[str, str] = {"2.11": "1.6", "2.12": "1.7", "2.13": "1.8", "2.14": "1.9"}

_DISTRIBUTIONS = {
    "torch": ("torch",),
    "torchrec": ("torchrec", "torchrec-nightly"),
    "fbgemm_gpu": ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu"),
}
_REINSTALL = "`make setup` in a checkout does it; by hand, install torch first, then both others with --no-deps"


class StackError(ImportError):
    """torch, TorchRec and FBGEMM cannot be used together; the message names the package and the remedy."""


@dataclass(frozen=True)
class Stack:
    """What is installed.

    Attributes:
        importable: names among torch, torchrec and fbgemm_gpu that Python can find.
        versions: distribution name -> version, for every distribution of the three.
    """

    importable: frozenset[str]
    versions: dict[str, str]

    def distributions(self, module: str) -> list[str]:
        """Installed distributions that provide a module; more than one clash."""
        return [name for name in _DISTRIBUTIONS[module] if name in self.versions]

    def version(self, module: str) -> str | None:
        """Version of a module's distribution; None when it has no metadata (a source tree on PYTHONPATH)."""
        names = self.distributions(module)
        return self.versions[names[0]] if names else None


def installed_stack() -> Stack:
    """Looks up what is installed, without importing any of it."""
    versions = {}
    for names in _DISTRIBUTIONS.values():
        for name in names:
            try:
                versions[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    return Stack(frozenset(name for name in _DISTRIBUTIONS if importlib.util.find_spec(name) is not None), versions)


def missing(stack: Stack) -> list[str]:
    """Says which of the three is missing, and how to get it."""
    faults = []
    for module in _DISTRIBUTIONS:
        if module in stack.importable:
            continue
        wanted = "fbgemm-gpu-cpu (or fbgemm-gpu on CUDA)" if module == "fbgemm_gpu" else module
        torch_minor = _minor(stack.version("torch"))
        release = PAIRS.get(torch_minor or "")
        if release and module != "torch":
            wanted += f" {release} (pairs with torch {torch_minor})"
        faults.append(f"{module} is not installed; install {wanted}: {_REINSTALL}")
    return faults


def clash(stack: Stack) -> list[str]:
    """Says which FBGEMM builds overwrite each other."""
    builds = stack.distributions("fbgemm_gpu")
    if len(builds) < 2:
        return []
    return [
        f"{' and '.join(builds)} are both installed and overwrite the same folder; uninstall all of them, then install "
        "fbgemm-gpu on a CUDA machine or fbgemm-gpu-cpu elsewhere, with --no-deps"
    ]


def unpaired(stack: Stack) -> list[str]:
    """Says which of torchrec and FBGEMM was not released with the installed torch."""
    torch_minor = _minor(stack.version("torch"))
    release = PAIRS.get(torch_minor or "")
    if release is None:  # a nightly, or newer than this package: nothing is known to be wrong
        if torch_minor is None or _key(torch_minor) > max(map(_key, PAIRS)):
            return []
        return [f"torch {torch_minor} is older than the tested {', '.join(PAIRS)}; install one of these: {_REINSTALL}"]
    faults = []
    for module in ("torchrec", "fbgemm_gpu"):
        found = _minor(stack.version(module))
        if found is not None and found != release:
            name = stack.distributions(module)[0]
            faults.append(
                f"{name} {stack.version(module)} does not pair with torch {stack.version('torch')}, which needs "
                f"{name} {release}; install that release: {_REINSTALL}"
            )
    return faults


def require_stack() -> None:
    """Checks that torch, TorchRec and FBGEMM can be used together; call before importing TorchRec.

    Raises:
        StackError: one of them is missing, or FBGEMM does not import.

    Warns:
        RuntimeWarning: their versions were not released together (TorchRec often works nevertheless).
    """
    stack = installed_stack()
    faults = missing(stack)
    if faults:
        raise StackError(_message(faults))
    doubts = clash(stack) + unpaired(stack)
    if not doubts:
        return
    try:
        importlib.import_module("fbgemm_gpu")
    except Exception as error:  # a broken binary raises OSError, ImportError or RuntimeError
        raise StackError(_message([*doubts, f"import fbgemm_gpu fails: {error}"])) from error
    warnings.warn(_message(doubts), RuntimeWarning, stacklevel=3)


def check_tbe() -> str:
    """Runs one tiny TBE forward and backward on the CPU, and on the GPU when there is one; returns what ran.

    Raises:
        StackError: the packages do not import, or the result is wrong.
    """
    require_stack()
    try:
        import torch
        import torchrec  # noqa: F401
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except Exception as error:
        raise StackError(_message([f"the stack does not import: {error}", *clash(installed_stack())])) from error
    places = [("cpu", EmbeddingLocation.HOST, ComputeDevice.CPU)]
    if torch.cuda.is_available():
        places.append(("cuda", EmbeddingLocation.DEVICE, ComputeDevice.CUDA))
    for device, location, compute in places:
        tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(4, 8, location, compute)],
            optimizer=EmbOptimType.EXACT_SGD,
            learning_rate=1.0,
            device=torch.device(device),
        )
        tbe.split_embedding_weights()[0].fill_(2.0)
        indices = torch.tensor([1, 1, 3], device=device)
        output = tbe(indices, torch.tensor([0, 2, 3], device=device))
        output.sum().backward()
        updated = tbe.split_embedding_weights()[0][:, 0].tolist()
        if output[:, 0].tolist() != [4.0, 2.0] or updated != [2.0, 0.0, 2.0, 1.0]:
            raise StackError(_message([f"FBGEMM's TBE gives wrong results on {device}: {output.tolist()}, {updated}"]))
    return " and ".join(device for device, _, _ in places)


def _minor(version: str | None) -> str | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    # Nightlies count by date or carry ".dev": they have no pair to check.
    if match is None or "dev" in (version or "") or int(match.group(1)) > 1000:
        return None
    return f"{match.group(1)}.{match.group(2)}"


def _key(minor: str) -> tuple[int, ...]:
    return tuple(map(int, minor.split(".")))


def _message(faults: list[str]) -> str:
    return "torchrec_neuroshard: " + "; ".join(faults)


if __name__ == "__main__":
    try:
        devices = check_tbe()
    except StackError as error:
        sys.exit(str(error))
    stack = installed_stack()
    print(", ".join(f"{name} {version}" for name, version in stack.versions.items()) + f": a TBE runs on {devices}")
