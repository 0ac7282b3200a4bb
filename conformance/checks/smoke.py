"""smoke: one request, one token, one page works. Where it does not, the adapter is at fault, not the library."""

from __future__ import annotations

from dataclasses import replace

from conformance.checks import values
from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "smoke"


def check(trial: Trial) -> list[Finding] | None:
    if trial.case.session or any(step.qo_lens != (1,) or step.kv_lens != (1,) for step in trial.case.steps):
        return None
    return [
        replace(
            finding,
            check=NAME,
            message=f"{finding.message} (one request of one token: see the adapter first)",
        )
        for finding in values.check(trial)
    ]
