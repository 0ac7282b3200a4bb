"""Workers that are handed cases in batches and tell verdicts one by one; who dies is replaced by a spare.

Pebble's own `ProcessPool` is not used: it tells a result when a whole task has ended, lets all workers share one
channel and one lock (one that dies with the lock in its hand stops the others), has no spare workers, and takes exit
status 0 for a good end, so that a task whose process left by `_exit(0)` never ends. Here each worker is one
`pebble.concurrent.process`, whose future tells how it ended, with a channel of its own.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path

from cases.model import Case
from conformance.isolation.deadlines import Deadlines, compiler_ticks
from conformance.isolation.journal import running_file
from conformance.isolation.lastwords import last_words
from conformance.isolation.messages import (
    Answered,
    Broke,
    Judged,
    Place,
    ReadBack,
    Ready,
    Retired,
    Setup,
    Task,
    Unfit,
    Work,
)
from conformance.isolation.process import Worker
from conformance.isolation.verdicts import died, spent
from conformance.outcome import Outcome, Verdict

BATCH_SECONDS = 0.25
"""Work that is handed over at a time, by what cases took so far."""
MAX_BATCH = 64
MAX_BAD_STARTS = 3
"""Processes that may die one after the other without having begun with a case."""


class IsolationError(RuntimeError):
    """The harness failed in a worker, or workers cannot be started."""


@dataclass(frozen=True)
class _Job:
    """A task that was handed over; its `backends` are those still to come. The worker removes `file` when it begins
    with the batch."""

    task: Task
    file: Path

    @property
    def began(self) -> bool:
        return not self.file.exists()


@dataclass
class _Slot:
    """A place for one worker, on one GPU, with a spare worker behind it."""

    index: int
    gpu: str | None
    worker: Worker
    spare: Worker | None = None
    jobs: deque[_Job] = field(default_factory=deque[_Job])
    """Handed over and not answered, in order."""
    since: float = 0.0
    """When it was last heard, or given work when it had none."""
    ticks: int = 0
    """Processor time that its compilers had used at the last look."""
    patience: float = 0.0
    """How long beyond `since` it may be silent."""


class Pool:
    """Worker processes for one session.

    Args:
        setup: what each of them opens.
        workers: how many; None: one a GPU, or one.
        deadlines: see there.
        folder: below it, `running/` holds the cases that are about to run.
        spares: whether a started worker waits behind each one.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        workers: int | None = None,
        deadlines: Deadlines | None = None,
        folder: Path,
        spares: bool = True,
    ) -> None:
        self._setup, self._wanted, self._spares = setup, workers, spares
        self.deadlines = deadlines or Deadlines()
        self._folder = folder
        self._scratch = Path(tempfile.mkdtemp(prefix="conformance-"))
        self._slots: list[_Slot] = []
        self._again: deque[Task] = deque()
        self._numbers = iter(range(1 << 62))
        self._seconds = BATCH_SECONDS
        self._bad_starts = 0
        self._dry = True
        self._opened = False
        self.deaths = 0
        """Workers that were lost so far."""
        atexit.register(self.close)

    @property
    def pids(self) -> list[int]:
        """Processes at work; spare ones are not among them."""
        return [slot.worker.pid for slot in self._slots if slot.worker.pid is not None]

    def open(self) -> Ready:
        """Start the workers; what the first one says of the session.

        Raises:
            Exception: what opening the session raised in the worker.
            IsolationError: no worker comes up.
        """
        mine = os.environ.get("CUDA_VISIBLE_DEVICES")
        first = _Slot(0, None, self._new(0, None))
        self._slots = [first]
        ready = self._await(first)
        self._opened = True
        gpus: list[str | None] = [None] if ready.gpus < 2 else list(visible_gpus(mine, ready.gpus))
        for index in range(1, self._wanted or len(gpus)):
            gpu = gpus[index % len(gpus)]
            self._slots.append(_Slot(index, gpu, self._new(index, gpu)))
        first.gpu = gpus[0]
        return ready

    def close(self) -> None:
        """End every worker at once; they hold nothing that anybody needs."""
        atexit.unregister(self.close)
        for slot in self._slots:
            for worker in (slot.worker, slot.spare):
                if worker is not None:
                    worker.kill()
                    worker.forget()
        self._slots = []
        shutil.rmtree(self._scratch, ignore_errors=True)

    def stream(self, tasks: Iterable[Task]) -> Iterator[tuple[Case, Verdict]]:
        """Have every task done; verdicts as they come, those of one worker in order.

        Raises:
            IsolationError: the harness failed in a worker, or no worker comes up.
        """
        source = iter(tasks)
        self._dry = False
        try:
            while True:
                self._hand_out(source)
                if self._dry and not self._again and not any(slot.jobs for slot in self._slots):
                    return
                yield from self._hear()
        finally:  # whoever is still at work when nobody listens any more
            self._again.clear()
            for slot in self._slots:
                if slot.jobs:
                    slot.jobs.clear()
                    self._replace(slot)

    def examine(self, task: Task) -> Verdict:
        """One case on one backend."""
        ((_, verdict),) = list(self.stream([task]))
        return verdict

    def read_back(self, request: ReadBack) -> str:
        """The text that a worker gives; what happened instead, in words."""
        slot = self._slots[0]
        self._await(slot)
        slot.worker.send(request)
        deadline = time.monotonic() + self.deadlines.case
        while slot.worker.conn.poll(max(0.0, deadline - time.monotonic())):
            message = slot.worker.receive()
            if message is None:
                text = f"not possible: the process {slot.worker.end()}"
                break
            if isinstance(message, Answered):
                return message.text
        else:
            text = f"not possible: no answer within {self.deadlines.case:g} s"
        self._replace(slot)
        return f"weights read back with one-hot V:\n  {text}"

    def _new(self, slot: int, gpu: str | None) -> Worker:
        number = next(self._numbers)
        running = running_file(self._folder, slot).with_suffix(f".{number}.json")
        place = Place(
            parent=os.getpid(), log=str(self._scratch / f"{number}.log"), running=str(running), gpu=gpu
        )
        return Worker(self._setup, place)

    def _await(self, slot: _Slot) -> Ready:
        """Wait until a slot's worker is open for work."""
        while slot.worker.ready is None:
            if slot.worker.conn.poll(self._left_to_start(slot)):
                for _ in self._listen(slot):
                    pass
            else:
                self._not_started(slot)
        return slot.worker.ready

    def _left_to_start(self, slot: _Slot) -> float:
        return max(0.0, slot.worker.started + self.deadlines.start - time.monotonic())

    def _not_started(self, slot: _Slot) -> None:
        words = slot.worker.interrupt()
        raise IsolationError(
            f"a worker process was not ready {self.deadlines.start:g} s after its start{words}"
        )

    def _hand_out(self, source: Iterator[Task]) -> None:
        for slot in self._slots:
            if slot.worker.ready is None:
                continue
            size = max(1, min(MAX_BATCH, int(BATCH_SECONDS / self._seconds)))
            if len(slot.jobs) > size // 2:
                continue
            batch: list[Task] = []
            while len(batch) < size:
                task = self._again.popleft() if self._again else next(source, None)
                if task is None:
                    self._dry = True
                    break
                batch.append(task)
            if batch:
                self._give(slot, batch)

    def _give(self, slot: _Slot, batch: list[Task]) -> None:
        file = self._scratch / f"batch-{next(self._numbers)}"
        file.write_bytes(pickle.dumps(batch))
        if not slot.jobs:
            self._heard(slot)
        slot.jobs += [_Job(task, file) for task in batch]
        slot.worker.send(Work(str(file)))

    def _heard(self, slot: _Slot) -> None:
        slot.since, slot.ticks, slot.patience = time.monotonic(), -1, self.deadlines.case

    def _hear(self) -> Iterator[tuple[Case, Verdict]]:
        """Wait for messages, or for the first deadline."""
        now = time.monotonic()
        waiting = [
            slot.since + slot.patience - now if slot.worker.ready else self._left_to_start(slot)
            for slot in self._slots
            if slot.jobs or not slot.worker.ready
        ]
        slots = {slot.worker.conn: slot for slot in self._slots}
        spoke = wait(list(slots), timeout=max(0.0, min(waiting, default=1.0)))
        for conn in spoke:
            yield from self._listen(slots[conn])  # type: ignore[index]
        for slot in self._slots:
            if slot.worker.conn in spoke or slot.worker.conn.poll():
                continue
            if slot.worker.ready is None:
                if self._left_to_start(slot) <= 0:
                    self._not_started(slot)
            elif slot.jobs and time.monotonic() > slot.since + slot.patience:
                yield from self._overdue(slot)

    def _listen(self, slot: _Slot) -> Iterator[tuple[Case, Verdict]]:
        """Take all that a worker has said."""
        worker = slot.worker
        while worker is slot.worker and worker.conn.poll():
            message = worker.receive()
            if message is None:
                yield from self._gone(slot)
            elif isinstance(message, Judged):
                self._seconds += 0.1 * (time.monotonic() - slot.since - self._seconds)
                told = self._told(slot, message.verdict)
                if message.last:
                    self._replace(slot)
                yield told
            elif isinstance(message, Retired):
                task = slot.jobs[0].task
                words = last_words(worker.place.log)
                told = self._told(slot, spent(task.case, task.backends[0], message, words.said))
                self._replace(slot)
                yield told
            elif isinstance(message, Ready):
                self._heard(slot)
                if self._spares and slot.spare is None:
                    slot.spare = self._new(slot.index, slot.gpu)
            elif isinstance(message, Unfit):
                if not self._opened:
                    raise message.error
                self._count_bad_start(f"said {message.error}")
                self._replace(slot)
            elif isinstance(message, Broke):
                raise IsolationError(f"the harness failed in a worker process:\n{message.text}")

    def _told(self, slot: _Slot, verdict: Verdict) -> tuple[Case, Verdict]:
        """Take the next pair of case and backend off a slot's list."""
        job = slot.jobs.popleft()
        if len(job.task.backends) > 1:
            slot.jobs.appendleft(_Job(replace(job.task, backends=job.task.backends[1:]), job.file))
        self._bad_starts = 0
        self._heard(slot)
        return job.task.case, verdict

    def _gone(self, slot: _Slot) -> Iterator[tuple[Case, Verdict]]:
        """A worker has died by itself."""
        how = slot.worker.end()
        told: list[tuple[Case, Verdict]] = []
        if slot.jobs and slot.jobs[0].began:
            task = slot.jobs[0].task
            verdict = died(task.case, task.backends[0], Outcome.CRASHED, f"the process {how}")
            told.append(self._told(slot, verdict))
        else:
            self._count_bad_start(how)
        self._replace(slot)
        yield from told

    def _count_bad_start(self, how: str) -> None:
        self._bad_starts += 1
        if self._bad_starts >= MAX_BAD_STARTS:
            raise IsolationError(f"worker processes do not stay alive: the last one {how}")

    def _overdue(self, slot: _Slot) -> Iterator[tuple[Case, Verdict]]:
        """A worker is silent: because it compiles, or because it hangs."""
        silent = time.monotonic() - slot.since
        ticks = [compiler_ticks(s.worker.pid) for s in self._slots if s.worker.pid is not None and s.jobs]
        working, slot.ticks = sum(ticks) != slot.ticks, sum(ticks)
        if working and slot.ticks and silent < self.deadlines.compile:
            slot.patience = silent + 1.0  # look again
            return
        where = slot.worker.interrupt()
        task = slot.jobs[0].task
        what = f"no answer within {self.deadlines.case:g} s"
        if silent >= self.deadlines.compile:
            what = f"still compiling after {self.deadlines.compile:g} s"
        verdict = died(
            task.case, task.backends[0], Outcome.TIMED_OUT, f"{what}; the process was killed{where}"
        )
        told = self._told(slot, verdict)
        self._replace(slot)
        yield told

    def _replace(self, slot: _Slot) -> None:
        """End a slot's worker; the spare one takes over, and what was handed over is handed out again."""
        self.deaths += 1
        slot.worker.kill()
        slot.worker.forget()
        self._again.extendleft(job.task for job in reversed(slot.jobs))
        slot.jobs.clear()
        slot.worker, slot.spare = slot.spare or self._new(slot.index, slot.gpu), None


def visible_gpus(mine: str | None, count: int) -> Iterable[str]:
    """What CUDA_VISIBLE_DEVICES must be for each GPU that this process may use."""
    named = [name.strip() for name in (mine or "").split(",") if name.strip()]
    return named if len(named) == count else map(str, range(count))
