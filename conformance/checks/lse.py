"""lse: the log-sum-exp equals the oracle's in the declared base; rows without keys are -inf (or the declared sentinel).

A wrong base shows as one ratio for all elements, and is named.
"""

from __future__ import annotations

import math

import numpy as np
import torch

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
    exact = handed.exact_lse is not None
    got = handed.exact_lse if handed.exact_lse is not None else handed.lse_values.double().numpy()
    empty = np.isneginf(want)
    if capabilities.empty_lse == "sentinel":
        got = np.where(empty & (got < SENTINEL), -np.inf, got)
    scale = 1.0 + answer.state.max_score
    allowed = answer.exact_tolerance if exact else _FLOAT32_STEPS * np.finfo(np.float32).eps * scale
    wrong = elements(got, want, float(max(allowed, np.finfo(np.float64).eps * 64 * scale)))
    rounded = not exact and (step, layer) not in trial.first.answers
    if wrong is not None and rounded and (trial.asker.machine.real or _queries_anew(trial, step, layer)):
        # fa2 sums the rounded weights: only the twin knows how far that is off; new queries are rounded once more
        half_step = torch.finfo(getattr(torch, trial.case.dtype)).eps / 2
        budget = trial.question.lse_budget(step, layer).wider(half_step * answer.state.max_score)
        wrong = elements(got, want, to_base(torch.as_tensor(budget.max_abs), base).numpy())
    if wrong is None:
        return []
    request, message = describe(wrong, tensors, "the LSE")
    message += _base_hint(got, want, base, _OTHER_BASE * scale)
    return [Finding(check=NAME, step=step, layer=layer, request=request, field="lse", message=message)]


def _queries_anew(trial: Trial, step: int, layer: int) -> bool:
    """Whether a library was given queries that the backend computed: with the scale in them, say."""
    attended = [c.attended for c in trial.first.calls(step) if c.at.layer == layer]
    if layer >= len(trial.first.steps[step].layers):
        return False
    handed, pool = trial.first.steps[step].layers[layer], trial.pool
    tensors = trial.question.step(step)
    at = LayerTensors(trial.case, tensors, layer, handed, pool.k_cache(layer), pool.v_cache(layer))
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
