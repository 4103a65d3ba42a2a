"""The setup script, the version check and the package's metadata."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from torchrec_neuroshard._versions import PAIRS, Stack, StackError, check_tbe, clash, missing, require_stack, unpaired

ROOT = Path(__file__).resolve().parent.parent
ALL = frozenset({"torch", "torchrec", "fbgemm_gpu"})


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("setup_venv", ROOT / "scripts" / "setup_venv.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def fake_program(folder: Path, name: str, output: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return dict(line.split(";")[0].strip().split("==") for line in lines if line and not line.startswith("#"))


def test_the_script_starts_on_old_pythons() -> None:
    ast.parse((ROOT / "scripts" / "setup_venv.py").read_text(), feature_version=(3, 6))


def test_unsuitable_pythons_are_named(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_program(tmp_path, "python3", "3 8")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(old))
    with pytest.raises(script.SetupError, match=r"no suitable Python.*3\.10 to 3\.13.*PATH has 3\.8"):
        script.find_python("")
    with pytest.raises(script.SetupError, match=r"is Python 3\.8, but Python 3\.10 to 3\.13 is needed"):
        script.find_python(str(old))
    with pytest.raises(script.SetupError, match="nothing that runs"):
        script.find_python(str(tmp_path / "absent"))
    good = fake_program(tmp_path, "python3.12", "3 12")
    fake_program(tmp_path, "python3.13", "3 13")
    assert script.find_python("") == str(good)


def test_a_gpu_selects_the_cuda_stack(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script.find_stack("auto") == "cpu"
    fake_program(tmp_path, "nvidia-smi", "GPU 0: NVIDIA H200 (UUID: GPU-1)")
    assert script.find_stack("auto") == "cuda"
    assert script.find_stack("cpu") == "cpu"
    fake_program(tmp_path, "nvidia-smi", "No devices were found")
    assert script.find_stack("auto") == "cpu"


def test_a_full_disk_is_named(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    script.check_disk("cpu")
    monkeypatch.setitem(script.NEEDED_GB, "cpu", 10**9)
    with pytest.raises(script.SetupError, match=r"GB are free .* needs about 1000000000 GB"):
        script.check_disk("cpu")


def test_setup_is_a_no_op_only_when_nothing_changed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = tmp_path / "stamp.json"
    monkeypatch.setattr(script, "STAMP", str(stamp))
    monkeypatch.setattr(script, "VENV_PYTHON", sys.executable)
    wanted = script.fingerprint("cpu")
    assert not script.is_up_to_date(wanted)
    python = "{}.{}".format(*sys.version_info[:2])
    stamp.write_text(json.dumps({**wanted, "python": python}))
    assert script.is_up_to_date(wanted)
    assert not script.is_up_to_date(script.fingerprint("cuda"))
    assert not script.is_up_to_date({**wanted, "root": "/elsewhere"})
    stamp.write_text(json.dumps({**wanted, "python": "3.1"}))
    assert not script.is_up_to_date(wanted)
    stamp.write_text(json.dumps({**wanted, "python": python})[:20])
    assert not script.is_up_to_date(wanted)


def test_requirements_never_mix_fbgemm_builds_and_pair_up() -> None:
    base, cpu, cuda = pins("base"), pins("cpu"), pins("cuda")
    assert "fbgemm-gpu" not in cpu and "fbgemm-gpu-cpu" not in cuda
    assert not {"torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"} & set(base)  # base is installed with dependencies
    torch_minor = ".".join(base["torch"].split(".")[:2])
    for version in (cpu["torchrec"], cpu["fbgemm-gpu-cpu"], cuda["torchrec"], cuda["fbgemm-gpu"]):
        assert version.startswith(PAIRS[torch_minor] + ".")
    for path in (ROOT / "requirements").iterdir():
        assert not re.search(r"https?://|--(extra-)?index-url", path.read_text())


def test_metadata_forces_torch_on_nobody() -> None:
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    forced = {re.split(r"[<>=!~ \[;]", requirement)[0] for requirement in project["dependencies"]}
    assert not forced & {"torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu"}
    extras = project["optional-dependencies"]
    assert not any(requirement.startswith("torchrec") for requirement in extras["cpu"])  # it would add fbgemm-gpu
    assert any(requirement.startswith("fbgemm-gpu-cpu") for requirement in extras["cpu"])


@pytest.mark.parametrize("target", ["demo", "test", "test-versions"])
def test_make_targets_run_what_exists(target: str) -> None:
    commands = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "scripts/setup_venv.py" in commands
    for path in re.findall(r"\S+\.py", commands):
        assert (ROOT / path).is_file(), path


def test_the_installed_stack_works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        require_stack()
    assert check_tbe().startswith("cpu")


def test_what_is_missing_is_named_with_its_pair() -> None:
    stack = Stack(frozenset({"torch"}), {"torch": "2.13.0+cpu"})
    faults = missing(stack)
    assert len(faults) == 2
    assert faults[0].startswith("torchrec is not installed") and "torchrec 1.8 (pairs with torch 2.13)" in faults[0]
    assert faults[1].startswith("fbgemm_gpu is not installed") and "fbgemm-gpu-cpu" in faults[1]
    assert missing(Stack(ALL, {})) == []


def test_clashing_builds_are_named() -> None:
    both = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
    assert "fbgemm-gpu and fbgemm-gpu-cpu are both installed" in clash(Stack(ALL, both))[0]
    assert clash(Stack(ALL, {"fbgemm-gpu-cpu": "1.8.0"})) == []


@pytest.mark.parametrize(
    ("versions", "words"),
    [
        ({"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, []),
        ({"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm-gpu": "1.7.2"}, []),
        ({"torch": "2.13.0", "torchrec": "1.7.0", "fbgemm-gpu-cpu": "1.8.0"}, ["torchrec 1.7.0 does not pair"]),
        ({"torch": "2.13.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.9.0"}, ["fbgemm-gpu 1.9.0 does not pair", "1.8"]),
        ({"torch": "2.14.0", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}, ["torchrec", "fbgemm-gpu", "1.9"]),
        ({"torch": "2.4.0", "torchrec": "1.0.0", "fbgemm-gpu": "1.0.0"}, ["torch 2.4 is older than the tested"]),
        ({"torch": "2.15.0.dev20261101", "torchrec-nightly": "2026.11.1", "fbgemm-gpu-nightly": "2026.11.1"}, []),
        ({"torch": "2.13.0"}, []),  # torchrec and FBGEMM from source trees have no metadata
    ],
)
def test_unpaired_versions_are_named(versions: dict[str, str], words: list[str]) -> None:
    faults = unpaired(Stack(ALL, versions))
    assert bool(faults) == bool(words)
    for word in words:
        assert word in " ".join(faults)


def test_light_rooms_and_help_do_without_torchrec() -> None:
    code = (
        "import sys; from torchrec_neuroshard.cli.parser import build_parser; build_parser()\n"
        "import torchrec_neuroshard, torchrec_neuroshard.problem, torchrec_neuroshard.workload\n"
        "assert 'torch' not in sys.modules, 'torch'\n"
        "import torchrec_neuroshard.search, torchrec_neuroshard.costs.simulator\n"
        "assert torchrec_neuroshard.CostModel.analytic('generic_cpu').provenance == 'analytic'\n"
        "assert not {'torchrec', 'fbgemm_gpu'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_a_missing_stack_is_an_import_error_with_the_remedy() -> None:
    """Without site-packages there is no torch, as on a fresh machine."""
    code = "import torchrec_neuroshard as t\ntry: t.NeuroShardPlanner\nexcept ImportError as error: print(error)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert "torch is not installed" in run.stdout and "torchrec is not installed" in run.stdout
    assert "make setup" in run.stdout


def test_public_names_are_lazy_and_complete() -> None:
    import torchrec_neuroshard

    for name in torchrec_neuroshard.__all__:
        assert getattr(torchrec_neuroshard, name).__name__ == name
        assert name in dir(torchrec_neuroshard)
    with pytest.raises(AttributeError, match="no attribute 'Planner'"):
        _ = torchrec_neuroshard.Planner


def test_stack_errors_are_import_errors() -> None:
    assert issubclass(StackError, ImportError)
