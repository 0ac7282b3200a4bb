"""inputs: nothing that was handed over was changed: q, k, v, page_table, out_loc, positions, lengths."""

from __future__ import annotations

from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "inputs"


def check(trial: Trial) -> list[Finding]:
    return [
        Finding(check=NAME, step=step, field=name.split()[0], message=f"{name} was changed by the backend")
        for step, run in enumerate(trial.first.steps)
        for name in run.changed
    ]
