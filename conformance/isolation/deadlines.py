"""How long things may take, and how a compiler at work is told from a hang."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_CASE = 60.0


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """In seconds. `case`: one case on one backend. `compile`: the same while it compiles kernels. `start`: from a new
    process until its session is open."""

    case: float = DEFAULT_CASE
    compile: float = 900.0
    start: float = 300.0


def compiler_ticks(session: int) -> int:
    """Processor time, in clock ticks, of the processes that a worker has started and that live: compilers, that is.

    It rises while one is at work. 0 where nothing is known, as on systems without /proc.
    """
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        if stat.parent.name == str(session):
            continue
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            total += sum(map(int, fields[11:15]))
    return total
