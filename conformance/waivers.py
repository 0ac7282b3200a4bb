"""Known failures of a backend: what they excuse in a verdict, and whether they are still needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from backends.libraries import version_of
from backends.registry import BackendSpec
from backends.waivers import Waiver
from cases.model import Case
from conformance.outcome import Finding, Outcome, Verdict


def in_force(spec: BackendSpec) -> list[Waiver]:
    """The waivers of a backend that hold for the releases that answer in this process."""
    return [w for w in spec.waivers if w.in_force(None if w.library is None else version_of(w.library))]


def forgiven(verdict: Verdict, case: Case, spec: BackendSpec) -> Verdict:
    """A verdict in which the known failures have the outcome `known`, their findings with the reason."""
    if not spec.waivers or not verdict.failed:
        return verdict
    waivers = in_force(spec)
    known = {
        check: waiver
        for check in verdict.failed
        for waiver in waivers
        if waiver.covers(check, verdict.outcomes[check], case)
    }
    if not known:
        return verdict
    return replace(
        verdict,
        outcomes=verdict.outcomes | dict.fromkeys(known, Outcome.KNOWN),
        findings=tuple(_excused(f, known.get(f.check)) for f in verdict.findings),
    )


def _excused(finding: Finding, waiver: Waiver | None) -> Finding:
    if waiver is None:
        return finding
    return replace(finding, outcome=Outcome.KNOWN, message=f"{finding.message} [{waiver}]")


@dataclass(frozen=True)
class Stale:
    """A waiver whose pinned case passes: the fault is gone, or was never there."""

    backend: str
    waiver: Waiver
    why: str

    def __str__(self) -> str:
        return f"{self.backend}: a stale waiver: {self.why}; remove it: {self.waiver.place}: {self.waiver}"


def pinned(specs: Iterable[BackendSpec]) -> list[Case]:
    """The cases that the waivers in force pin; a run asks them all."""
    return list(dict.fromkeys(waiver.case for spec in specs for waiver in in_force(spec)))


def stale(spec: BackendSpec, case: Case, verdict: Verdict) -> list[Stale]:
    """The waivers in force that pin this case, and whose checks it passes (of those that were run)."""
    found: list[Stale] = []
    for waiver in in_force(spec) if spec.waivers else ():
        if waiver.case != case:
            continue
        if verdict.unsupported is not None:
            found.append(Stale(spec.name, waiver, f"its pinned case is unsupported ({verdict.unsupported})"))
            continue
        ended = {check: verdict.outcomes[check] for check in waiver.checks & verdict.outcomes.keys()}
        if ended and not any(outcome is Outcome.KNOWN for outcome in ended.values()):
            words = ", ".join(f"{check} {outcome}" for check, outcome in sorted(ended.items()))
            found.append(Stale(spec.name, waiver, f"its pinned case ended with {words}"))
    return found
