"""A whole run: cases put to the backends of their level, and the failures made small."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hypothesis.strategies import SearchStrategy

from cases.model import Case, Level
from cases.simplify import simplify
from conformance.examine import examine
from conformance.find import fails, smallest
from conformance.outcome import LEADING, Verdict
from conformance.question import Question
from conformance.selection import distinct, named_cases, smoke_cases, strategies
from conformance.sweep import Sweep, Tally, draw, size
from conformance.trial import Asker

_SMALL = (1, 4, 1)
"""Size of a case that need not be searched for a smaller one."""
LEVELS: tuple[Level, ...] = ("engine", "kernel")


@dataclass(frozen=True)
class Failure:
    """One fault, in the smallest case that was found for it. `checks`: those that fail on this case."""

    asker: Asker
    case: Case
    verdict: Verdict

    @property
    def checks(self) -> frozenset[str]:
        return self.verdict.failed


class Campaign:
    """Asks, level by level: smoke cases, the corpus and named edges, those given, then random ones.

    Args:
        askers: backends of one level or both.
        count: random cases per level.
        seed: draws them.
        smoke: whether the smallest cases are asked.
        named: whether the corpus and the named edges are asked.
        given: further cases; each goes to the backends of its level.
        checks: the checks that are run; None: all.
        told: is told every verdict as it comes.
    """

    def __init__(
        self,
        askers: Sequence[Asker],
        *,
        count: int = 0,
        seed: int = 0,
        smoke: bool = False,
        named: bool = False,
        given: Iterable[Case] = (),
        checks: Collection[str] | None = None,
        told: Callable[[Case, Verdict], None] | None = None,
    ) -> None:
        self.count, self.seed = count, seed
        self._smoke, self._named, self._given = smoke, named, given
        self._checks, self._told = checks, told
        self._askers = {asker.spec.name: asker for asker in askers}
        self.sweeps: dict[Level, Sweep] = {}
        for level in LEVELS:
            own = [asker for asker in askers if asker.spec.level == level]
            if own:
                self.sweeps[level] = Sweep(own, checks)

    def run(self) -> None:
        """Ask everything. If it is interrupted, what has been asked is kept."""
        for level, sweep in self.sweeps.items():
            smoke = [case for asker in sweep.askers for case in smoke_cases(asker.spec.capabilities)]
            self._ask(
                distinct([*(smoke if self._smoke else ()), *(named_cases(level) if self._named else ())])
            )
        self._ask(self._given)
        for sweep in self.sweeps.values():
            for strategy, count in self._shares(sweep):
                for drawn in draw(strategy, count, self.seed):
                    self._ask(drawn)

    def _shares(self, sweep: Sweep) -> list[tuple[SearchStrategy[Case], int]]:
        """What random cases are drawn from, and how many from each."""
        found = strategies([asker.spec.capabilities for asker in sweep.askers])
        least, more = divmod(self.count, len(found))
        return [(strategy, least + (index < more)) for index, strategy in enumerate(found)]

    def _ask(self, cases: Iterable[Case]) -> None:
        for case in cases:
            sweep = self.sweeps.get(case.level)
            for verdict in sweep.ask(case) if sweep is not None else ():
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
        """The smallest case that is found for that: by hypothesis, or from the smallest one that was asked."""
        known = self.failure(backend, check)
        asker = known.asker
        found = [simplify(known.case, lambda case: fails(case, asker, check))]
        if size(found[0]) > _SMALL:
            for strategy, count in self._shares(self.sweeps[asker.spec.level]):
                case = smallest(asker, check, strategy, seed=self.seed, max_examples=count)
                found += [] if case is None else [case]
        for case in sorted(found, key=size):
            verdict = examine(Question(case), asker, self._checks)
            if check in verdict.failed:  # a backend that answers differently each time may pass now
                return Failure(asker, case, verdict)
        return known
