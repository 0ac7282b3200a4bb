"""Memory of backends in reference cycles of their own: Python collects those by their number, not by their size."""

from __future__ import annotations

import gc
import os
from pathlib import Path

RISE = 256 << 20
"""Bytes that this process may take beyond what it held after the last collection."""

_STATM = Path("/proc/self/statm")


class Level:
    """What this process held when garbage was last collected here; 0: it never was."""

    bytes = 0


def relieve() -> None:
    """Collect garbage if this process has taken `RISE` bytes since. Does nothing where there is no `/proc`."""
    now = resident()
    if now < Level.bytes or not Level.bytes:
        Level.bytes = now
    elif now - Level.bytes > RISE:
        gc.collect()
        Level.bytes = resident()


def resident() -> int:
    """Bytes of memory that this process holds; 0 where there is no `/proc`."""
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
