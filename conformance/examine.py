"""One case, one backend, one verdict: the whole flow on one screen."""

from __future__ import annotations

from collections.abc import Collection

from conformance import memory
from conformance.checks import CHECKS
from conformance.outcome import Finding, Outcome, Verdict, ordered
from conformance.question import Question
from conformance.support import unsupported
from conformance.trial import AnyAsker, RemoteAsker, Trial
from conformance.waivers import forgiven


def examine(question: Question, asker: AnyAsker, checks: Collection[str] | None = None) -> Verdict:
    """Ask a backend one case, run every check (or those named) on what it did, and judge."""
    why = unsupported(question.case, asker.spec.capabilities, asker.mode)
    if why is not None:
        return Verdict(backend=asker.spec.name, digest=question.digest, outcomes={}, unsupported=why)
    if isinstance(asker, RemoteAsker):
        return forgiven(asker.examine(question.case, checks), question.case, asker.spec)
    verdict = _judged(Trial(question, asker), checks)
    memory.relieve()
    return forgiven(verdict, question.case, asker.spec)


def _judged(trial: Trial, checks: Collection[str] | None) -> Verdict:
    """The trial goes when this returns, and the backend with it."""
    outcomes: dict[str, Outcome] = {}
    findings: list[Finding] = []
    for name, check in CHECKS.items():
        if checks is not None and name not in checks:
            continue
        found = trial.found[name] = check(trial)
        if found is None or (trial.first.failure and not found):
            continue  # nothing to look at, or broken off before it could be seen
        outcomes[name] = _outcome(found)
        findings += found
    return Verdict(
        backend=trial.spec.name,
        digest=trial.question.digest,
        outcomes=outcomes,
        findings=tuple(ordered(findings)),
    )


def _outcome(found: list[Finding]) -> Outcome:
    if not found:
        return Outcome.PASSED
    return Outcome.MISMATCH if any(f.outcome is Outcome.MISMATCH for f in found) else found[0].outcome
