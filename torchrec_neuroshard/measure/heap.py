"""Reuse of freed memory for the weights of measured groups.

glibc maps each large block afresh, and the kernel zeroes its pages one fault at a time: for groups of some
hundred MiB that takes longer than the measurement. Inside :func:`recycled_blocks` large blocks come from the
process's heap, which keeps its pages. Outside, and so inside every timed region, blocks are mapped as in any
training process, because the faults of large outputs belong to what a pass costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from typing import Iterator

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GLIBC_LARGEST_MMAP_THRESHOLD = 32 << 20  # where glibc's own dynamic threshold ends up
_UNLIMITED = 2**31 - 1


@contextlib.contextmanager
def recycled_blocks() -> Iterator[None]:
    """Takes large allocations of the body from the heap; without effect where the C library is not glibc."""
    mallopt = _mallopt()
    if mallopt is None:
        yield
        return
    mallopt(_M_TRIM_THRESHOLD, _UNLIMITED)
    mallopt(_M_MMAP_THRESHOLD, _UNLIMITED)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _GLIBC_LARGEST_MMAP_THRESHOLD)


def _mallopt() -> ctypes._NamedFuncPointer | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library.mallopt if hasattr(library, "gnu_get_libc_version") else None
