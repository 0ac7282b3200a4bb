"""relations: other ways to ask the same give the same answer: permuted requests, relocated pages, another page size or
layout, a prefill in chunks or over a cached prefix, other batch mates.

One relation is drawn by the case's seed. Rows of the related case are held to the original's answers; where the backend
declares `bit_equal`, rows with other mates, in another order or in other pages to the original's very bits.
"""

from __future__ import annotations

import numpy as np

from conformance.checks.stepwise import found_by
from conformance.checks.values import failure_finding, output_wrong
from conformance.execution import LayerRun
from conformance.outcome import Finding
from conformance.relate import RELATIONS, Related
from conformance.support import unsupported
from conformance.trial import Trial

NAME = "relations"
DRAWN_FROM = 8 * len(RELATIONS)
"""A case draws relation `seed % DRAWN_FROM`; seven numbers in eight stand for none."""


def check(trial: Trial) -> list[Finding] | None:
    drawn = trial.case.seed % DRAWN_FROM
    if drawn >= len(RELATIONS) or len(trial.case.steps) != 1 or trial.case.session:
        return None
    if trial.first.failure or trial.first.answers:
        return None
    related = RELATIONS[drawn](trial.question, trial.spec.capabilities)
    if related is None or unsupported(related.case, trial.spec.capabilities, trial.asker.mode):
        return None
    if found_by(trial, "values"):
        return None
    execution = trial.asker.ask(related.case, related.tensors)
    found = [
        Finding(check=NAME, outcome=f.outcome, message=f"{related.name}: {f.message}")
        for f in failure_finding(execution, NAME)
    ]
    for step, run in enumerate(execution.steps):
        for layer, handed in enumerate(run.layers):
            found += _compare(trial, related, handed, step, layer)
    return found


def _compare(trial: Trial, related: Related, handed: LayerRun, step: int, layer: int) -> list[Finding]:
    rows = related.rows[step]
    original = trial.first.steps[0].layers[layer]
    request = trial.question.step(0).rows.request
    if handed.values is None or original.values is None or handed.values.shape[0] != len(rows):
        return [Finding(check=NAME, layer=layer, message=f"{related.name}: the output has no such shape")]
    wrong = output_wrong(trial, handed, 0, layer, rows)
    if wrong is not None:
        row = int(rows[wrong.row])
        message = (
            f"{related.name}: row {row}, head {wrong.head} becomes {wrong.got:.6g}, "
            f"was right as {wrong.want:.6g} (off by {wrong.error:.3g}, allowed {wrong.allowed:.3g})"
        )
        return [Finding(check=NAME, layer=layer, request=int(request[row]), message=message)]
    if not (related.same_bits and trial.spec.capabilities.bit_equal):
        return []
    before, after = original.values.double().numpy(), handed.values.double().numpy()
    different = np.flatnonzero((before[rows] != after).reshape(len(rows), -1).any(axis=1))
    if not len(different):
        return []
    row = int(rows[different[0]])
    message = f"{related.name}: row {row} has other bits, and the backend declares bit_equal"
    return [Finding(check=NAME, layer=layer, request=int(request[row]), message=message)]
