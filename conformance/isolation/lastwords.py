"""What a worker's log says about its end: where its code was, and what was printed last."""

from __future__ import annotations

import re
import signal
import sysconfig
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


def _libraries() -> tuple[str, ...]:
    """Folders of installed code. Packages may lie in several, as where some are unpacked beside an image's own."""
    standard = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    origins = [spec.origin for name in ("torch", "pebble") if (spec := find_spec(name)) and spec.origin]
    return tuple(standard | {str(Path(origin).resolve().parent.parent) for origin in origins})


_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*\(most recent call first\):$")
_HARNESS = Path(__file__).resolve().parent.parent
_LIBRARIES = _libraries()
_LONGEST = 300


@dataclass(frozen=True)
class LastWords:
    """`where`: the innermost line that is neither the harness's nor a library's, else the innermost of all. `said`: the
    last line that was printed by anybody but Python's fault handler."""

    where: str | None = None
    said: str | None = None

    def __str__(self) -> str:
        at = "" if self.where is None else f", at {self.where}"
        return at if self.said is None else f"{at}; it said last: {self.said}"


def last_words(log: str | Path) -> LastWords:
    """Read a worker's log. Of several threads, the one that faulted or was interrupted counts."""
    try:
        lines = Path(log).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return LastWords()
    threads: list[list[str]] = []
    said: str | None = None
    current: list[str] | None = None
    for line in lines:
        if _THREAD.match(line):
            current = []
            threads.append(current)
            if line.startswith("Current thread"):
                threads = [threads[-1]]
        elif current is not None and line.startswith("  File "):
            current.append(line)
        elif line.strip():
            current = None
            if not line.startswith(("Fatal Python error:", "Extension modules:", "  ...")):
                said = line.strip()[:_LONGEST]
    return LastWords(_place(threads[0]) if threads else None, said)


def _place(frames: list[str]) -> str | None:
    found = [match for match in map(_FRAME.match, frames) if match is not None]
    theirs = [match for match in found if not _is_library(match["file"])]
    for match in [*theirs, *found][:1]:
        return f"{match['file']}:{match['line']} in {match['name']}"
    return None


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES)) or _HARNESS in Path(file).parents


def ending(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None:
        return "left in order in the middle of the case"
    if status >= 0:
        return f"left with exit status {status} in the middle of the case"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    if -status == signal.SIGKILL:
        return f"was killed from outside ({name}; for want of memory, perhaps)"
    if -status == signal.SIGTERM:  # pebble ends a process that does not answer any more
        return f"closed its channel, or was ended from outside ({name})"
    return f"died of {name}"
