"""The smallest case that fails one check: drawn by hypothesis, made smaller by its record and by hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from cases.model import Case
from cases.simplify import simplify
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.support import unsupported
from conformance.sweep import CHUNK, size
from conformance.trial import AnyAsker

MAX_SHRINKS = 2000
"""Cases tried after the first failure; then the smallest so far stands."""
FEW_REQUESTS, FEW_TOKENS = 3, 7
"""Requests, and keys and query rows, of a case that need not be searched for a smaller one."""


class _Found(Exception):  # noqa: N818 - no error: the search has ended
    """A failing case was drawn."""


def smallest(
    asker: AnyAsker,
    check: str,
    strategy: SearchStrategy[Case],
    *,
    seed: int,
    max_examples: int,
    like: Outcome | None = None,
) -> Case | None:
    """Draw what `conformance.sweep.draw` draws for this seed and count, and make the first case that fails smaller:
    by its record, and where that ends at a large one by hypothesis, and by its record again.

    Only `check` is run, on each case once, and only what fails with the outcome `like`, or as the first one did,
    counts. None: no case does.
    """
    for chunk in range(-(-max_examples // CHUNK)):
        search = _Search(asker, check, like)
        drawn = strategy, seed * 1_000_003 + chunk, min(CHUNK, max_examples - chunk * CHUNK)
        first = search.run(*drawn, [Phase.generate])
        if first is None:
            continue
        found = [simplify(first, search.fails)]
        requests, tokens, _ = size(found[0])
        if requests > FEW_REQUESTS or tokens > FEW_TOKENS:
            shrunk = search.run(*drawn, [Phase.generate, Phase.shrink])
            found += [] if shrunk is None else [simplify(shrunk, search.fails)]
        return min(found, key=size)
    return None


class _Search:
    """Verdicts are kept by case: a flaky backend must not confuse hypothesis."""

    def __init__(self, asker: AnyAsker, check: str, like: Outcome | None) -> None:
        self.asker = asker
        self.check = check
        self._outcome = like
        """How cases must fail; None until the first one has."""
        self._found = False
        self._known: dict[Case, bool] = {}
        self._shrinks = 0

    def run(
        self, strategy: SearchStrategy[Case], first: int, count: int, phases: Sequence[Phase]
    ) -> Case | None:
        """The last failing case of one hypothesis run: the only one, or the smallest of those it went through."""
        found: Case | None = None

        @seed(first)
        @settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
            report_multiple_bugs=False,
            print_blob=False,
        )
        @given(strategy)
        def probe(case: Case) -> None:
            nonlocal found
            if self.fails(case):
                found = case
                raise _Found

        with suppress(_Found):
            probe()
        return found

    def fails(self, case: Case) -> bool:
        if case in self._known:
            return self._known[case]
        if self._found:
            self._shrinks += 1
            if self._shrinks > MAX_SHRINKS:
                return False
        outcome = _failure(case, self.asker, self.check)
        self._outcome = self._outcome or outcome
        self._known[case] = outcome is not None and outcome is self._outcome
        self._found |= self._known[case]
        return self._known[case]


def fails(case: Case, asker: AnyAsker, check: str, like: Outcome | None = None) -> bool:
    """Whether a backend fails a check on a case that it declares, with the outcome `like` or with any."""
    outcome = _failure(case, asker, check)
    return outcome is not None and like in (None, outcome)


def _failure(case: Case, asker: AnyAsker, check: str) -> Outcome | None:
    """How; None where it does not."""
    if unsupported(case, asker.spec.capabilities, asker.mode) is not None:
        return None
    verdict = examine(Question(case), asker, {check})
    return verdict.outcomes[check] if check in verdict.failed else None
