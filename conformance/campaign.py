"""A whole run: cases put to the backends of their level, and the failures made small."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from hypothesis.strategies import SearchStrategy

from cases.long import long_cases
from cases.model import Case, Level
from cases.simplify import simplify
from conformance.examine import examine
from conformance.find import fails, smallest
from conformance.outcome import LEADING, Verdict
from conformance.question import Question
from conformance.selection import cases_for, distinct, named_cases, sessions_for, smoke_cases
from conformance.support import unsupported
from conformance.sweep import Asked, Known, Sweep, Tally, draw, size
from conformance.trial import AnyAsker, RemoteAsker
from conformance.waivers import pinned_cases

_SMALL = (1, 4, 1)
"""Size of a case that need not be searched for a smaller one."""
LEVELS: tuple[Level, ...] = ("engine", "kernel")
MAX_ROUNDS = 20
"""Draws of `count` cases after which a backend that declares next to nothing has been asked enough."""
ROUND_SEEDS = 1_000_000_007
"""Apart by so much, the seeds of two rounds meet nowhere."""
MAX_DEATHS = 30
"""Processes that may be lost to making one case smaller."""


@dataclass(frozen=True)
class Failure:
    """One fault, in the smallest case that was found for it. `checks`: those that fail on this case."""

    asker: AnyAsker
    case: Case
    verdict: Verdict

    @property
    def checks(self) -> frozenset[str]:
        return self.verdict.failed


class Campaign:
    """Asks, level by level: smoke cases, the corpus and named edges, those given, then random ones.

    Args:
        askers: backends of one level or both.
        count: random cases per backend, of those that it declares.
        sessions: random sessions per engine-level backend, the same way.
        seed: draws them.
        smoke: whether the smallest cases are asked.
        named: whether the corpus and the named edges are asked.
        given: further cases; each goes to the backends of its level.
        checks: the checks that are run; None: all.
        told: is told every verdict as it comes.
        known: verdicts that need not be asked for again (`conformance.report.resume`).
    """

    def __init__(
        self,
        askers: Sequence[AnyAsker],
        *,
        count: int = 0,
        sessions: int = 0,
        seed: int = 0,
        smoke: bool = False,
        named: bool = False,
        given: Iterable[Case] = (),
        checks: Collection[str] | None = None,
        told: Callable[[Case, Verdict], None] | None = None,
        known: Known | None = None,
    ) -> None:
        self.count, self.sessions, self.seed = count, sessions, seed
        self._smoke, self._named, self._given = smoke, named, given
        self._checks, self._told = checks, told
        self._askers = {asker.spec.name: asker for asker in askers}
        self.sweeps: dict[Level, Sweep] = {}
        for level in LEVELS:
            own = [asker for asker in askers if asker.spec.level == level]
            if own:
                self.sweeps[level] = Sweep(own, checks, known)

    def run(self) -> None:
        """Ask everything. If it is interrupted, what has been asked is kept."""
        pinned = pinned_cases(asker.spec for asker in self._askers.values())
        for level, sweep in self.sweeps.items():
            smoke = [case for asker in sweep.askers for case in smoke_cases(asker.spec.capabilities)]
            own = [case for case in pinned if case.level == level]
            named = named_cases(level) if self._named else ()
            self._ask(distinct([*(smoke if self._smoke else ()), *own, *named]))
            if self._named:
                self._ask_long(level, sweep)
        self._ask(self._given)
        for sweep in self.sweeps.values():
            self._ask_random(sweep)

    def _ask_long(self, level: Level, sweep: Sweep) -> None:
        """Long contexts, put to the attention kernels of libraries on a GPU."""
        askers = [
            asker
            for asker in sweep.askers
            if asker.real and asker.spec.capabilities.library and not asker.spec.capabilities.merges
        ]
        self._tell(sweep.ask_each((case, askers) for case in (long_cases(level) if askers else ())))

    def _ask_random(self, sweep: Sweep) -> None:
        for askers in _drawn_together(sweep.askers):
            capabilities = [asker.spec.capabilities for asker in askers]
            self._tell(sweep.ask_each(self._random(askers, cases_for(capabilities), self.count)))
            if capabilities[0].level == "engine":
                self._tell(sweep.ask_each(self._random(askers, sessions_for(capabilities), self.sessions)))

    def _random(
        self, askers: Sequence[AnyAsker], strategy: SearchStrategy[Case], count: int
    ) -> Iterator[Asked]:
        """One draw serves several backends, until each has been asked `count` cases that it declares."""
        wanted = {asker.spec.name: count for asker in askers}
        for round_ in range(MAX_ROUNDS if count else 0):
            for drawn in draw(strategy, count, self.seed + round_ * ROUND_SEEDS):
                for case in drawn:
                    open_ = [asker for asker in askers if wanted[asker.spec.name] > 0]
                    if not open_:
                        return
                    for asker in open_:
                        if unsupported(case, asker.spec.capabilities, asker.mode) is None:
                            wanted[asker.spec.name] -= 1
                    yield case, open_

    def _ask(self, cases: Iterable[Case]) -> None:
        """Put cases to the backends of their level, one level after the other."""
        by_level: dict[Level, list[Case]] = {}
        for case in cases:
            by_level.setdefault(case.level, []).append(case)
        for level, sweep in self.sweeps.items():
            self._tell(sweep.ask_each((case, sweep.askers) for case in by_level.get(level, ())))

    def _tell(self, verdicts: Iterable[tuple[Case, Verdict]]) -> None:
        for case, verdict in verdicts:
            if self._told is not None:
                self._told(case, verdict)

    @property
    def tallies(self) -> dict[str, Tally]:
        """By backend, in the order in which these were given."""
        found = {name: tally for sweep in self.sweeps.values() for name, tally in sweep.tallies.items()}
        return {name: found[name] for name in self._askers}

    @property
    def clean(self) -> bool:
        return all(sweep.clean for sweep in self.sweeps.values())

    def failures(self, backend: str, *, shrunk: bool = True) -> list[Failure]:
        """Every fault of a backend, causes first; a check that fails on an earlier one's case has none."""
        found: list[Failure] = []
        for check in sorted(self.tallies[backend].failures, key=lambda name: name not in LEADING):
            if not any(check in failure.checks for failure in found):
                found.append(self.shrink(backend, check) if shrunk else self.failure(backend, check))
        return found

    def failure(self, backend: str, check: str) -> Failure:
        """The smallest case asked on which a check of a backend failed; it must have failed on one."""
        return Failure(self._askers[backend], *self.tallies[backend].failures[check])

    def shrink(self, backend: str, check: str) -> Failure:
        """The smallest case that is found for that: from the smallest one that was asked, or by another search."""
        known = self.failure(backend, check)
        asker, like = known.asker, known.verdict.outcomes[check]
        if isinstance(asker, RemoteAsker) and known.verdict.spends_process:
            return self._shrink_fatal(known, check)
        found = [simplify(known.case, lambda case: fails(case, asker, check, like))]
        if size(found[0]) > _SMALL:
            strategy, count = (sessions_for, self.sessions) if known.case.session else (cases_for, self.count)
            drawn = strategy([asker.spec.capabilities])
            case = smallest(asker, check, drawn, seed=self.seed, max_examples=count, like=like)
            found += [] if case is None else [case]
        for case in sorted(found, key=size):
            verdict = examine(Question(case), asker, self._checks)
            # A backend that answers differently each time may pass now.
            if verdict.outcomes.get(check) is like:
                return Failure(asker, case, verdict)
        return known

    def _shrink_fatal(self, known: Failure, check: str) -> Failure:
        """The same where each failing case costs a process: few are asked, and only the same outcome counts."""
        smallest_ = known

        def fatal(case: Case) -> bool:
            nonlocal smallest_, deaths
            if deaths >= MAX_DEATHS or unsupported(case, known.asker.spec.capabilities, known.asker.mode):
                return False
            verdict = examine(Question(case), known.asker, {check})
            deaths += verdict.spends_process
            if verdict.outcomes.get(check) is not known.verdict.outcomes[check]:
                return False
            smallest_ = Failure(known.asker, case, verdict)
            return True

        deaths = 0
        simplify(known.case, fatal)
        return smallest_


def _drawn_together(askers: Iterable[AnyAsker]) -> list[list[AnyAsker]]:
    """Backends that take any of their settings, and those of variants: few of the former's cases are for the latter."""
    free: list[AnyAsker] = []
    bound: list[AnyAsker] = []
    for asker in askers:
        (bound if asker.spec.capabilities.variants else free).append(asker)
    return [group for group in (free, bound) if group]
