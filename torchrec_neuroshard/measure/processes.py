"""Processes that do not outlive the one that started them."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def end_with_parent() -> None:
    """Has the kernel end this process (SIGTERM) when its parent dies, even if that is killed outright.

    Without effect on other systems than Linux.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
