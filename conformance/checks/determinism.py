"""determinism: the same call twice gives the same bits, and what ran before on the same backend changes nothing."""

from __future__ import annotations

from conformance.execution import differing_layers
from conformance.outcome import Finding, Outcome
from conformance.trial import Trial

NAME = "determinism"


def check(trial: Trial) -> list[Finding]:
    first, second = trial.first.failure, trial.second.failure
    if first is None and second is not None and not trial.broken_by_method:
        return [
            Finding(
                check=NAME,
                outcome=Outcome.RAISED,
                step=second.step,
                message=f"the first execution went well, the second on the same backend raised {second}",
            )
        ]
    if not trial.changed:
        return []
    return [
        Finding(
            check=NAME,
            step=step,
            layer=layer,
            request=trial.request_of(step, row),
            message="the same batch gave different bits when it was run again on the same backend",
        )
        for step, layer, row in differing_layers(trial.first, trial.third)
    ]
