"""A worker's process: its own session of processes, its output in a file, killed when its parent dies.

Nothing of weight is imported before the process has settled; CUDA is told which GPU it may see by then.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import sys
from multiprocessing.connection import Connection

from conformance.isolation.messages import Began, Place, Setup, Unfit
from conformance.shadow import add_current_folder

WHERE = signal.SIGUSR1
"""Makes a worker write to its log what every thread is doing, even one that holds the GIL in native code."""
_PR_SET_PDEATHSIG = 1


def serve(conn: Connection, setup: Setup, place: Place) -> None:
    """The whole life of a worker: settle, open the session, answer until the parent hangs up."""
    _settle(place)
    conn.send(Began(os.getpid()))
    add_current_folder()
    try:
        from conformance.isolation.desk import Desk

        desk = Desk(conn, setup, place)
        ready = desk.open()
    except Exception as error:  # noqa: BLE001 - the parent raises it
        conn.send(Unfit(_portable(error)))
        return
    conn.send(ready)
    while True:
        try:
            request = conn.recv()
        except EOFError:
            return
        _watch_faults()
        desk.answer(request)


def _settle(place: Place) -> None:
    os.setsid()  # compilers that it starts die with it, and Ctrl-C reaches the parent alone
    _forget_interrupts()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler in Python would wait for the GIL
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != place.parent:  # it died before that
            os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if place.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = place.gpu
    log = os.open(place.log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    _watch_faults()
    faulthandler.register(WHERE, 2, all_threads=True)


def _forget_interrupts() -> None:
    """What came before this process had a session of its own was for the parent, which had held it back."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, before)


def _watch_faults() -> None:
    """Have faults of this process told in the log. More than once: TVM's runtime takes the signals for itself."""
    faulthandler.disable()
    faulthandler.enable(2)


def _portable(error: Exception) -> Exception:
    """The error itself where the parent can have it, else its words."""
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - whatever a foreign class does when it is copied
        again = None
    return error if type(again) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")
