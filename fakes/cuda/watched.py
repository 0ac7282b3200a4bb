"""For tests: a simulated device, and a watcher that keeps what it notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from fakes import cuda
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


def simulated(kind: str) -> Iterator[cuda.Simulation]:
    """A simulated device, or a skip that says why it cannot be had."""
    with ExitStack() as stack:
        try:
            simulation = stack.enter_context(cuda.simulated_cuda("full" if kind == "full" else "light"))
        except cuda.DeviceUnavailable as reason:
            pytest.skip(str(reason))
        yield simulation
