"""``make test-versions``: what it runs, what it takes for a success, and that the wanted TorchRec is insisted on."""

from __future__ import annotations

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console
from wanted_torchrec import WANTED

from torchrec_neuroshard._versions import PAIRS

ROOT = Path(__file__).resolve().parent.parent
REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite name="pytest" errors="1" failures="2"
skipped="3" tests="10" time="1.0"><properties><property name="torchrec" value="1.9.2"/></properties></testsuite>
</testsuites>"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("test_versions", ROOT / "scripts" / "test_versions.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_supported_release_is_run_by_default(script: ModuleType) -> None:
    versions = script.parse_arguments([])
    assert {version.rsplit(".", 1)[0] for version in versions} == set(PAIRS.values())
    assert script.parse_arguments(["--versions", "1.9.2", "1.6.1", "1.9.2"]) == ["1.9.2", "1.6.1"]


@pytest.mark.parametrize("text", ["1.9", "../1.9.2", "1.9.2 ", "latest", ">=1.9.2"])
def test_only_full_versions_are_taken(script: ModuleType, capsys: pytest.CaptureFixture[str], text: str) -> None:
    with pytest.raises(SystemExit) as error:
        script.parse_arguments(["--versions", text])
    assert error.value.code == 2
    assert "is not a full version such as 1.9.2" in capsys.readouterr().err


def test_what_is_run_and_left_out_exists(script: ModuleType) -> None:
    for name in script.FILES:
        assert (ROOT / name).is_file()
    for name in script.LEFT_OUT:
        path, function = name.split("::")
        assert path in script.FILES and f"def {function}(" in (ROOT / path).read_text()


def test_reports_are_counted_and_judged(script: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    outcome = script.read_report(path, "1.9.2", 61.4, 1)
    assert (outcome.imported, outcome.passed, outcome.failed, outcome.skipped) == ("1.9.2", 4, 3, 3)
    assert not outcome.good
    good = script.Outcome("1.9.2", "1.9.2", 5, 0, 1, 60.0, 0)
    assert good.good
    for bad in (
        script.Outcome("1.9.2", "1.8.0", 5, 0, 0, 60.0, 0),  # another TorchRec
        script.Outcome("1.9.2", "1.9.2", 0, 0, 5, 60.0, 0),  # nothing but skips
        script.Outcome("1.9.2", "1.9.2", 5, 0, 0, 60.0, -9),  # pytest was killed
        script.read_report(tmp_path / "absent.xml", "1.9.2", 1.0, 4),
    ):
        assert not bad.good
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(script.summary([good, outcome]))
    text = console.export_text()
    assert "ok" in text and "FAILED (exit status 1)" in text and "61" in text


def test_a_version_that_fails_or_is_not_to_be_had_fails_the_run(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(version: str) -> object:
        if version == "1.6.1":
            raise script.VersionsError("pip could not install torchrec 1.6.1")
        return script.Outcome(version, version, 5, 0, 0, 1.0, 0)

    monkeypatch.setattr(script, "run", run)
    assert script.main(["--versions", "1.9.2"]) == 0
    assert script.main(["--versions", "1.6.1", "1.9.2"]) == 1
    output = capsys.readouterr().out
    assert "pip could not install torchrec 1.6.1" in output and output.count("1.9.2") > 2


def test_an_installation_is_reused_and_an_interrupted_one_is_not_left(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1.9.2" / "torchrec-1.9.2.dist-info").mkdir(parents=True)
    calls: list[list[str]] = []

    def pip(command: list[str], **_: object) -> int:
        calls.append(command)
        target = Path(command[command.index("--target") + 1])
        (target / f"torchrec-{command[-1].split('==')[1]}.dist-info").mkdir(parents=True)
        return 0 if command[-1] == "torchrec==1.8.0" else 1

    monkeypatch.setattr(script.subprocess, "call", pip)
    assert script.fetch("1.9.2", tmp_path) == tmp_path / "1.9.2" and not calls
    assert script.fetch("1.8.0", tmp_path) == script.fetch("1.8.0", tmp_path) == tmp_path / "1.8.0"
    assert len(calls) == 1 and "--no-deps" in calls[0]
    with pytest.raises(script.VersionsError, match="torchrec 1.7.0"):
        script.fetch("1.7.0", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.8.0", "1.9.2"]


def test_another_torchrec_than_the_wanted_one_is_refused(tmp_path: Path) -> None:
    wanted, other = (tmp_path / name / "1.9.2" for name in ("wanted", "other"))
    for folder in (wanted, other):
        (folder / "torchrec").mkdir(parents=True)
        (folder / "torchrec" / "__init__.py").touch()
        (folder / "torchrec" / "version.py").write_text("__version__ = '1.9.2'\n")

    def check(first: Path) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(first), str(Path(__file__).parent)])
        return subprocess.run(
            [sys.executable, "-c", "import wanted_torchrec; print(wanted_torchrec.check_torchrec())"],
            env={**os.environ, "PYTHONPATH": path, WANTED: str(wanted)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    assert check(wanted).stdout == "1.9.2\n"
    refused = check(other)
    assert refused.returncode != 0 and f"{wanted} is to be tested" in refused.stderr
