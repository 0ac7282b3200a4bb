"""lifecycle: one plan per wrapper and batch, made before its first run, for this batch; K and V stored before they are
read; nothing left over from the batch before.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from conformance.checks import metadata
from conformance.decode import shares
from conformance.execution import Mark
from conformance.outcome import Finding
from conformance.stores import stored_slots
from conformance.trial import Trial
from fakes.recorder import Call, TensorRecord

NAME = "lifecycle"
_STALE_PLAN = "fi.stale-plan"


def check(trial: Trial) -> list[Finding] | None:
    found = metadata.rule_findings(trial, "order", NAME)
    if trial.spec.capabilities.level == "kernel":
        return found if trial.first.recorder.calls else None
    old = [f for f in found if f.rule == _STALE_PLAN]
    found = [f for f in found if f.rule != _STALE_PLAN]
    looked = bool(found or old)
    for step in range(len(trial.first.steps)):
        calls = trial.first.calls(step)
        looked |= bool(calls)
        old += _old_plan(trial, step, calls)
        found += _repeated_plans(step, calls)
        found += _stores(trial, step, calls)
    if old:  # none too few, where every layer reads what a plan of its batch would have it read
        misread = {f.step for f in metadata.check(trial) or ()}
        found = [f for f in old if f.step in misread] + found
    return found if looked else None


def _repeated_plans(step: int, calls: list[Call]) -> list[Finding]:
    """A wrapper that holds a plan is given the same once more. One wrapper for two windows is planned anew for each."""
    held: dict[int, str] = {}
    repeated: Counter[tuple[int, str]] = Counter()
    for call in calls:
        if call.op == "plan":
            settings = _settings(call)
            repeated[call.owner, call.name] += held.get(call.owner) == settings
            held[call.owner] = settings
    return [
        Finding(
            check=NAME,
            step=step,
            field="plan",
            message=f"{name} was called {times + 1} times for one batch: plan once, run in every layer",
        )
        for (_, name), times in repeated.items()
        if times
    ]


def _settings(plan: Call) -> str:
    """What a plan was told beside arrays."""
    return repr(
        {name: given for name, given in plan.arguments.items() if not isinstance(given, TensorRecord)}
    )


def _old_plan(trial: Trial, step: int, calls: list[Call]) -> list[Finding]:
    """The first run of a plan that was made for an earlier batch."""
    for call in calls:
        if call.op != "attend" or call.plan is None:
            continue
        plan = trial.first.recorder.calls[call.plan]
        if plan.at.batch != call.at.batch:
            message = f"{call.name} executed a plan that was made for an earlier batch"
            return [Finding(check=NAME, step=step, layer=call.at.layer, field="plan", message=message)]
    return []


def _stores(trial: Trial, step: int, calls: list[Call]) -> list[Finding]:
    """Reads of this step's new tokens before they were stored."""
    tensors = trial.question.step(step)
    new = tensors.slots[tensors.new]
    missing: dict[Mark, np.ndarray] = {}
    for call in calls:
        mark = Mark(*call.at)
        if call.op == "append" and mark.layer >= 0:
            slots = stored_slots(trial.case, call, trial.pool.k_cache(mark.layer))
            missing[mark] = np.setdiff1d(missing.get(mark, new), () if slots is None else slots)
        attended = call.attended
        if attended is None or attended.layout == "ragged" or attended.appended:
            continue
        if not shares(attended.k, trial.pool.k):
            continue  # a copy: where it was taken from is not known, what it holds decides
        stored = trial.pool.stores.get(mark)
        if stored is not None and stored <= call.index:
            continue
        if any(np.isin(span.slots, missing.get(mark, new)).any() for span in attended.spans):
            message = f"{call.name} read this step's keys before K and V were stored"
            return [Finding(check=NAME, step=step, layer=call.at.layer, field="store_kv", message=message)]
    return []
