"""values: the output equals the oracle within the error budget, for every request, row and head.

Where there is an LSE, one of `forward` and `forward_return_lse` is judged, and the other wherever it gives other bits.

A result whose unrounded float64 values are on record is held to float64; any other to the budget that the low-precision
twin sets. An exception that leaves the backend is judged here too: there is no output.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from conformance.compare import Wrong, describe, elements, tensor_fault
from conformance.execution import Execution, LayerRun
from conformance.outcome import Finding, Outcome
from conformance.trial import Trial
from reference import Budget, surely_within

NAME = "values"


def check(trial: Trial) -> list[Finding]:
    return of_first(trial) or of_other_method(trial)


def of_other_method(trial: Trial) -> list[Finding]:
    """What is wrong with the method that the second execution called, where it gives other bits than the first's."""
    methods = ("forward", "forward_return_lse")
    second, first = methods if trial.first.with_lse else methods[::-1]
    broken = failure_finding(trial.second, NAME, second) if trial.broken_by_method else []
    return broken + [
        replace(finding, message=f"{second}, unlike {first}: {finding.message}")
        for step, layer, _ in trial.by_method
        for finding in layer_findings(trial, trial.second.steps[step].layers[layer], step, layer)
    ]


def of_first(trial: Trial) -> list[Finding]:
    """What is wrong with the first execution."""
    execution = trial.first
    found = failure_finding(execution, NAME)
    for step, run in enumerate(execution.steps):
        for layer, handed in enumerate(run.layers):
            found += layer_findings(trial, handed, step, layer)
    return found


def failure_finding(execution: Execution, check_name: str, method: str = "forward") -> list[Finding]:
    """The exception that ended an execution, as a finding; `method` was called for each layer."""
    failure = execution.failure
    if failure is None:
        return []
    what = "refused a case that it declares" if failure.refused else "raised"
    where = "construction" if failure.step < 0 else "prepare_metadata" if failure.layer < 0 else method
    return [
        Finding(
            check=check_name,
            outcome=Outcome.RAISED,  # declared is tested: refusing it is no clean refusal
            step=failure.step if failure.step >= 0 else None,
            layer=failure.layer if failure.layer >= 0 else None,
            message=f"{where} {what}: {failure}",
        )
    ]


def layer_findings(trial: Trial, handed: LayerRun, step: int, layer: int) -> list[Finding]:
    """What is wrong with the output of one layer."""
    tensors = trial.question.step(step)
    heads = trial.case.heads
    shape = (tensors.step.num_rows, heads.num_qo_heads, heads.head_dim_vo)
    dtype = getattr(torch, trial.case.dtype)
    fault = tensor_fault("the output", handed.out, shape, dtype, trial.asker.machine)
    if fault is not None:
        return [Finding(check=NAME, step=step, layer=layer, message=fault)]
    wrong = output_wrong(trial, handed, step, layer)
    if wrong is None:
        return []
    request, message = describe(wrong, tensors, "the output")
    return [Finding(check=NAME, step=step, layer=layer, request=request, message=message)]


def output_wrong(
    trial: Trial, handed: LayerRun, step: int, layer: int, rows: np.ndarray | None = None
) -> Wrong | None:
    """Compare an output of the right shape with the oracle. `rows`: the oracle's that it has, in its order (default:
    all, which are then held to a mean error as well)."""
    answer = trial.answer(step, layer)
    want = answer.state.out.numpy()
    if rows is not None:
        want = want[rows]
    if handed.exact is not None:
        wrong = elements(handed.exact, want, answer.exact_tolerance)
        if wrong is None or not merges_in(trial, step, layer):
            return wrong  # a state that is merged into a part of another may change no rounded number of it
    if handed.values is None:
        return None
    got = handed.values.double().numpy()
    state = answer.state
    if surely_within(got, want, dtype=handed.values.dtype, max_score=state.max_score, max_v=state.max_v):
        return None
    budget = budget_of(trial, step, layer)
    allowed = np.asarray(budget.max_abs)
    wrong = elements(got, want, allowed if rows is None else allowed[rows])
    if wrong is not None or rows is not None:
        return wrong
    mean = float(np.abs(got - want).mean()) if got.size else 0.0
    if mean <= budget.mean_abs:
        return None
    error = np.abs(got - want)
    row, head, dim = (int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    bad = np.ones(error.shape[:2], dtype=bool)
    return Wrong(bad, row, head, got[row, head, dim], want[row, head, dim], mean, budget.mean_abs)


def budget_of(trial: Trial, step: int, layer: int) -> Budget:
    """How far a rounded output may be from the answer.

    Each merge that the layer's library was seen to do rounds once more: a state of some keys, as large as their values
    at most.
    """
    budget, merges = trial.question.budget(step, layer), merges_in(trial, step, layer)
    half_step = torch.finfo(getattr(torch, trial.case.dtype)).eps / 2
    return budget.wider(merges * half_step * trial.answer(step, layer).state.max_v) if merges else budget


def merges_in(trial: Trial, step: int, layer: int) -> int:
    """Calls of an engine's layer that merge states, of the first execution. An adapter's are judged as they are."""
    if trial.case.level == "kernel":
        return 0
    return sum(call.op == "merge" and call.at.layer == layer for call in trial.first.calls(step))
