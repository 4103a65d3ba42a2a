"""Planning without pauses of the garbage collector."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Keeps Python from collecting cycles meanwhile.

    A collection visits every object of the process, of which torch alone has a million: a tenth of a second each time,
    and what planning allocates sets off some. It leaves next to no cycles behind.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
