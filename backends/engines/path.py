"""Where an engine's package is looked for, beside this environment: `--engine-path DIR`."""

from __future__ import annotations

import sys
from pathlib import Path

from backends.registry import BackendError

SOURCES = ("", "python")
"""Where a folder may hold packages: itself, or below, as in SGLang's and mini-sglang's repositories."""


def look_in(folder: str) -> None:
    """Find an engine in this folder: one that packages were installed into, or a checkout.

    It comes last on `sys.path`: what this environment has is not replaced.

    Raises:
        BackendError: there is no such folder.
    """
    path = Path(folder)
    if not path.is_dir():
        raise BackendError(f"--engine-path {folder}: there is no such folder")
    for source in SOURCES:
        inside = str((path / source).resolve())
        if Path(inside).is_dir() and inside not in sys.path:
            sys.path.append(inside)
