"""The case that is about to run, on disk before it runs: a case file that `conformance replay` takes."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cases.codec import SHOWN_DIGITS, digest, load, save
from cases.errors import CaseError
from conformance.errors import UsageError


class Journal:
    """One worker's case file, written anew for every case. It survives the process, not a loss of power."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)

    def running(self, backend: str, case_json: str) -> None:
        """This case is the one that runs on this backend from now on."""
        why = json.dumps(f"was running on backend {backend} when the run was cut")
        data = f'{{"why": {why}, "case": {case_json}}}\n'.encode()
        os.pwrite(self._file, data, 0)
        os.ftruncate(self._file, len(data))


def require_writable(folder: Path) -> None:
    """Make sure that workers can keep their cases in `folder/running`.

    Raises:
        UsageError: they cannot.
    """
    running = folder / "running"
    try:
        running.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=running).close()
    except OSError as error:
        raise UsageError(
            f"{running}: cannot be written ({error.strerror}), and with --isolate the case that runs is kept there: "
            "run in another folder or with --no-isolate"
        ) from None


def running_file(folder: Path, slot: int) -> Path:
    """Where the worker of one slot of this process keeps its case."""
    return folder / "running" / f"{os.getpid()}-{slot}.json"


@dataclass(frozen=True)
class Left:
    """A case that was running when a run was cut: where it is kept now, and why."""

    file: Path
    why: str


def left_behind(folder: Path) -> list[Left]:
    """Cases of runs that were cut, moved from `folder/running` to `folder`; each is told once."""
    found: list[Left] = []
    for path in sorted((folder / "running").glob("*.json")):
        if _lives(path.name.partition("-")[0]):
            continue
        try:
            left = load(path)
        except CaseError:  # cut before its first case, or while it was written
            path.unlink(missing_ok=True)
            continue
        kept = folder / f"{digest(left.case)[:SHOWN_DIGITS]}.json"
        save(kept, left.case, why=left.why)
        path.unlink(missing_ok=True)
        found.append(Left(kept, left.why))
    return found


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except (ValueError, PermissionError):
        return True
    return True
