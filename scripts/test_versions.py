"""Runs the tests that touch TorchRec on several TorchRec versions: ``make test-versions``.

Usage: .venv/bin/python scripts/test_versions.py [--versions 1.6.1 1.9.2 ...]

TorchRec is pure Python and runs on the torch and FBGEMM of .venv whatever its release. So only its wheel is fetched,
without dependencies, into .venv/torchrec-versions/VERSION, and that folder goes first on PYTHONPATH, which the ranks
and programs that tests start inherit. The tests fail when they import another TorchRec (``tests/wanted_torchrec.py``).
What this cannot show is how a release works with its own torch and FBGEMM.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".venv" / "torchrec-versions"
VERSIONS = ("1.6.1", "1.7.0", "1.8.0", "1.9.2")  # the last of each minor release that this package supports

# The planner, DistributedModelParallel on gloo ranks, checkpoints, constraints, the behaviours that
# TorchRec's own tests check, the estimator, statistics, TorchRec's own costs, the CLI.
# Not the examples: torchrec.datasets needs iopath up to 1.7.
FILES = (
    "tests/test_planner.py",
    "tests/test_planner_distributed.py",
    "tests/test_parity.py",
    "tests/test_checkpoints.py",
    "tests/test_constraints.py",
    "tests/test_torchrec_behaviours.py",
    "tests/test_traps.py",
    "tests/test_estimator.py",
    "tests/test_perf_model.py",
    "tests/test_saved_plan.py",
    "tests/test_two_dimensional.py",
    "tests/test_planner_provider.py",
    "tests/test_table_stats.py",
    "tests/test_row_wise.py",
    "tests/test_workload.py",
    "tests/test_additive_search.py",
    "tests/test_cli.py",
)
LEFT_OUT = (
    # It rightly calls a TorchRec without its own torch and FBGEMM a problem.
    "tests/test_cli.py::test_doctor_finds_a_working_stack",
    # Nothing here depends on TorchRec.
    "tests/test_cli.py::test_measure_compute_resumes",
    "tests/test_cli.py::test_measure_says_what_is_wrong_with_the_file",
)
# require_stack() warns of each of these pairs, rightly; once per test is too often.
EXPECTED_WARNING = "ignore:torchrec_neuroshard:RuntimeWarning"


class VersionsError(Exception):
    """The tests cannot run; the message says why."""


@dataclass(frozen=True)
class Outcome:
    """What the tests did on one version.

    Attributes:
        version: the TorchRec version that was wanted.
        imported: the version that the tests imported; "" when they did not get that far.
        passed: tests that passed.
        failed: tests that failed, or could not be set up or collected.
        skipped: tests that were skipped.
        seconds: wall time.
        status: pytest's exit status; 1 when the version could not be installed.
    """

    version: str
    imported: str
    passed: int
    failed: int
    skipped: int
    seconds: float
    status: int

    @property
    def good(self) -> bool:
        """Whether tests ran, on the wanted version, and none failed."""
        return self.status == 0 and self.failed == 0 and self.passed > 0 and self.imported == self.version


def version_number(text: str) -> str:
    """A full version such as 1.9.2; it names a folder, so nothing else is let through."""
    if re.fullmatch(r"\d+\.\d+\.\d+", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a full version such as {VERSIONS[-1]}")
    return text


def parse_arguments(arguments: list[str] | None = None) -> list[str]:
    """The versions to test, each once, in the order given."""
    parser = argparse.ArgumentParser(description="Runs the tests that touch TorchRec on several TorchRec versions.")
    parser.add_argument(
        "--versions",
        nargs="+",
        type=version_number,
        default=list(VERSIONS),
        metavar="VERSION",
        help=f"full versions (default: {' '.join(VERSIONS)})",
    )
    return list(dict.fromkeys(parser.parse_args(arguments).versions))


def fetch(version: str, cache: Path = CACHE) -> Path:
    """The folder with this TorchRec alone; installs it there when it is missing.

    Raises:
        VersionsError: pip could not install it.
    """
    folder = cache / version
    if (folder / f"torchrec-{version}.dist-info").is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    # Installed aside and renamed: what an interrupted run leaves behind is never taken for an installation.
    with tempfile.TemporaryDirectory(dir=cache, prefix="unfinished-") as aside:
        target = Path(aside) / version
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--target", str(target), f"torchrec=={version}"]
        # --target and --user exclude each other.
        if subprocess.call(command, cwd=ROOT, env={**os.environ, "PIP_USER": "0", "PYTHONNOUSERSITE": "1"}):
            raise VersionsError(f"pip could not install torchrec {version} (its message is above)")
        shutil.rmtree(folder, ignore_errors=True)
        target.rename(folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """The environment in which tests, ranks and programs import the TorchRec of this folder."""
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(folder), *([inherited] if inherited else [])]),
        "NEUROSHARD_TEST_TORCHREC": str(folder),
    }


def run(version: str) -> Outcome:
    """Runs the tests on one version; their output goes to stdout as it comes.

    Raises:
        VersionsError: the version could not be installed.
    """
    folder = fetch(version)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as results:
        report = Path(results) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", "not slow", "-W", EXPECTED_WARNING, f"--junit-xml={report}"]
        command += [f"--deselect={name}" for name in LEFT_OUT]
        status = subprocess.call([*command, *FILES], cwd=ROOT, env=environment(folder))
        return read_report(report, version, time.monotonic() - begun, status)


def read_report(path: Path, version: str, seconds: float, status: int) -> Outcome:
    """What pytest's JUnit report says; a missing one (pytest did not finish) counts as no test at all."""
    suite = ElementTree.parse(path).getroot().find("testsuite") if path.is_file() else None
    if suite is None:
        return Outcome(version, "", 0, 0, 0, seconds, status)
    counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    imported = suite.find("properties/property[@name='torchrec']")
    return Outcome(
        version,
        "" if imported is None else imported.get("value", ""),
        max(0, counts["tests"] - failed - counts["skipped"]),
        failed,
        counts["skipped"],
        seconds,
        status,
    )


def summary(outcomes: list[Outcome]) -> Table:
    """The outcomes, a row for each version."""
    table = Table("TorchRec", "imported", title="tests by TorchRec version", title_justify="left")
    for name in ("passed", "failed", "skipped", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for outcome in outcomes:
        result = "ok" if outcome.good else f"FAILED (exit status {outcome.status})"
        counts = map(str, (outcome.passed, outcome.failed, outcome.skipped))
        table.add_row(outcome.version, outcome.imported or "?", *counts, f"{outcome.seconds:.0f}", result)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Tests each version and prints the summary; returns 0 when all are good, else 1."""
    versions = parse_arguments(arguments)
    console = Console(highlight=False)
    outcomes = []
    for version in versions:
        console.rule(f"TorchRec {version}", align="left")
        try:
            outcomes.append(run(version))
            console.print(f"TorchRec imported: {outcomes[-1].imported or 'unknown'}")
        except VersionsError as error:
            console.print(f"ERROR: {error}", markup=False)
            outcomes.append(Outcome(version, "", 0, 0, 0, 0.0, 1))
    console.print(summary(outcomes))
    return 0 if all(outcome.good for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
