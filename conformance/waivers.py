"""Known failures of a backend: what they excuse in a verdict, and whether they are still needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from backends.libraries import version_of
from backends.registry import BackendSpec
from backends.waivers import Waiver
from cases.model import Case
from conformance.outcome import Finding, Outcome, Verdict

NAME = "waivers"


def in_force(spec: BackendSpec) -> list[Waiver]:
    """The waivers of a backend that hold for the releases that answer in this process."""
    return [w for w in spec.waivers if w.in_force(None if w.library is None else version_of(w.library))]


def forgiven(verdict: Verdict, case: Case, spec: BackendSpec) -> Verdict:
    """A verdict in which the known failures have the outcome `known`, their findings with the reason.

    On a case that a waiver pins, the check `waivers` says whether the failure is still there: a waiver that is not
    needed any more fails the run.
    """
    if not spec.waivers or verdict.unsupported is not None or NAME in verdict.outcomes:
        return verdict
    known: dict[str, Waiver] = {}
    pinned = any(waiver.case == case for waiver in spec.waivers)
    for waiver in in_force(spec) if verdict.failed or pinned else ():
        for check in verdict.failed:
            if waiver.covers(check, verdict.outcomes[check], case):
                known[check] = waiver
    if known:
        verdict = replace(
            verdict,
            outcomes=verdict.outcomes | dict.fromkeys(known, Outcome.KNOWN),
            findings=tuple(_excused(f, known.get(f.check)) for f in verdict.findings),
        )
    return _with_stale(verdict, case, spec) if pinned else verdict


def _excused(finding: Finding, waiver: Waiver | None) -> Finding:
    if waiver is None:
        return finding
    return replace(finding, outcome=Outcome.KNOWN, message=f"{finding.message} [{waiver}]")


def _with_stale(verdict: Verdict, case: Case, spec: BackendSpec) -> Verdict:
    """The verdict with the outcome of `waivers`, if any of the waived checks has been run."""
    found: list[Finding] = []
    looked = False
    for waiver in in_force(spec):
        ended = {check: verdict.outcomes[check] for check in waiver.checks & verdict.outcomes.keys()}
        if waiver.case != case or not ended:
            continue
        looked = True
        if Outcome.KNOWN not in ended.values():
            words = ", ".join(f"{check} {outcome}" for check, outcome in sorted(ended.items()))
            message = (
                f"a stale waiver: its pinned case ended with {words}; remove it: {waiver.place}: {waiver}"
            )
            found.append(Finding(check=NAME, message=message))
    if not looked:
        return verdict
    return replace(
        verdict,
        outcomes=verdict.outcomes | {NAME: Outcome.MISMATCH if found else Outcome.PASSED},
        findings=(*verdict.findings, *found),
    )


def pinned_cases(specs: Iterable[BackendSpec]) -> list[Case]:
    """The cases that the waivers in force pin; a run asks them all."""
    return list(dict.fromkeys(waiver.case for spec in specs for waiver in in_force(spec)))
