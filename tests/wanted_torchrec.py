"""Which TorchRec a process imported; under ``make test-versions`` it has to be the one in a certain folder."""

from __future__ import annotations

import os
from pathlib import Path

# Set by scripts/test_versions.py: the folder, named by its version, that has to provide torchrec.
WANTED = "NEUROSHARD_TEST_TORCHREC"


def check_torchrec() -> str | None:
    """The version of the imported TorchRec when a certain one is wanted, else None.

    Raises:
        RuntimeError: another TorchRec is imported than the one that is to be tested.
    """
    wanted = os.environ.get(WANTED)
    if not wanted:
        return None
    import torchrec
    import torchrec.version

    version, folder = torchrec.version.__version__, Path(torchrec.__file__).resolve().parent.parent
    if folder != Path(wanted).resolve() or version != folder.name:
        raise RuntimeError(f"torchrec {version} of {folder} is imported, but {wanted} is to be tested")
    return version
