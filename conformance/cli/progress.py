"""A line on stderr every now and then, so that a long run shows that it lives and what it has found."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from cases.model import Case
from conformance.outcome import Verdict

SECONDS = 30.0
"""Between two lines: a run that takes less prints none."""


class Progress:
    """Counts verdicts.

    Args:
        told: called with each of them as well.
        clock: seconds that rise.
    """

    def __init__(
        self,
        told: Callable[[Case, Verdict], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._told = told
        self._clock = clock
        self._started = self._next = clock()
        self._next += SECONDS
        self._answers = self._failed = 0

    def __call__(self, case: Case, verdict: Verdict) -> None:
        if self._told is not None:
            self._told(case, verdict)
        self._answers += 1
        self._failed += bool(verdict.failed)
        now = self._clock()
        if now >= self._next:
            self._next = now + SECONDS
            rate = self._answers / (now - self._started)
            print(
                f"{self._answers:,} answers after {now - self._started:.0f} s, {rate:.0f} a second, "
                f"{self._failed:,} of them failures",
                file=sys.stderr,
                flush=True,
            )
