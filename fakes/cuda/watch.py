"""What a simulated device notices about a program: hazards of copies in flight, and where the host waits.

Whoever wants to know joins `watchers`; without anyone nothing is looked up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import PurePath
from types import FrameType
from typing import NamedTuple, Protocol


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
            watcher.host_waits(HostWait(what, str(line())))


_OURS = ("fakes", "flashinfer", "sgl_kernel")
_THEIRS = ("torch", "numpy", "contextlib", "functools", "ctypes", "threading")


class Line(NamedTuple):
    """A line of a program. In words: file with its folder, number, function."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.number} in {self.function}" if self.number else "an unknown line"


@lru_cache(maxsize=1024)
def _short(file: str) -> str:
    return "/".join(PurePath(file).parts[-2:])


@lru_cache(maxsize=1024)
def _is_passed_over(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _THEIRS or (root in _OURS and ".test_" not in module)


def line() -> Line:
    """The line of the program that is running: of the innermost frame that is neither ours nor torch's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not _is_passed_over(frame.f_globals.get("__name__", "")):
            return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return Line("", 0, "")
