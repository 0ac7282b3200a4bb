"""What the parent and a worker tell each other. Batches of tasks travel as files, so that no message is long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backends.contract import EngineContext
from backends.libraries import Answer
from backends.registry import BackendSpec
from cases.model import Case
from conformance.outcome import Finding, Outcome, Verdict
from fakes.recorder import Mode


@dataclass(frozen=True)
class Task:
    """One case for several backends. `checks`: those that are run; None: all."""

    case: Case
    backends: tuple[str, ...]
    checks: frozenset[str] | None = None


@dataclass(frozen=True)
class Work:
    """To a worker: do the tasks pickled in this file, and remove it."""

    file: str


@dataclass(frozen=True)
class ReadBack:
    """To a worker: read the attention weights of a failing case back."""

    backend: str
    case: Case
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Began:
    """The worker's process runs; nothing is imported yet."""

    pid: int


def not_here(engine: EngineContext) -> Any:
    """Stands for the factory of a backend in a process that must not make it."""
    raise RuntimeError(f"a backend of a worker process is made there alone ({engine.num_layers} layers)")


@dataclass(frozen=True)
class Ready:
    """The worker is open for work. `backends`: as it resolved them, made there alone. `mode`: how the libraries behave,
    which real ones decide themselves. `gpus`: how many real ones it runs on."""

    backends: tuple[BackendSpec, ...]
    device: str
    left_out: str
    libraries: Mapping[str, Answer]
    mode: Mode
    gpus: int


@dataclass(frozen=True)
class Unfit:
    """The worker could not open its session: `error` is what a session in this process would have raised."""

    error: Exception


@dataclass(frozen=True)
class Judged:
    """The verdict on the next pair of case and backend, in the order in which they were handed over. `last`: the worker
    leaves, because the backend has used up its memory."""

    verdict: Verdict
    last: bool = False


@dataclass(frozen=True)
class Retired:
    """Likewise, but the backend spent the process: this is its last message. `verdict`: as far as there is one."""

    outcome: Outcome
    message: str
    verdict: Verdict | None


@dataclass(frozen=True)
class Broke:
    """The harness itself failed in the worker; `text` is the traceback."""

    text: str


@dataclass(frozen=True)
class Answered:
    """The text that was asked for."""

    text: str


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What every worker of a pool is told at its start: backends by name, and what a `Session` is given besides."""

    names: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """What is one worker's own. `log`: all that it prints; `running`: the case it is about to run, as a case file;
    `gpu`: what CUDA_VISIBLE_DEVICES is set to, None to leave it."""

    parent: int
    log: str
    running: str
    gpu: str | None
