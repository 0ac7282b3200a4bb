"""Verdicts on cases whose process did not live to tell one."""

from __future__ import annotations

from collections.abc import Iterable

from cases.codec import digest
from cases.model import Case
from conformance.isolation.messages import Retired
from conformance.outcome import FATAL, LEADING, Finding, Outcome, Verdict

CHECK = "values"
"""The check that such a case fails, whichever were asked for: no check has seen it."""


def died(case: Case, backend: str, outcome: Outcome, message: str) -> Verdict:
    """The verdict on a case that cost its process."""
    finding = Finding(check=CHECK, outcome=outcome, message=message)
    return Verdict(backend=backend, digest=digest(case), outcomes={CHECK: outcome}, findings=(finding,))


def spent(case: Case, backend: str, retired: Retired, said: str | None) -> Verdict:
    """The verdict on a case after which its process was of no use. Of what the checks found until then, the causes
    stand, and what the backend raised; the rest was read through a lost context. `said`: what was printed last."""
    said = "" if said is None else f"; it said last: {said}"
    verdict = died(case, backend, retired.outcome, f"{retired.message}{said}")
    if retired.verdict is None:
        return verdict
    outcomes = {name: o for name, o in retired.verdict.outcomes.items() if name in LEADING}
    raised = (Outcome.RAISED, Outcome.REFUSED)
    kept = [f for f in retired.verdict.findings if f.check in LEADING or f.outcome in raised]
    return Verdict(
        backend=backend,
        digest=verdict.digest,
        outcomes=outcomes | verdict.outcomes,
        findings=(
            *(f for f in kept if f.check in LEADING),
            *verdict.findings,
            *(f for f in kept if f.check == CHECK),
        ),
    )


def cost_its_process(findings: Iterable[Finding]) -> bool:
    """Whether asking the case again would cost another process."""
    return any(f.outcome in FATAL for f in findings)
