"""Cases per second and core on the default mix, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from cases.model import Case
from conformance import engine, kernel, question
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


PARTS = ("draw", "tensors", "backend", "oracle", "harness")


def measure(names: Sequence[str], count: int, seed: int = 0) -> Iterator[Throughput]:
    """`count` cases on each backend, every per-run check, two executions: CPU time of this process, one thread."""
    with Session(names) as session:
        for asker in session.askers:
            yield _one(asker, count, seed)


def _one(asker: Asker, count: int, seed: int) -> Throughput:
    strategy = cases_for([asker.spec.capabilities])
    warm = [case for cases in draw(strategy, 50, seed + 1) for case in cases]
    Sweep([asker]).ask_all(warm)
    spent: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    started = time.process_time()
    drawn: list[Case] = [case for cases in draw(strategy, count, seed) for case in cases]
    spent["draw"] = time.process_time() - started
    with _timed(spent):
        Sweep([asker]).ask_all(drawn)
    total = time.process_time() - started
    shares = {part: spent[part] / total for part in PARTS[:-1]}
    shares["harness"] = 1.0 - sum(shares.values())
    return Throughput(asker.spec.name, len(drawn), total, shares)


@contextmanager
def _timed(spent: dict[str, float]) -> Generator[None]:
    """Add up the CPU time of the parts while the block runs."""
    with ExitStack() as stack:
        replace = [
            (question, "materialise", "tensors"),
            (Question, "answer", "oracle"),
            (Question, "budget", "oracle"),
            (engine.EngineRun, "forward", "backend"),
            (engine.EngineRun, "prepare", "backend"),
            (engine.EngineRun, "build", "backend"),
            (kernel.KernelRun, "attend", "backend"),
        ]
        nested = [0]
        for owner, name, part in replace:
            stack.enter_context(
                patch.object(owner, name, _counted(getattr(owner, name), part, spent, nested))
            )
        yield


def _counted(
    function: Callable[..., Any], part: str, spent: dict[str, float], nested: list[int]
) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        if nested[0]:
            return function(*args, **kwargs)
        nested[0] = 1
        started = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.process_time() - started
            nested[0] = 0

    return counted
