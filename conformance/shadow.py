"""A user's own `cases/` or `backends/` folder that shadows ours, or ours theirs: found out before it matters.

Imports nothing of ours, since what it would import may be somebody else's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

ROOMS = ("backends", "cases", "conformance", "fakes", "reference")
"""Our top-level packages."""

_HOME = Path(__file__).resolve().parent.parent


class ShadowError(ValueError):
    """A folder that is not ours answers to one of our names, or the reverse. The message is one sentence."""


def require_own_rooms() -> None:
    """Make sure that our package names lead to our packages.

    An editable install is found by a hook of its own, behind everything on the path: there a mere folder of one of our
    names, without an `__init__.py`, comes first. So our own home is put on the path.

    Raises:
        ShadowError: one leads elsewhere; the message names the folder and the remedy.
    """
    if str(_HOME) not in sys.path:
        sys.path.append(str(_HOME))
    for room in ROOMS:
        folder = _folder(room)
        if folder is None:
            raise ShadowError(f"the package {room!r} of attention-conformance is missing: install it again")
        if folder != _HOME / room:
            raise ShadowError(
                f"{folder} shadows the package {room!r} of attention-conformance: "
                "run from another folder or rename yours"
            )


def require_free_name(backend: str) -> None:
    """Make sure that the module of `pkg.mod:Class` is not hidden behind a package of ours.

    Raises:
        ShadowError: the module lies in the current folder and its first name is one of ours.
    """
    if ":" not in backend:
        return
    room = backend.partition(":")[0].partition(".")[0]
    theirs = Path.cwd() / room
    if room in ROOMS and theirs.is_dir() and theirs.resolve() != _HOME / room:
        raise ShadowError(
            f"backend {backend!r}: {theirs} is shadowed by the package {room!r} of attention-conformance: "
            "rename yours"
        )


def add_current_folder() -> None:
    """Let modules of the current folder be imported, behind everything else."""
    here = os.getcwd()  # noqa: PTH109 - what sys.path holds are strings
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)


def _folder(room: str) -> Path | None:
    module = sys.modules.get(room)
    file = getattr(module, "__file__", None)
    if file is None:
        spec = importlib.util.find_spec(room)
        file = None if spec is None else spec.origin
    return None if file is None else Path(file).resolve().parent
