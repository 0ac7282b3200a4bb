"""poison: nothing that a request does not own reaches its result, and every output element was written.

Two executions differ only in what the unowned slots hold (NaN, then large finite values). A result that changes with
them, and comes back when they do, has read them.
"""

from __future__ import annotations

import numpy as np

from conformance.execution import differing_layers
from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "poison"


def check(trial: Trial) -> list[Finding]:
    if not trial.changed:
        return _nan_findings(trial)
    back = differing_layers(trial.first, trial.third)
    return [
        Finding(
            check=NAME,
            step=step,
            layer=layer,
            request=trial.request_of(step, row),
            message="the result changes with the content of slots that no request owns",
        )
        for step, layer, row in trial.changed
        if (step, layer, row) not in back and (step, layer, row) not in trial.by_method
    ]


def _nan_findings(trial: Trial) -> list[Finding]:
    found: list[Finding] = []
    for step, run in enumerate(trial.first.steps):
        for layer, handed in enumerate(run.layers):
            tensors = trial.question.step(step)
            values = handed.values
            if values is None or values.dim() != 3 or values.shape[0] != tensors.step.num_rows:
                continue
            nan = values.isnan()
            if not nan.any():
                continue
            rows = np.flatnonzero(nan.flatten(1).any(1).numpy())
            if not trial.answer(step, layer).state.out.isnan().any():
                found.append(
                    Finding(
                        check=NAME,
                        step=step,
                        layer=layer,
                        request=int(tensors.rows.request[rows[0]]),
                        message=f"{_counted(len(rows))} NaN, whatever the pool holds: an output element was never "
                        "written, or NaN was computed",
                    )
                )
    return found


def _counted(rows: int) -> str:
    return "1 row holds" if rows == 1 else f"{rows} rows hold"
