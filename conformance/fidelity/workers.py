"""Worker processes for the real library: a call may kill its own, and costs nobody else anything.

The parent touches no GPU and imports no kernel library. Every worker has one call at a time; spare ones are started
ahead, since a fresh CUDA context takes seconds.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Self, cast

Task = Mapping[str, Any]
Answer = dict[str, Any]

START_DEADLINE = 180.0
MEMORY_LIMIT = 12 << 30
"""A planner that reads nonsense may make a list of all the tiles that it finds."""
MEMORY_CHECK = 0.5
STARTS = 3
"""So many processes in a row may fail to start, as when the GPU's memory is full for a moment."""

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Death:
    """How a worker ended without an answer."""

    how: str
    hung: bool = False


class Worker:
    """One process; `ask` sends a task and waits for its answer."""

    def __init__(self, module: str, arguments: Iterable[str], environment: Mapping[str, str]) -> None:
        mine, theirs = os.pipe()
        around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": _python_path(), **environment}
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-m", module, str(theirs), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(theirs,),
            env=around,
        )
        os.close(theirs)
        self._answers = mine
        self._unread = b""
        self.versions: dict[str, str] | None = None

    def wait_ready(self) -> Death | None:
        """Wait until the library is imported; how it died if it did."""
        if self.versions is not None:
            return None
        said = self._read(START_DEADLINE)
        if isinstance(said, Death):
            return said
        if "error" in said:
            self.end()
            return Death(str(said["error"]))
        self.versions = said["versions"]
        return None

    def ask(self, task: Task, deadline: float) -> Answer | Death:
        """Send a task. After a `Death` the worker is gone."""
        died = self.wait_ready()
        if died is not None:
            return died
        pipe = cast("Any", self._process.stdin)
        try:
            pipe.write(json.dumps(task).encode() + b"\n")
            pipe.flush()
        except OSError:
            return self._buried()
        return self._read(deadline)

    def end(self) -> None:
        """Kill the process, if it lives."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
        if self._answers >= 0:
            os.close(self._answers)
            self._answers = -1

    def _resident(self) -> int:
        """Bytes of memory that the process has, 0 where it cannot be told."""
        with suppress(OSError, ValueError, IndexError):
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
            return int(pages) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def _read(self, deadline: float) -> Answer | Death:
        ends = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._unread:
                left = ends - time.monotonic()
                if not selector.select(max(0.0, min(left, MEMORY_CHECK))):
                    if left <= MEMORY_CHECK:
                        self.end()
                        return Death(f"no answer within {deadline:g} s", hung=True)
                    if self._resident() > MEMORY_LIMIT:
                        self.end()
                        return Death(f"the process took more than {MEMORY_LIMIT >> 30} GiB of memory")
                    continue
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    return self._buried()
                self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _buried(self) -> Death:
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        code = self._process.wait()
        self.end()
        return Death(signal.Signals(-code).name if code < 0 else f"exit status {code}")


def _python_path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


class Pool:
    """`size` workers at work, and `spares` more that are ready when one dies.

    Args:
        module: what each process runs; `conformance.fidelity.worker` says how it talks.
        arguments: that it is given.
        environment: variables that it has beside those of this process, or instead of them.
    """

    def __init__(
        self,
        module: str,
        size: int,
        arguments: Iterable[str],
        spares: int = 2,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        words = tuple(arguments)
        self._start = lambda: Worker(module, words, environment or {})
        self._size = size
        self.versions: dict[str, str] = {}
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for _ in range(size + spares):
            self._idle.put(self._start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while True:
            try:
                self._idle.get_nowait().end()
            except Empty:
                return

    def _ready(self) -> Worker:
        """A worker that has imported its libraries.

        Raises:
            WorkerError: none came up, several times in a row.
        """
        died = None
        for _ in range(STARTS):
            try:
                worker = self._idle.get_nowait()
            except Empty:
                worker = self._start()
            died = worker.wait_ready()
            if died is None:
                self.versions = worker.versions or {}
                return worker
        raise WorkerError(f"worker processes do not start: {died.how if died else ''}")

    def ask(
        self,
        tasks: Iterable[Task],
        *,
        deadline: Callable[[Task], float],
        told: Callable[[Task, Answer | Death], None],
    ) -> None:
        """Ask all tasks; they begin in their order. `told` hears each answer, one at a time.

        Raises:
            WorkerError: no process could be started.
        """
        waiting: SimpleQueue[Task] = SimpleQueue()
        for task in tasks:
            waiting.put(task)
        lock = threading.Lock()
        failures: list[BaseException] = []

        def seat() -> None:
            worker: Worker | None = None
            try:
                while not failures:
                    try:
                        task = waiting.get_nowait()
                    except Empty:
                        return
                    worker = worker or self._ready()
                    answer = worker.ask(task, deadline(task))
                    gone = isinstance(answer, Death) or answer.get("last", False)
                    if gone:
                        worker.end()
                        worker = None
                        if not waiting.empty():
                            self._idle.put(self._start())
                    with lock:
                        told(task, answer)
            except BaseException as error:  # noqa: BLE001 - raised again below, in the thread that asked
                failures.append(error)
            finally:
                if worker is not None:
                    self._idle.put(worker)

        seats = [threading.Thread(target=seat, daemon=True) for _ in range(self._size)]
        for thread in seats:
            thread.start()
        for thread in seats:
            thread.join()
        if failures:
            raise failures[0]


class WorkerError(RuntimeError):
    """Workers cannot be had; the message is one sentence."""
