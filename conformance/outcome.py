"""What a run can end in: a closed set of outcomes, and findings that say what is wrong where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How one check of one case on one backend ended."""

    PASSED = "passed"
    MISMATCH = "mismatch"
    REFUSED = "refused"
    RAISED = "raised"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    UNSUPPORTED = "unsupported"
    KNOWN = "known"

    @property
    def is_fault(self) -> bool:
        return self in _FAULTS


FATAL = (Outcome.CRASHED, Outcome.TIMED_OUT)
"""Of a case that cost its process."""
_FAULTS = {Outcome.MISMATCH, Outcome.RAISED, Outcome.CRASHED, Outcome.TIMED_OUT}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong. `field` is the argument or tensor at fault; indices count from 0."""

    check: str
    message: str
    outcome: Outcome = Outcome.MISMATCH
    step: int | None = None
    layer: int | None = None
    request: int | None = None
    field: str | None = None
    rule: str | None = None

    def __str__(self) -> str:
        places = [
            f"{name} {value}"
            for name, value in (("step", self.step), ("layer", self.layer), ("request", self.request))
            if value is not None
        ]
        return f"{', '.join(places)}: {self.message}" if places else self.message


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What one case on one backend came to.

    `outcomes` maps each check that applied to its outcome; a check that had nothing to look at is absent.
    `unsupported` says why the case was not run at all.
    """

    backend: str
    digest: str
    outcomes: dict[str, Outcome]
    findings: tuple[Finding, ...] = ()
    unsupported: str | None = None

    @property
    def failed(self) -> frozenset[str]:
        """Checks that found a fault."""
        return frozenset(check for check, outcome in self.outcomes.items() if outcome.is_fault)

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def spends_process(self) -> bool:
        """Whether the process that was asked is of no use for another case: it has died, or its memory is taken."""
        return any(o in FATAL for o in self.outcomes.values()) or any(
            f.outcome is Outcome.RAISED and "MemoryError: " in f.message  # also torch's OutOfMemoryError
            for f in self.findings
        )


LEADING = ("metadata", "lifecycle")
"""Checks whose findings lead a report: they name the cause, the others its effect."""

_RANKS = {"inputs": 0, **dict.fromkeys((*LEADING, "session"), 1)}
"""What is altered under way makes whatever reads it look wrong, and so comes before the causes."""


def ordered(findings: Sequence[Finding]) -> list[Finding]:
    """Findings with the causes first; otherwise as they came."""
    return sorted(findings, key=lambda f: _RANKS.get(f.check, 2))
