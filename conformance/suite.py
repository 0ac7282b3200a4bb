"""What the suite asserts: verdicts on every backend, computed once in a pytest session."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

from backends.libraries import LibraryKind
from conformance.campaign import Campaign
from conformance.choices import (
    TraceBatches,
    chosen_backends,
    require_level,
    trace_batches,
)
from conformance.errors import UsageError
from conformance.isolation.session import IsolatedSession, open_session
from conformance.jit.choose import DEFAULT_VARIANTS
from conformance.matrix import matrix
from conformance.render import render
from fakes.recorder import Mode

TRACE_BATCHES = 200
Stage = Literal["smoke", "corpus", "random"]


class Results:
    """Backends, what they are asked, and what came of it.

    Args:
        named: backends; none: all built-in ones and two hybrids.
        cases: random cases per backend. sessions: random sessions per engine-level backend. seed: draws them.
        trace: a request trace whose batches are asked too.
        isolate, workers, deadline, variants: see `conformance.isolation.session.open_session`.
        folder: where cases are written that are too long for a replay line.

    Raises:
        choices.WRONG_USAGE: a backend, library, device or trace that cannot be had.
    """

    def __init__(
        self,
        named: Sequence[str],
        *,
        library: LibraryKind,
        mode: Mode,
        device_sim: Literal["auto", "light", "full"],
        isolate: bool | None = None,
        workers: int | None = None,
        deadline: float | None = None,
        variants: int | None = None,
        cases: int,
        sessions: int,
        seed: int,
        trace: str | None,
        folder: Path,
    ) -> None:
        self.names = chosen_backends(named)
        self._cases, self._sessions, self._seed, self._folder = cases, sessions, seed, folder
        self._trace = (
            TraceBatches() if trace is None else trace_batches(trace, count=TRACE_BATCHES, seed=seed)
        )
        self._session = partial(
            open_session,
            self.names,
            library=library,
            mode=mode,
            device_sim=device_sim,
            isolate=isolate,
            workers=workers,
            deadline=deadline,
            variants=DEFAULT_VARIANTS if variants is None else variants,
            folder=folder,
        )
        self._open = ExitStack()
        session = self._open.enter_context(self._session())
        try:
            require_level(self._trace.cases, session.specs)
        except UsageError:
            self._open.close()
            raise
        self._isolated = session if isinstance(session, IsolatedSession) else None
        self.device, self._left_out = session.device, session.left_out
        if self._isolated is None:
            self._open.close()  # other tests of this process run meanwhile

    def close(self) -> None:
        """End worker processes, if there are any."""
        self._open.close()

    @cached_property
    def _asked(self) -> tuple[dict[Stage, Campaign], dict[tuple[Stage, str, str], str]]:
        """Campaigns by stage, and the text of each failure by stage, backend and check."""
        texts: dict[tuple[Stage, str, str], str] = {}
        with self._open:
            session = self._isolated or self._open.enter_context(self._session())
            campaigns: dict[Stage, Campaign] = {
                "smoke": Campaign(session.askers, smoke=True),
                "corpus": Campaign(session.askers, named=True),
                "random": Campaign(
                    session.askers,
                    count=self._cases,
                    sessions=self._sessions,
                    seed=self._seed,
                    given=self._trace.cases,
                ),
            }
            for stage, campaign in campaigns.items():
                campaign.run()
                for backend, tally in campaign.tallies.items():
                    for failure in [] if tally.clean else campaign.failures(backend):
                        text = render(failure.asker, failure.case, failure.verdict, self._folder)
                        for check in failure.checks:
                            texts.setdefault((stage, backend, check), text)
        return campaigns, texts

    def failures(self, stage: Stage, backend: str, check: str | None = None) -> str | None:
        """The text of what failed, None if nothing did; without `check`, of all checks."""
        texts = self._asked[1]
        found = [
            text for (s, b, c), text in texts.items() if (s, b) == (stage, backend) and check in (None, c)
        ]
        return "\n\n".join(dict.fromkeys(found)) or None

    def looked(self, stage: Stage, backend: str, check: str | None = None) -> bool:
        """Whether a check (or any) had something to look at."""
        tally = self._asked[0][stage].tallies[backend]
        return bool(tally.outcomes if check is None else tally.outcomes.get(check))

    @property
    def computed(self) -> bool:
        return "_asked" in self.__dict__

    def summary(self) -> list[str]:
        """The matrix of the random cases, and what they ran on."""
        campaign = self._asked[0]["random"]
        return [
            f"device: {self.device}; left out: {self._left_out}",
            *(f"trace {line}" for line in self._trace.lines),
            *matrix(campaign.tallies.values()).splitlines(),
        ]
