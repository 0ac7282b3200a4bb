"""metadata: the library calls of a layer, decoded, read exactly the keys that the case asks for, in arrays that obey
the library's rules.

Each call is decoded from its arguments as the library reads them, into (query row -> slots). Where that is not what the
case asks, the arrays are compared with what they must be, and the first wrong one is named.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from cases.model import Mask
from cases.tensors import StepTensors
from conformance import reading
from conformance.checks.values import layer_findings as output_findings
from conformance.decode import (
    LayerTensors,
    ReadSpan,
    computed_anew,
    doubtful,
    is_plain,
    read_spans,
    visible_keys,
)
from conformance.execution import LayerRun
from conformance.fields import unasked, wrong_fields
from conformance.outcome import Finding
from conformance.stores import misplaced
from conformance.trial import Trial
from fakes.recorder import Attended, Call, TensorRecord
from reference import visible

NAME = "metadata"


def check(trial: Trial) -> list[Finding] | None:
    found = rule_findings(trial, "arrays", NAME)
    looked = bool(found)
    for step, run in enumerate(trial.first.steps):
        calls = trial.first.calls(step)
        looked |= any(c.op != "create" for c in calls)
        for layer, handed in enumerate(run.layers):
            attends = [c for c in calls if c.attended is not None and c.at.layer == layer]
            if attends:
                found += _layer(trial, step, layer, handed, attends)
            stores = [c for c in calls if c.op == "append" and c.at.layer == layer]
            given = trial.case, trial.question.step(step)
            pool = trial.pool.k_cache(layer)
            found += [f.finding(NAME, step, layer) for c in stores for f in misplaced(*given, c, pool)]
    found += _of_refused_call(trial)
    return found if looked else None


def _of_refused_call(trial: Trial) -> list[Finding]:
    """Which array of the call that a library refused is wrong."""
    failure = trial.first.failure
    if failure is None or failure.step < 0:
        return []
    calls = [c for c in trial.first.calls(failure.step) if c.op in ("plan", "attend")]
    if not calls or calls[-1].attended is not None or calls[-1].at.layer != failure.layer:
        return []
    if any(c.attended is not None and c.at.layer == failure.layer for c in calls):
        return []  # the last of several calls that share the layer's work: its arrays are of a part
    call, tensors = calls[-1], trial.question.step(failure.step)
    layer = failure.layer if failure.layer >= 0 else None
    return [
        field.finding(NAME, failure.step, layer)
        for field in wrong_fields(trial.case, tensors, _plan_of(trial, call), call, _given_page_size(call))
    ]


def _given_page_size(call: Call) -> int:
    """Page size of a call that was not carried out, by its arguments; 0 if they do not tell."""
    given = call.arguments.get("page_size")
    if isinstance(given, int):
        return given
    cache = call.arguments.get("k_cache")
    return cache.shape[1] if isinstance(cache, TensorRecord) and len(cache.shape) == 4 else 0


def rule_findings(trial: Trial, kind: str, name: str) -> list[Finding]:
    """What the fakes recorded about the first execution, each rule once per step and request."""
    first = trial.first
    found: dict[tuple[object, ...], Finding] = {}
    for f in first.recorder.findings:
        step = f.at.batch - first.first_batch
        if f.kind != kind or not 0 <= step < len(trial.case.steps):
            continue
        found.setdefault(
            (f.rule, f.argument, f.request, step),
            Finding(
                check=name,
                step=step,
                layer=f.at.layer if f.at.layer >= 0 else None,
                request=f.request,
                field=f.argument,
                rule=f.rule,
                message=f.message,
            ),
        )
    return list(found.values())


def _layer(trial: Trial, step: int, layer: int, handed: LayerRun, calls: list[Call]) -> list[Finding]:
    tensors = trial.question.step(step)
    decoded: list[tuple[Attended, ReadSpan]] = []
    found: list[Finding] = []
    at = LayerTensors.of(trial.question, step, layer, handed, trial.pool)
    plainly = len(calls) == 1 and is_plain(calls[0], at)
    for call in calls:
        attended = call.attended
        if attended is None:
            continue
        if not plainly:
            decoded += [(attended, span) for span in read_spans(attended, at)]
        found += wrong_factors(NAME, attended, at, step)
        found += [field.finding(NAME, step, layer) for field in unasked(call)]
    if any(f.field == "v_scale" for f in found) and not output_findings(trial, handed, step, layer):
        found = [f for f in found if f.field != "v_scale"]  # the backend has multiplied the output by it
    mask = trial.case.mask.of_layer(layer)
    if plainly or _as_asked(trial, tensors, mask, decoded):
        return found
    wrong = reading.compare(trial.case, tensors, mask, decoded)
    if wrong is None or doubtful([span for _, span in decoded], tensors.step.num_rows):
        return found
    request, message = wrong
    whole = calls if len(calls) == 1 and reading.of_whole_batch(decoded, tensors, mask) else []
    fields = [
        field.finding(NAME, step, layer)
        for call in whole
        for field in wrong_fields(trial.case, tensors, _plan_of(trial, call), call, _page_size(call))
    ]
    found += _wrong_window(calls, decoded, mask, step, layer)
    return [*found, *fields, Finding(check=NAME, step=step, layer=layer, request=request, message=message)]


def _wrong_window(
    calls: list[Call], decoded: list[tuple[Attended, ReadSpan]], mask: Mask, step: int, layer: int
) -> list[Finding]:
    """The first window that is not the layer's, and by which a row sees other keys than by that one."""
    for attended, span in decoded:
        if attended.custom is not None or mask.custom is not None:
            continue
        seen = attended.window_left + 1 if attended.window_left >= 0 else None
        asked = replace(attended, window_left=-1 if mask.window is None else mask.window - 1)
        if not np.array_equal(visible_keys(attended, span), visible_keys(asked, span)):
            given, wanted = (keys or "none" for keys in (seen, mask.window))
            name = next(call.name for call in calls if call.attended is attended)
            message = f"the window of {name} is {given}, must be {wanted} (keys, the row's own counted)"
            return [Finding(check=NAME, step=step, layer=layer, field="window", message=message)]
    return []


