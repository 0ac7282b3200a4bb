"""Many cases put to several backends: one draw, one set of tensors and one oracle serve all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from cases.coverage import Reached
from cases.model import Case
from conformance.examine import examine
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.trial import Asker

CHUNK = 1000
"""Cases drawn by one hypothesis run; longer runs keep ever larger trees."""


@dataclass
class Tally:
    """What one backend came to: cases run and left out, per check how often each outcome, and the first failures."""

    backend: str
    ran: int = 0
    unsupported: Counter[str] = field(default_factory=Counter[str])
    outcomes: dict[str, Counter[Outcome]] = field(default_factory=dict[str, Counter[Outcome]])
    failures: dict[str, tuple[Case, Verdict]] = field(default_factory=dict[str, tuple[Case, Verdict]])
    """Per check, the smallest failing case so far (by tokens, then by length as text)."""

    def add(self, case: Case, verdict: Verdict) -> None:
        if verdict.unsupported is not None:
            self.unsupported[verdict.unsupported] += 1
            return
        self.ran += 1
        for check, outcome in verdict.outcomes.items():
            self.outcomes.setdefault(check, Counter())[outcome] += 1
        for check in verdict.failed:
            kept = self.failures.get(check)
            if kept is None or size(case) < size(kept[0]):
                self.failures[check] = (case, verdict)

    def failed(self, check: str) -> int:
        """How many cases this check failed on."""
        return sum(n for outcome, n in self.outcomes.get(check, Counter()).items() if outcome.is_fault)

    @property
    def clean(self) -> bool:
        return not self.failures


def size(case: Case) -> tuple[int, int, int]:
    """Orders cases by what a person must read: requests, tokens, heads."""
    requests = sum(len(step.requests) for step in case.steps)
    tokens = sum(sum(step.kv_lens) + step.num_rows for step in case.steps)
    return requests, tokens, case.heads.num_qo_heads


class Sweep:
    """Puts cases to backends and keeps the tallies."""

    def __init__(self, askers: Sequence[Asker], checks: Collection[str] | None = None) -> None:
        self.askers = list(askers)
        self.checks = checks
        self.tallies = {asker.spec.name: Tally(asker.spec.name) for asker in askers}
        self.reached = Reached()

    def ask(self, case: Case, askers: Sequence[Asker] | None = None) -> list[Verdict]:
        """Put one case to every backend, or to those named."""
        question = Question(case)
        chosen = self.askers if askers is None else askers
        verdicts = [examine(question, asker, self.checks) for asker in chosen]
        for verdict in verdicts:
            self.tallies[verdict.backend].add(case, verdict)
        if any(v.unsupported is None for v in verdicts):
            self.reached.add(case)
        return verdicts

    def ask_all(self, cases: Iterable[Case]) -> None:
        for case in cases:
            self.ask(case)

    @property
    def clean(self) -> bool:
        return all(tally.clean for tally in self.tallies.values())


def draw(strategy: SearchStrategy[Case], count: int, first_seed: int) -> Iterable[list[Case]]:
    """`count` random cases in lists of up to `CHUNK`, the same for the same seed."""
    for chunk in range(-(-count // CHUNK)):
        drawn: list[Case] = []
        wanted = min(CHUNK, count - chunk * CHUNK)

        @seed(first_seed * 1_000_003 + chunk)
        @settings(
            max_examples=wanted,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        )
        @given(strategy)
        def collect(case: Case) -> None:
            drawn.append(case)  # noqa: B023 - called within this round

        collect()
        yield drawn[:wanted]
