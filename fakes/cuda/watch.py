"""What a simulated device notices about a program: hazards of copies in flight, and where the host waits.

Whoever wants to know joins `watchers`; without anyone nothing is looked up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import PurePath
from types import FrameType
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Hazard:
    """A buffer was used while a copy was in flight. `rule` names the kind; `message` names both lines."""

    rule: str
    argument: str
    message: str


@dataclass(frozen=True, slots=True)
class HostWait:
    """The host waited for the device: what made it wait, and the line of the program that did."""

    what: str
    where: str


class Watcher(Protocol):
    @property
    def wants_hazards(self) -> bool: ...

    @property
    def wants_waits(self) -> bool: ...

    def hazard(self, hazard: Hazard) -> None: ...

    def host_waits(self, wait: HostWait) -> None: ...


watchers: list[Watcher] = []


def hazards_wanted() -> bool:
    return any(watcher.wants_hazards for watcher in watchers)


def hazard(rule: str, argument: str, message: str) -> None:
    """Tell whoever watches."""
    for watcher in watchers:
        if watcher.wants_hazards:
            watcher.hazard(Hazard(rule, argument, message))


def host_waits(what: str) -> None:
    """Tell whoever watches that this line of the program makes the host wait for the device."""
    for watcher in watchers:
        if watcher.wants_waits:
            watcher.host_waits(HostWait(what, line()))


_OURS = ("fakes", "flashinfer", "sgl_kernel")
_THEIRS = ("torch", "numpy", "contextlib", "functools", "ctypes", "threading")


def line() -> str:
    """The line of the program that is running: the innermost frame that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name: str = frame.f_globals.get("__name__", "")
        root = name.partition(".")[0]
        if root not in _THEIRS and (root not in _OURS or ".test_" in name):
            code = frame.f_code
            return f"{'/'.join(PurePath(code.co_filename).parts[-2:])}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return "an unknown line"
