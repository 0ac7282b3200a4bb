"""poison: nothing that a request does not own reaches its result, and every output element was written.

Two executions differ only in what the unowned slots hold (NaN, then large finite values). A result that changes with
them, and comes back when they do, has read them.
"""

from __future__ import annotations

import numpy as np
import torch

from conformance.execution import Execution
from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "poison"


def check(trial: Trial) -> list[Finding]:
    changed = differing_layers(trial.first, trial.second)
    if not changed:
        return _nan_findings(trial)
    back = differing_layers(trial.first, trial.third)
    return [
        Finding(
            check=NAME,
            step=step,
            layer=layer,
            request=int(trial.question.step(step).rows.request[row]),
            message="the result changes with the content of slots that no request owns",
        )
        for step, layer, row in changed
        if (step, layer, row) not in back
    ]


def _nan_findings(trial: Trial) -> list[Finding]:
    found: list[Finding] = []
    for step, run in enumerate(trial.first.steps):
        for layer, handed in enumerate(run.layers):
            tensors = trial.question.step(step)
            values = handed.values
            if values is None or values.dim() != 3 or values.shape[0] != tensors.step.num_rows:
                continue
            rows = np.flatnonzero(values.isnan().flatten(1).any(1).numpy())
            if len(rows) and not trial.answer(step, layer).state.out.isnan().any():
                found.append(
                    Finding(
                        check=NAME,
                        step=step,
                        layer=layer,
                        request=int(tensors.rows.request[rows[0]]),
                        message=f"{len(rows)} rows hold NaN: an output element was never written, "
                        "or a slot that no request owns was read",
                    )
                )
    return found


def differing_layers(a: Execution, b: Execution) -> list[tuple[int, int, int]]:
    """(step, layer, first row) wherever two executions of the same case gave different bits (any NaN equals any)."""
    found: list[tuple[int, int, int]] = []
    for step, (run_a, run_b) in enumerate(zip(a.steps, b.steps, strict=False)):
        for layer, (x, y) in enumerate(zip(run_a.layers, run_b.layers, strict=False)):
            if x.values is None or y.values is None or x.values.shape != y.values.shape:
                continue
            if torch.equal(x.values, y.values):
                continue
            same = (x.values == y.values) | (x.values.isnan() & y.values.isnan())
            if not same.all():
                found.append((step, layer, int((~same).flatten(1).any(1).nonzero()[0])))
    return found
