"""Where a worker does its work: an open session, asked one case after the other."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from backends.registry import BackendSpec
from cases.codec import to_json
from conformance.examine import examine
from conformance.isolation.journal import Journal
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
    Work,
    not_here,
)
from conformance.machine import Machine
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.readback import read_back
from conformance.session import Session
from conformance.trial import Asker
from conformance.waivers import in_force


class Desk:
    """Answers what the parent asks over `conn`. A verdict is sent as soon as it stands."""

    def __init__(self, conn: Connection, setup: Setup, place: Place) -> None:
        self._conn = conn
        self._journal = Journal(place.running)
        self._session = Session(setup.names, **setup.options)
        self._askers: dict[str, Asker] = {}
        self._gpu: Machine | None = None
        self._stack = ExitStack()

    def open(self) -> Ready:
        """Import the libraries, open the device; on a GPU also its context, which takes seconds."""
        self._stack.enter_context(self._session)
        self._askers = {asker.spec.name: asker for asker in self._session.askers}
        self._gpu = next((a.machine for a in self._session.askers if a.machine.real), None)
        if self._gpu is not None:
            self._gpu.settle()
        return Ready(
            tuple(_described(asker.spec) for asker in self._session.askers),
            self._session.device,
            self._session.left_out,
            self._session.libraries,
            self._session.mode,
            0 if self._gpu is None else torch.cuda.device_count(),
        )

    def answer(self, request: Work | ReadBack) -> None:
        """Do what was asked and send what came of it."""
        if isinstance(request, ReadBack):
            asker = self._askers[request.backend]
            self._conn.send(Answered(read_back(Question(request.case), asker, request.findings)))
            return
        file = Path(request.file)
        tasks: list[Task] = pickle.loads(file.read_bytes())  # noqa: S301 - written by the parent
        file.unlink()
        for task in tasks:
            self._do(task)

    def _do(self, task: Task) -> None:
        question = Question(task.case)
        text = to_json(task.case)
        for name in task.backends:
            self._journal.running(name, text)
            sys.stdout.flush()
            os.ftruncate(1, 0)
            said = judge(question, self._askers[name], task.checks, self._gpu)
            self._conn.send(said)
            if not isinstance(said, Judged) or said.last:
                os._exit(1)  # leaving a lost CUDA context in order can take forever


def judge(
    question: Question, asker: Asker, checks: frozenset[str] | None, gpu: Machine | None
) -> Judged | Retired | Broke:
    """Ask a backend one case, and see what is left of the process. `gpu`: the machine whose context may be lost."""
    verdict: Verdict | None = None
    error: Exception | None = None
    try:
        verdict = examine(question, asker, checks)
    except Exception as raised:  # noqa: BLE001 - of the harness, or through it of a spent process
        error = raised
    lost = None if gpu is None else _lost_context(gpu)
    if lost is not None:
        return Retired(Outcome.CRASHED, f"the CUDA context is lost: {lost}", verdict)
    if verdict is not None:
        return Judged(verdict, last=verdict.spends_process)
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Retired(Outcome.RAISED, f"no memory is left for the harness: {_line(error)}", None)
    if gpu is not None and isinstance(error, RuntimeError) and "CUDA error" in str(error):
        return Retired(
            Outcome.RAISED, f"an error came to light after the backend had returned: {_line(error)}", None
        )
    return Broke("".join(traceback.format_exception(error)))


def _lost_context(gpu: Machine) -> str | None:
    """What CUDA says if it is no longer usable. Waits for everything that the case has started."""
    try:
        gpu.settle()
    except Exception as error:  # noqa: BLE001 - torch has several classes for it
        return _line(error)
    return None


def _described(spec: BackendSpec) -> BackendSpec:
    """A backend as another process may know it. Only this one knows which releases answer, so which waivers hold."""
    return replace(spec, factory=not_here, waivers=tuple(replace(w, library=None) for w in in_force(spec)))


def _line(error: BaseException | None) -> str:
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first}"
