"""Cases per second and core on the default mix, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from hypothesis.strategies import SearchStrategy

from backends.libraries import LibraryKind
from cases.model import Case
from conformance import engine, kernel, question
from conformance.isolation.session import open_session
from conformance.question import Question
from conformance.selection import cases_for
from conformance.session import Session
from conformance.sweep import Sweep, draw
from conformance.trial import Asker


@dataclass(frozen=True)
class Throughput:
    """One backend on the default mix, hypothesis included. Shares are of the total and sum to 1."""

    backend: str
    cases: int
    seconds: float
    shares: dict[str, float]

    @property
    def per_second(self) -> float:
        return self.cases / self.seconds

    def __str__(self) -> str:
        parts = "  ".join(f"{name} {share:4.0%}" for name, share in self.shares.items())
        return f"{self.backend:18} {self.per_second:6.0f} cases/s   {parts}"


@dataclass(frozen=True)
class Pace:
    """What this machine gives one thread at the moment: rates from two machines, or two hours, differ with it."""

    steps: float  # of a Python loop that adds integers, a second
    seconds: float  # of one torch addition of 64 float32 numbers

    def __str__(self) -> str:
        return (
            f"{self.steps / 1e6:.1f} million loop steps/s, {self.seconds * 1e6:.2f} us a small torch addition"
        )


def pace(count: int = 100_000) -> Pace:
    """The best of `ROUNDS` rounds of `count` loop steps and `count` torch additions, in CPU time."""
    numbers = torch.ones(64)

    def loop() -> None:
        total = 0
        for step in range(count):
            total += step

    def add() -> None:
        for _ in range(count):
            torch.add(numbers, numbers)

    def best(work: Callable[[], None]) -> float:
        return min(_cpu_seconds(work) for _ in range(ROUNDS)) / count

    return Pace(1 / best(loop), best(add))


def _cpu_seconds(work: Callable[[], None]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


ROUNDS = 3
"""Of the same cases; the fastest is told, since what else runs on a machine only adds."""

PARTS = ("draw", "tensors", "backend", "oracle", "harness")


Clock = Callable[[], float]


def measure(
    names: Sequence[str],
    count: int,
    seed: int = 0,
    *,
    library: LibraryKind = "fake",
    device_sim: Literal["auto", "light", "full"] = "auto",
) -> Iterator[Throughput]:
    """The same `count` cases on each backend, `ROUNDS` times: every per-run check, two executions, warm, one process.

    On the full simulated device decode steps are also replayed from captured graphs.

    CPU time of one thread; with real libraries the time that passes, and "backend" is the library's share with the wait
    for the GPU.
    """
    clock = time.process_time if library == "fake" else time.perf_counter
    session = open_session(names, library=library, isolate=False, device_sim=device_sim)
    assert isinstance(session, Session)  # not isolated
    with session:
        for asker in session.askers:
            yield _one(asker, count, seed, clock)


def _one(asker: Asker, count: int, seed: int, clock: Clock) -> Throughput:
    strategy = cases_for([asker.spec.capabilities])
    warm = [case for cases in draw(strategy, 50, seed + 1) for case in cases]
    Sweep([asker]).ask_all(warm)
    return min((_round(asker, strategy, count, seed, clock) for _ in range(ROUNDS)), key=lambda t: t.seconds)


def _round(asker: Asker, strategy: SearchStrategy[Case], count: int, seed: int, clock: Clock) -> Throughput:
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    started = clock()
    drawn: list[Case] = [case for cases in draw(strategy, count, seed) for case in cases]
    spent["draw"] = clock() - started
    with _timed(spent, clock):
        Sweep([asker]).ask_all(drawn)
    total = clock() - started
    shares = {part: spent[part] / total for part in PARTS[:-1]}
    shares["harness"] = 1.0 - sum(shares.values())
    return Throughput(asker.spec.name, len(drawn), total, shares)


@contextmanager
def _timed(spent: dict[str, float], clock: Clock) -> Generator[None]:
    """Add up the time of the parts while the block runs."""
    with ExitStack() as stack:
        replace = [
            (question, "materialise", "tensors"),
            (Question, "answer", "oracle"),
            (Question, "budget", "oracle"),
            (Question, "lse_budget", "oracle"),
            (engine.EngineRun, "forward", "backend"),
            (engine.EngineRun, "prepare", "backend"),
            (engine.EngineRun, "build", "backend"),
            (kernel.KernelRun, "attend", "backend"),
            (engine, "bring_back", "backend"),
            (kernel, "bring_back", "backend"),
        ]
        nested = [0]
        for owner, name, part in replace:
            stack.enter_context(
                patch.object(owner, name, _counted(getattr(owner, name), part, spent, nested, clock))
            )
        yield


def _counted(
    function: Callable[..., Any], part: str, spent: dict[str, float], nested: list[int], clock: Clock
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if nested[0]:
            return function(*args, **kwargs)
        nested[0] = 1
        started = clock()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += clock() - started
            nested[0] = 0

    return counted
