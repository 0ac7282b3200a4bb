"""Runs the checks against every mutant: caught by which check, after how many cases, how small the case is."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from cases.codec import short
from cases.model import Case
from conformance.examine import examine
from conformance.find import smallest
from conformance.mutants import MUTANTS, Mutant
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.selection import cases_for, sessions_for
from conformance.session import Session
from conformance.sweep import size
from conformance.trial import Asker
from fakes.recorder import Mode

MAX_EXAMPLES = 4000
"""Cases tried before a mutant counts as a survivor."""


@dataclass(frozen=True, kw_only=True)
class Caught:
    """What came of one mutant in one mode. `case` is the smallest that its check fails on; None: it survived."""

    mutant: Mutant
    mode: Mode
    seconds: float
    case: Case | None = None
    verdict: Verdict | None = None

    @property
    def faults(self) -> list[str]:
        """Why this does not count as caught; empty if it does."""
        if self.case is None or self.verdict is None:
            return [f"survived: {self.mutant.check} found nothing in {MAX_EXAMPLES} cases"]
        raised = self.verdict.outcomes[self.mutant.check] is Outcome.RAISED
        if raised and not self.mutant.raises:
            error = next(f.message for f in self.verdict.findings if f.check == self.mutant.check)
            return [f"it raised: {error}"]
        if self.mutant.alone and not self.alone:
            return [f"{', '.join(sorted(self.verdict.failed))} fail, {self.mutant.check} alone must"]
        requests, tokens = case_size(self.case)
        if requests > self.mutant.requests or tokens > self.mutant.tokens:
            return [
                f"shrank to {requests} requests and {tokens} tokens only, "
                f"{self.mutant.requests} and {self.mutant.tokens} show it"
            ]
        return []

    @property
    def alone(self) -> bool:
        """Whether the mutant's own check is the only one that fails on the case."""
        return self.verdict is not None and self.verdict.failed == frozenset({self.mutant.check})


def case_size(case: Case) -> tuple[int, int]:
    """Requests over all steps, and the sum of their kv_len."""
    return size(case)[0], sum(sum(step.kv_lens) for step in case.steps)


def hunt(mutant: Mutant, session: Session, *, seed: int = 0) -> Caught:
    """Find and shrink a case on which the mutant's own check fails. The session holds the correct backend."""
    correct = next(a for a in session.askers if a.spec.name == mutant.base)
    asker = Asker(mutant.spec(correct.spec), correct.machine, correct.mode)
    strategy = (sessions_for if mutant.check == "session" else cases_for)([asker.spec.capabilities])
    started = time.perf_counter()
    case = smallest(asker, mutant.check, strategy, seed=seed, max_examples=MAX_EXAMPLES)
    verdict = None if case is None else examine(Question(case), asker)
    return Caught(
        mutant=mutant, mode=correct.mode, seconds=time.perf_counter() - started, case=case, verdict=verdict
    )


def hunt_all(mutants: Iterable[Mutant], mode: Mode) -> Iterable[Caught]:
    """Hunt several mutants, in one session a device.

    Raises:
        fakes.cuda.DeviceUnavailable: there is none of the kind that a mutant needs.
    """
    of_mode = [m for m in mutants if mode in m.modes]
    devices: tuple[Literal["auto", "full"], ...] = ("auto", "full")
    for device in devices:
        wanted = [m for m in of_mode if m.device == device]
        if not wanted:
            continue
        with Session(sorted({m.base for m in wanted}), mode=mode, device_sim=device) as session:
            for m in wanted:
                yield hunt(m, session)


def run_mutants(names: Sequence[str], modes: Sequence[Mode], out: TextIO) -> int:
    """Print a line per mutant and mode; 0 if every one was caught by its own check, shrunk, and none is a survivor.

    Raises:
        ValueError: a name that is no mutant.
    """
    unknown = [n for n in names if n not in MUTANTS]
    if unknown:
        raise ValueError(f"unknown mutant {unknown[0]!r}; known are {', '.join(sorted(MUTANTS))}")
    chosen = [MUTANTS[n] for n in names] if names else list(MUTANTS.values())
    bad = 0
    results: list[Caught] = []
    for mode in modes:
        for caught in hunt_all(chosen, mode):
            results.append(caught)
            bad += bool(caught.faults)
            print(_line(caught), file=out, flush=True)
    print(_summary(results), file=out)
    return 1 if bad else 0


def _line(caught: Caught) -> str:
    head = f"{caught.mutant.name:32} {caught.mutant.base:18} {caught.mode:9} {caught.mutant.check:12}"
    if caught.case is None or caught.verdict is None:
        return f"{head} SURVIVED"
    requests, tokens = case_size(caught.case)
    others = sorted(caught.verdict.failed - {caught.mutant.check})
    beside = f"beside {', '.join(others)}" if others else "alone"
    wrong = f"  WRONG: {caught.faults[0]}" if caught.faults else ""
    return (
        f"{head} {caught.seconds:5.1f} s  {requests} requests {tokens:3} tokens  "
        f"{short(caught.verdict.digest)}  {beside}{wrong}"
    )


def _summary(results: Sequence[Caught]) -> str:
    caught = [r for r in results if r.case is not None]
    alone = sorted({r.mutant.check for r in caught if r.alone})
    return (
        f"{len(caught)} of {len(results)} caught by the check that claims them; "
        f"checks with a mutant that only they catch: {', '.join(alone)}"
    )
