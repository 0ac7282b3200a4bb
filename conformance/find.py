"""The smallest case that fails one check, found by hypothesis."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from cases.model import Case
from cases.simplify import simplify
from conformance.examine import examine
from conformance.question import Question
from conformance.support import unsupported
from conformance.sweep import CHUNK
from conformance.trial import AnyAsker

MAX_SHRINKS = 2000
"""Cases tried after the first failure; then the smallest so far stands."""


class _Found(Exception):  # noqa: N818 - no error: the search has ended
    """A failing case was drawn."""


def smallest(
    asker: AnyAsker, check: str, strategy: SearchStrategy[Case], *, seed: int, max_examples: int
) -> Case | None:
    """Draw what `conformance.sweep.draw` draws for this seed and count; shrink the first case that fails.

    Only `check` is run, on each case once. None: no case fails it.
    """
    for chunk in range(-(-max_examples // CHUNK)):
        search = _Search(asker, check)
        search.run(strategy, seed * 1_000_003 + chunk, min(CHUNK, max_examples - chunk * CHUNK))
        if search.smallest is not None:
            return simplify(search.smallest, search.fails)
    return None


class _Search:
    """One hypothesis run. Verdicts are kept by case: a flaky backend must not confuse hypothesis."""

    def __init__(self, asker: AnyAsker, check: str) -> None:
        self.asker = asker
        self.check = check
        self.smallest: Case | None = None
        self._known: dict[Case, bool] = {}
        self._shrinks = 0

    def run(self, strategy: SearchStrategy[Case], first: int, count: int) -> None:
        @seed(first)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(strategy)
        def probe(case: Case) -> None:
            if self.fails(case):
                self.smallest = case
                raise _Found

        try:
            probe()
        except _Found:
            return

    def fails(self, case: Case) -> bool:
        if case in self._known:
            return self._known[case]
        if self.smallest is not None:
            self._shrinks += 1
            if self._shrinks > MAX_SHRINKS:
                return False
        self._known[case] = fails(case, self.asker, self.check)
        return self._known[case]


def fails(case: Case, asker: AnyAsker, check: str) -> bool:
    """Whether a backend fails a check on a case that it declares."""
    if unsupported(case, asker.spec.capabilities, asker.mode) is not None:
        return False
    return check in examine(Question(case), asker, {check}).failed
