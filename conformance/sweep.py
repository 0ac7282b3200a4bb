"""Many cases put to several backends: one draw, one set of tensors and one oracle serve all of them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import SearchStrategy

from cases.codec import STORED_DIGITS, digest
from cases.coverage import Reached
from cases.model import Case
from conformance.examine import examine
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.support import unsupported
from conformance.trial import AnyAsker, RemoteAsker
from conformance.waivers import forgiven

CHUNK = 1000
"""Cases drawn by one hypothesis run; longer runs keep ever larger trees."""
Asked = tuple[Case, Sequence[AnyAsker]]
"""A case and the backends that are asked it."""
MAX_LOST = 25
"""Processes that a backend may cost; then it is asked no more."""
Known = Mapping[tuple[str, str], Verdict]
"""Verdicts by backend and digest, of 32 digits."""


@dataclass
class Tally:
    """What one backend came to: cases run and left out, per check how often each outcome, and the first failures."""

    backend: str
    ran: int = 0
    lost: int = 0
    """Cases that cost their process, or would have cost one of their own."""
    unsupported: Counter[str] = field(default_factory=Counter[str])
    outcomes: dict[str, Counter[Outcome]] = field(default_factory=dict[str, Counter[Outcome]])
    failures: dict[str, tuple[Case, Verdict]] = field(default_factory=dict[str, tuple[Case, Verdict]])
    """Per check, the smallest failing case so far (by tokens, then by length as text)."""

    def add(self, case: Case, verdict: Verdict) -> None:
        if verdict.unsupported is not None:
            self.unsupported[verdict.unsupported] += 1
            return
        self.ran += 1
        self.lost += verdict.spends_process
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
    """Puts cases to backends, all of them here or all of them elsewhere, and keeps the tallies.

    Args:
        askers: the backends.
        checks: the checks that are run; None: all.
        known: verdicts that need not be asked for again.
    """

    def __init__(
        self, askers: Sequence[AnyAsker], checks: Collection[str] | None = None, known: Known | None = None
    ) -> None:
        self.askers = list(askers)
        self.checks = checks
        self.tallies = {asker.spec.name: Tally(asker.spec.name) for asker in askers}
        self.reached = Reached()
        self._known: Known = known or {}

    def ask(self, case: Case, askers: Sequence[AnyAsker] | None = None) -> list[Verdict]:
        """Put one case to every backend, or to those named."""
        return [verdict for _, verdict in self.ask_each([(case, self.askers if askers is None else askers)])]

    def ask_all(self, cases: Iterable[Case]) -> None:
        for case in cases:
            self.ask(case)

    def ask_each(self, items: Iterable[Asked]) -> Iterator[tuple[Case, Verdict]]:
        """Put many cases; each verdict as soon as it stands. Where several processes work, the order is theirs."""
        remote = next((asker for asker in self.askers if isinstance(asker, RemoteAsker)), None)
        for case, verdict in self._here(items) if remote is None else self._elsewhere(items, remote):
            self.tallies[verdict.backend].add(case, verdict)
            yield case, verdict

    def _here(self, items: Iterable[Asked]) -> Iterator[tuple[Case, Verdict]]:
        for case, askers in items:
            question = Question(case)
            reached = False
            for asker in askers:
                verdict = self._recall(asker, case) or examine(question, asker, self.checks)
                if verdict.unsupported is None and not reached:
                    reached = True
                    self.reached.add(case)
                yield case, verdict

    def _elsewhere(self, items: Iterable[Asked], remote: RemoteAsker) -> Iterator[tuple[Case, Verdict]]:
        """Batches are asked ahead; what needs no asking is told between their verdicts."""
        aside: deque[tuple[Case, Verdict]] = deque()

        def asked() -> Iterator[tuple[Case, Sequence[str]]]:
            for case, askers in items:
                settled = [self._recall(asker, case) or self._left_out(asker, case) for asker in askers]
                aside.extend((case, verdict) for verdict in settled if verdict is not None)
                names = [a.spec.name for a, v in zip(askers, settled, strict=True) if v is None]
                if names or any(v.unsupported is None for v in settled if v is not None):
                    self.reached.add(case)
                if names:
                    yield case, names

        specs = {asker.spec.name: asker.spec for asker in self.askers}
        for case, verdict in remote.stream(asked(), self.checks):
            while aside:
                yield aside.popleft()
            yield case, forgiven(verdict, case, specs[verdict.backend])
        yield from aside

    def _left_out(self, asker: AnyAsker, case: Case) -> Verdict | None:
        """The verdict on a case that is not asked."""
        why = unsupported(case, asker.spec.capabilities, asker.mode)
        if why is None and self.tallies[asker.spec.name].lost >= MAX_LOST:
            why = f"not asked after {MAX_LOST} cases that cost their process"
        if why is None:
            return None
        return Verdict(backend=asker.spec.name, digest=digest(case), outcomes={}, unsupported=why)

    def _recall(self, asker: AnyAsker, case: Case) -> Verdict | None:
        return self._known.get((asker.spec.name, digest(case)[:STORED_DIGITS])) if self._known else None

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