def _plan_of(trial: Trial, call: Call) -> Call | None:
    return None if call.plan is None else trial.first.recorder.calls[call.plan]


def _page_size(call: Call) -> int:
    return 0 if call.attended is None or call.attended.layout == "ragged" else call.attended.page_size


def wrong_factors(
    check: str, attended: Attended, at: LayerTensors, step: int, how: str = ""
) -> list[Finding]:
    """Factors of a call that are not the case's; one that a backend has multiplied into a tensor of its own is not
    judged. `how` stands before each message."""
    case, layer = at.case, at.layer
    found: list[Finding] = []
    factors = (
        ("sm_scale", attended.scale, case.scale),
        ("k_scale", attended.k_scale, case.k_scale),
        ("v_scale", attended.v_scale, case.v_scale),
    )
    off = [factor for factor in factors if not math.isclose(*factor[1:], rel_tol=1e-6)]
    if math.isclose(attended.scale * attended.k_scale, case.scale * case.k_scale, rel_tol=1e-6):
        off = [factor for factor in off if factor[0] == "v_scale"]  # only their product tells
    queries, keys, values = computed_anew(attended, at) if off else (False, False, False)
    folded = {"sm_scale": queries or keys, "k_scale": keys, "v_scale": values}
    for field, got, want in off:
        if not folded[field]:
            message = f"{how}{field} is {got:.6g}, must be {want:.6g}"
            found.append(Finding(check=check, step=step, layer=layer, field=field, message=message))
    if not math.isclose(attended.soft_cap, case.mask.soft_cap or 0.0, rel_tol=1e-6):
        message = f"{how}the soft cap is {_cap(attended.soft_cap)}, must be {_cap(case.mask.soft_cap or 0.0)}"
        found.append(Finding(check=check, step=step, layer=layer, field="soft_cap", message=message))
    return found


def _cap(soft_cap: float) -> str:
    return f"{soft_cap:.6g}" if soft_cap else "none"


def _as_asked(
    trial: Trial, tensors: StepTensors, mask: Mask, decoded: list[tuple[Attended, ReadSpan]]
) -> bool:
    """The usual case, quickly: one span a request, its slots in order, the mask as asked."""
    asked = [r for r in range(len(tensors.step.requests)) if tensors.step.requests[r].qo_len]
    spans = [(attended, span) for attended, span in decoded if span.num_rows]
    if len(asked) != len(spans) or any(span.heads is not None for _, span in spans):
        return False
    row = 0
    for request, (attended, span) in zip(asked, spans, strict=True):
        r = tensors.step.requests[request]
        want = trial.case.level == "kernel" and attended.layout == "ragged"
        slots = tensors.tokens.of(request) if want else tensors.placed.slots[request]
        if not np.array_equal(span.rows, np.arange(row, row + r.qo_len)):
            return False
        if not (np.array_equal(span.k_slots, slots) and np.array_equal(span.v_slots, slots)):
            return False
        if not _mask_as_asked(tensors, mask, request, attended, span):
            return False
        row += r.qo_len
    return True


def _mask_as_asked(
    tensors: StepTensors, mask: Mask, request: int, attended: Attended, span: ReadSpan
) -> bool:
    plain = mask.custom is None and span.custom is None and mask.window is None
    if plain and attended.window_left < 0 and attended.window_right <= 0:
        causal = attended.causal or attended.window_right == 0
        if causal == mask.causal or span.num_rows == 1:
            return True
    r = tensors.step.requests[request]
    custom = None if tensors.custom is None else tensors.custom[request]
    want = visible(r.qo_len, r.kv_len, mask, custom).numpy()
    return bool(np.array_equal(visible_keys(attended, span), want))
