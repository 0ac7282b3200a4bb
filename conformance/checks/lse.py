"""lse: the log-sum-exp equals the oracle's in the declared base; rows without keys are -inf (or the declared sentinel).

A wrong base shows as one ratio for all elements, and is named.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from backends.contract import Capabilities
from conformance.checks.values import merges_in
from conformance.compare import describe, elements, tensor_fault
from conformance.decode import LayerTensors, computed_anew
from conformance.execution import LayerRun
from conformance.machine import Machine
from conformance.outcome import Finding
from conformance.trial import Trial
from reference.merge import to_base

NAME = "lse"
SENTINEL = -1.0e3
"""FlashInfer 0.6.6 masks a score with -50000 and scales it: -4500 is the highest LSE of a row without keys here."""
_FLOAT32_STEPS = 16.0
_OTHER_BASE = 5e-5
"""How far an LSE may be from that of another base, beside the scores: one state of a merge in it is further off."""


def check(trial: Trial) -> list[Finding] | None:
    if trial.spec.capabilities.lse is None:
        return None
    found: list[Finding] = []
    for step, run in enumerate(trial.with_lse.steps):
        for layer, handed in enumerate(run.layers):
            found += layer_findings(trial, handed, step, layer)
    return found


def layer_findings(
    trial: Trial, handed: LayerRun, step: int, layer: int, machine: Machine | None = None
) -> list[Finding]:
    """What is wrong with the LSE of one layer, which must be on `machine` (default: the trial's)."""
    tensors, capabilities = trial.question.step(step), trial.spec.capabilities
    shape = (tensors.step.num_rows, trial.case.heads.num_qo_heads)
    fault = tensor_fault("the LSE", handed.lse, shape, torch.float32, machine or trial.asker.machine)
    if fault is not None or handed.lse_values is None:
        return [Finding(check=NAME, step=step, layer=layer, message=fault or "the LSE is missing")]
    answer = trial.answer(step, layer)
    base = capabilities.lse or "e"
    want = to_base(answer.state.lse, base).numpy()
    scale = 1.0 + answer.state.max_score
    least = float(np.finfo(np.float64).eps * 64 * scale)
    got, wrong = handed.exact_lse, None
    if got is not None:
        got = _without_sentinel(got, want, capabilities)
        wrong = elements(got, want, max(answer.exact_tolerance, least))
    if got is None or (wrong is not None and merges_in(trial, step, layer)):
        got = _without_sentinel(handed.lse_values.double().numpy(), want, capabilities)
        steps = max(_FLOAT32_STEPS, trial.case.heads.head_dim_qk / 4)  # equal products round one way
        wrong = elements(got, want, max(float(steps * np.finfo(np.float32).eps * scale), least))
        if wrong is not None and _twins_know(trial, step, layer):
            wide = to_base(torch.as_tensor(trial.question.lse_budget(step, layer).max_abs), base)
            wrong = elements(got, want, wide.numpy())
    if wrong is None:
        return []
    request, message = describe(wrong, tensors, "the LSE")
    message += _base_hint(got, want, base, _OTHER_BASE * scale)
    return [Finding(check=NAME, step=step, layer=layer, request=request, field="lse", message=message)]


def _without_sentinel(got: np.ndarray, want: np.ndarray, capabilities: Capabilities) -> np.ndarray:
    if capabilities.empty_lse != "sentinel":
        return got
    return np.where(np.isneginf(want) & (got < SENTINEL), -np.inf, got)


def _twins_know(trial: Trial, step: int, layer: int) -> bool:
    """Whether an LSE may be off by more than float32: fa2 sums the rounded weights, on a GPU, and queries that a
    backend has multiplied with the scale are rounded once more."""
    if (step, layer) in trial.first.answers:
        return False
    return trial.asker.machine.real or _queries_anew(trial, step, layer)


def _queries_anew(trial: Trial, step: int, layer: int) -> bool:
    """Whether a library was given queries that the backend computed: with the scale in them, say."""
    attended = [c.attended for c in trial.first.calls(step) if c.at.layer == layer]
    layers = trial.first.steps[step].layers if step < len(trial.first.steps) else []
    if layer >= len(layers):
        return False  # the first execution broke off before
    at = LayerTensors.of(trial.question, step, layer, layers[layer], trial.pool)
    return any(computed_anew(a, at)[0] for a in attended if a is not None)


def _base_hint(got: np.ndarray, want: np.ndarray, base: str, allowed: float) -> str:
    """`allowed`: how far the LSE may be off in the other base."""
    usable = np.isfinite(got) & np.isfinite(want) & (np.abs(want) > 1e-3)
    if not usable.any():
        return ""
    other, factor = ("2", 1 / math.log(2)) if base == "e" else ("e", math.log(2))
    if (np.abs(got[usable] - want[usable] * factor) <= allowed).all():
        return f": every LSE is {factor:.4f} of what it must be: base {other}, declared base {base}"
    return ""
