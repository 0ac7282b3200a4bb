"""One worker as its parent sees it: a process of pebble's, a channel, a log."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Generator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, concurrent

from conformance.isolation.lastwords import LastWords, ending, last_words
from conformance.isolation.messages import Began, Place, ReadBack, Ready, Setup, Work
from conformance.isolation.worker import WHERE, serve

_DUMP_SECONDS = 0.3
_REAP_SECONDS = 10.0


@contextmanager
def _interrupts_held() -> Generator[None]:
    """A process that is started inside gets no Ctrl-C before it has a session of its own (`worker.serve`)."""
    resource_tracker.ensure_running()  # where it starts one itself, it lets interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Worker:
    """A started process. It says `Began`, then `Ready` or `Unfit`; only then it may be given work."""

    def __init__(self, setup: Setup, place: Place) -> None:
        self.place = place
        self.pid: int | None = None
        self.ready: Ready | None = None
        self.started = time.monotonic()
        context = multiprocessing.get_context("spawn")
        ends: Any = context.Pipe()
        self.conn: Connection = ends[0]
        decorate: Any = concurrent.process  # pebble types neither this form of it nor the context
        with _interrupts_held():
            self._future: ProcessFuture[None] = decorate(context=context, daemon=False)(serve)(
                ends[1], setup, place
            )
        ends[1].close()

    def receive(self) -> Any:
        """The next message; None once the process has gone."""
        try:
            message = self.conn.recv()
        except (EOFError, OSError):
            return None
        if isinstance(message, Began):
            self.pid = message.pid
        elif isinstance(message, Ready):
            self.ready = message
        return message

    def send(self, request: Work | ReadBack) -> None:
        """Never blocks for long: requests are short. A process that has gone is noticed when it is heard."""
        with contextlib.suppress(OSError):
            self.conn.send(request)

    def interrupt(self) -> LastWords:
        """Where its code is now, which also a thread that holds the GIL tells."""
        if self._signal(WHERE):
            time.sleep(_DUMP_SECONDS)
        return last_words(self.place.log)

    def kill(self) -> None:
        """End the process and those that it has started, and wait until it has gone."""
        with contextlib.suppress(OSError):
            while self.pid is None and self.conn.poll() and self.receive() is not None:
                pass
        if not self._signal(signal.SIGKILL):
            self._future.cancel()  # it has gone, or is not even settled yet
        self.conn.close()
        self._status()

    def end(self) -> str:
        """How it ended by itself, in words. It is made sure that it has."""
        status = self._status()
        words = last_words(self.place.log)
        self.kill()
        return f"{ending(status)}{words}"

    def _signal(self, number: signal.Signals) -> bool:
        if self.pid is None or self._future.done():
            return False
        with contextlib.suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)
        return True

    def _status(self) -> int | None:
        """Exit status, negative for a signal; None if it lives on or left in order."""
        try:
            error = self._future.exception(timeout=_REAP_SECONDS)
        except (TimeoutError, CancelledError):
            return None
        return error.exitcode if isinstance(error, ProcessExpired) else None

    def forget(self) -> None:
        """Remove what it left on disk."""
        for path in (self.place.log, self.place.running):
            Path(path).unlink(missing_ok=True)
