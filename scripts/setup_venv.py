"""Builds .venv with torch, TorchRec, FBGEMM, this package and its tools; does nothing when it is up to date.

Usage: python3 scripts/setup_venv.py [--stack auto|cpu|cuda] [--python PYTHON]

Order matters. TorchRec's metadata asks for ``fbgemm-gpu``; installed beside ``fbgemm-gpu-cpu`` it overwrites the
same package folder and breaks the import. So torch comes first with its dependencies, then TorchRec and one
FBGEMM build without theirs, and at the end the new environment has to run a small TBE.

Written for any Python 3 that may start it (standard library only, no recent syntax): the environment itself gets
one of SUPPORTED.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
VENV_PYTHON = os.path.join(VENV, "bin", "python")
STAMP = os.path.join(VENV, "neuroshard-stamp.json")

SUPPORTED = ((3, 11), (3, 12), (3, 13), (3, 10))  # in order of preference
SUPPORTED_TEXT = "3.10 to 3.13"
NEEDED_GB = {"cpu": 3, "cuda": 12}  # environment plus what pip unpacks on the way
FBGEMM = {"cpu": "fbgemm-gpu-cpu", "cuda": "fbgemm-gpu"}
DISTRIBUTIONS = "import importlib.metadata as m; print(*[(d.metadata['Name'] or '') for d in m.distributions()])"


class SetupError(Exception):
    """Setup cannot go on; the message says what is wrong and what to do."""


def say(text):
    """Prints a line of progress."""
    print("[setup] " + text, flush=True)


def probe(python):
    """Returns the (major, minor) version of an interpreter, or None when it does not run."""
    try:
        output = subprocess.check_output(
            [python, "-c", "import sys; print(*sys.version_info[:2])"], stderr=subprocess.DEVNULL, timeout=60
        )
        major, minor = output.split()
        return int(major), int(minor)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def find_python(requested):
    """Returns a supported interpreter: the requested one, else the best on PATH."""
    if requested:
        version = probe(requested)
        if version not in SUPPORTED:
            found = "Python %d.%d" % version if version else "nothing that runs"
            raise SetupError(
                "--python %s is %s, but Python %s is needed; name another one" % (requested, found, SUPPORTED_TEXT)
            )
        return requested
    names = ["python%d.%d" % version for version in SUPPORTED] + [sys.executable, "python3", "python"]
    best = None
    seen = []
    for name in names:
        path = shutil.which(name)
        version = probe(path) if path else None
        if version is None:
            continue
        seen.append("%d.%d" % version)
        if version in SUPPORTED and (best is None or SUPPORTED.index(version) < SUPPORTED.index(best[0])):
            best = (version, path)
    if best is None:
        raise SetupError(
            "no suitable Python: torch, torchrec and fbgemm share wheels for Python %s, and PATH has %s; "
            "install one of them (for example python3.11 with its venv module) and run `make setup` again"
            % (SUPPORTED_TEXT, ", ".join(sorted(set(seen))) or "none at all")
        )
    return best[1]


def find_stack(requested):
    """Returns "cuda" when an NVIDIA GPU is present and usable, else "cpu"; a request overrides."""
    if requested != "auto":
        return requested
    try:
        listing = subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "cpu"
    return "cuda" if b"GPU" in listing else "cpu"


def fingerprint(stack):
    """Returns what an up-to-date environment was made from."""
    digest = hashlib.sha256()
    for name in ("base", stack, "dev"):
        with open(requirements(name), "rb") as file:
            digest.update(file.read())
    for name in ("pyproject.toml", "setup.cfg", os.path.join("scripts", "setup_venv.py")):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    # The folder counts too: a moved environment has wrong paths inside.
    return {"inputs": digest.hexdigest(), "stack": stack, "root": ROOT}


def requirements(name):
    """Returns the path of a requirements file."""
    return os.path.join(ROOT, "requirements", name + ".txt")


def is_up_to_date(wanted):
    """Whether .venv was made from the same inputs and its Python still runs."""
    try:
        with open(STAMP) as file:
            stamp = json.load(file)
    except (OSError, ValueError):
        return False
    python = stamp.pop("python", None)
    version = probe(VENV_PYTHON)
    return stamp == wanted and version is not None and python == "%d.%d" % version


def check_disk(stack):
    """Raises when the disk cannot hold the environment."""
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < NEEDED_GB[stack]:
        raise SetupError(
            "%.1f GB are free where %s lies, but the %s environment needs about %d GB; free some space "
            "(`pip cache purge` may help) and run `make setup` again" % (free, ROOT, stack, NEEDED_GB[stack])
        )


def make_venv(python):
    """Makes .venv, or keeps one that has a supported Python and pip."""
    if probe(VENV_PYTHON) in SUPPORTED and quiet([VENV_PYTHON, "-m", "pip", "--version"]):
        return
    if os.path.lexists(VENV):
        say("replacing an unusable .venv")
        if os.path.islink(VENV) or not os.path.isdir(VENV):
            raise SetupError("%s is not a folder; move it away and run `make setup` again" % VENV)
        shutil.rmtree(VENV)
    try:
        subprocess.check_call([python, "-m", "venv", VENV])
    except subprocess.CalledProcessError:
        shutil.rmtree(VENV, ignore_errors=True)
        raise SetupError(
            "`%s -m venv` failed: that Python lacks venv or ensurepip. Install them (on Debian and Ubuntu the package "
            "python%d.%d-venv), or pass another Python: `make setup PYTHON=/path/to/python3.11`"
            % ((python,) + probe(python))
        ) from None


def quiet(command):
    """Whether a command succeeds, without its output."""
    try:
        return subprocess.call(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def pip(*arguments):
    """Runs pip in .venv; quiet unless a person is watching."""
    command = [VENV_PYTHON, "-m", "pip", "--disable-pip-version-check"] + list(arguments)
    if not sys.stdout.isatty():
        command.append("--quiet")
    environment = dict(os.environ, PIP_USER="0", PYTHONNOUSERSITE="1")
    if subprocess.call(command, cwd=ROOT, env=environment):
        free = shutil.disk_usage(ROOT).free / 1e9
        cause = (
            "the disk is nearly full (%.1f GB free)" % free
            if free < 0.5
            else "pip's own message above says why; most often the network, or an index without these versions"
        )
        raise SetupError("`pip %s` failed: %s. `make setup` resumes where it stopped" % (" ".join(arguments), cause))


def remove_clash(stack):
    """Uninstalls the FBGEMM build of the other stack; both own the same folder, so the right one goes too."""
    names = subprocess.check_output([VENV_PYTHON, "-c", DISTRIBUTIONS]).decode().lower().replace("_", "-").split()
    other = FBGEMM["cuda" if stack == "cpu" else "cpu"]
    if other in names:
        say("removing %s, which clashes with %s" % (other, FBGEMM[stack]))
        pip("uninstall", "--yes", *[name for name in FBGEMM.values() if name in names])


def install(stack):
    """Installs everything in the order that works."""
    say("1/4 torch and light dependencies (the long one)")
    pip("install", "-r", requirements("base"))
    remove_clash(stack)
    say("2/4 torchrec and %s, without the dependencies in their metadata" % FBGEMM[stack])
    pip("install", "--no-deps", "-r", requirements(stack))
    say("3/4 tools for tests and checks")
    pip("install", "-r", requirements("dev"))
    say("4/4 this package, editable")
    pip("install", "--no-deps", "--no-build-isolation", "-e", ROOT)


def verify():
    """Imports the stack in .venv and runs a small TBE."""
    say("verifying: import torch, fbgemm_gpu, torchrec; run one TBE forward and backward")
    if subprocess.call([VENV_PYTHON, "-m", "torchrec_neuroshard._versions"], cwd=ROOT):
        raise SetupError(
            "the packages installed, but do not work together (see above). If .venv was changed by hand, remove it and "
            "run `make setup` again"
        )


def main():
    """Runs the setup; returns the exit status."""
    parser = argparse.ArgumentParser(description="Builds .venv; does nothing when it is up to date.")
    parser.add_argument("--stack", choices=("auto", "cpu", "cuda"), default=os.environ.get("NEUROSHARD_STACK", "auto"))
    parser.add_argument("--python", default="", help="interpreter for .venv (default: the best one on PATH)")
    arguments = parser.parse_args()
    begun = time.time()
    try:
        stack = find_stack(arguments.stack)
        wanted = fingerprint(stack)
        if is_up_to_date(wanted):
            return 0
        python = find_python(arguments.python)
        if os.path.exists(STAMP):
            os.remove(STAMP)
        check_disk(stack)
        say("building .venv for %s with %s" % (stack, python))
        make_venv(python)
        install(stack)
        verify()
        with open(STAMP, "w") as file:
            json.dump(dict(wanted, python="%d.%d" % probe(VENV_PYTHON)), file)
    except SetupError as error:
        print("[setup] ERROR: %s" % error, file=sys.stderr)
        return 1
    say(".venv is ready (%.0f s)" % (time.time() - begun))
    return 0


if __name__ == "__main__":
    sys.exit(main())
