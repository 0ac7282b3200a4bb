"""A watcher for tests: it keeps what a simulated device notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from fakes.cuda import watch


@dataclass
class Watched:
    wants_hazards: bool = True
    wants_waits: bool = True
    hazards: list[watch.Hazard] = field(default_factory=list[watch.Hazard])
    waits: list[watch.HostWait] = field(default_factory=list[watch.HostWait])

    def hazard(self, hazard: watch.Hazard) -> None:
        self.hazards.append(hazard)

    def host_waits(self, wait: watch.HostWait) -> None:
        self.waits.append(wait)


@contextmanager
def watched() -> Iterator[Watched]:
    """Keep what is noticed inside."""
    watcher = Watched()
    watch.watchers.append(watcher)
    try:
        yield watcher
    finally:
        watch.watchers.remove(watcher)
