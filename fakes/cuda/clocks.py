"""Which asynchronous work the host has waited for: vector clocks.

Work is numbered as it is enqueued. A clock says, for each stream, up to which number all work is done: a stream's
clock, once everything enqueued on it so far is done; an event's, once it has happened; the host's, now. Whatever the
host's clock does not cover may still be running, however long ago it began.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import NamedTuple

Clock = dict[int, int]
"""Stream id -> number of the last work on it that is done. A stream that is absent: none."""

_numbers = itertools.count(1)


class Work(NamedTuple):
    """Something enqueued on a stream. Numbers rise over all streams, and over all simulations of a process."""

    stream: int
    number: int


def merge(clock: Clock, other: Clock) -> None:
    """Make `clock` cover what `other` covers too."""
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


class Timeline:
    """What the host knows to be done, and the work that it does not."""

    def __init__(self) -> None:
        self._host: Clock = {}
        self._latest: Clock = {}
        self._unfinished: list[tuple[Work, Callable[[], None]]] = []
        self._lock = threading.Lock()

    def enqueue(self, stream: int, clock: Clock, finish: Callable[[], None] | None = None) -> Work:
        """Begin work on a stream whose clock this is. `finish` is called once the host has waited for it."""
        with self._lock:
            work = Work(stream, next(_numbers))
            clock[stream] = self._latest[stream] = work.number
            if finish is not None:
                self._unfinished.append((work, finish))
        return work

    def done(self, work: Work) -> bool:
        """Whether the host has waited for this work."""
        return self._host.get(work.stream, 0) >= work.number

    def passed(self, clock: Clock) -> bool:
        """Whether the host has waited for all that a clock covers."""
        return all(self._host.get(stream, 0) >= number for stream, number in clock.items())

    def wait(self, clock: Clock) -> None:
        """The host waits for all that a clock covers."""
        if self.passed(clock):
            return
        with self._lock:
            merge(self._host, clock)
            finished = [finish for work, finish in self._unfinished if self.done(work)]
            self._unfinished = [entry for entry in self._unfinished if not self.done(entry[0])]
        for finish in finished:
            finish()

    def wait_for_all(self) -> None:
        """The host waits for everything that was ever enqueued, also on streams that are gone."""
        self.wait(dict(self._latest))
