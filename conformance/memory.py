"""Memory of backends in reference cycles of their own: Python collects those by their number, not by their size."""

from __future__ import annotations

import gc
import os
from pathlib import Path

RISE = 256 << 20
"""Bytes that this process may take beyond what it held after the last collection."""

_STATM = Path("/proc/self/statm")


class _Level:
    """What this process held when garbage was last collected here; 0: it never was."""

    bytes = 0


def relieve() -> None:
    """Collect garbage if this process has taken `RISE` bytes since. Does nothing where there is no `/proc`."""
    now = _resident()
    if now < _Level.bytes or not _Level.bytes:
        _Level.bytes = now
    elif now - _Level.bytes > RISE:
        gc.collect()
        _Level.bytes = _resident()


def _resident() -> int:
    try:
        return int(_STATM.read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
