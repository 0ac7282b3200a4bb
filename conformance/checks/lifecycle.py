"""lifecycle: one plan per wrapper and batch, made before its first run, for this batch; K and V stored before they are
read; nothing left over from the batch before.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from conformance.checks.metadata import rule_findings
from conformance.decode import shares
from conformance.execution import Mark
from conformance.outcome import Finding
from conformance.trial import Trial
from fakes.recorder import Call

NAME = "lifecycle"


def check(trial: Trial) -> list[Finding] | None:
    found = rule_findings(trial, "order", NAME)
    if trial.spec.capabilities.level == "kernel":
        return found if trial.first.recorder.calls else None
    looked = bool(found)
    for step in range(len(trial.first.steps)):
        calls = trial.first.calls(step)
        looked |= bool(calls)
        found += _plans(trial, step, calls)
        found += _stores(trial, step, calls)
    return found if looked else None


def _plans(trial: Trial, step: int, calls: list[Call]) -> list[Finding]:
    found: list[Finding] = []
    planned = Counter(c.owner for c in calls if c.op == "plan")
    for owner, times in planned.items():
        if times > 1:
            name = next(c.name for c in calls if c.op == "plan" and c.owner == owner)
            message = f"{name} was called {times} times for one batch: plan once, run in every layer"
            found.append(Finding(check=NAME, step=step, field="plan", message=message))
    for call in calls:
        if call.op != "attend" or call.plan is None:
            continue
        plan = trial.first.recorder.calls[call.plan]
        if plan.at.batch != call.at.batch:
            message = f"{call.name} executed a plan that was made for an earlier batch"
            found.append(Finding(check=NAME, step=step, layer=call.at.layer, field="plan", message=message))
            break
    return found


def _stores(trial: Trial, step: int, calls: list[Call]) -> list[Finding]:
    """Reads of this step's new tokens before they were stored."""
    tensors = trial.question.step(step)
    new = tensors.slots[tensors.new]
    for call in calls:
        attended = call.attended
        if attended is None or attended.layout == "ragged" or attended.appended:
            continue
        if not shares(attended.k, trial.pool.k):
            continue  # a copy: where it was taken from is not known, what it holds decides
        stored = trial.pool.stores.get(Mark(*call.at))
        if stored is not None and stored <= call.index:
            continue
        if any(np.isin(span.slots, new).any() for span in attended.spans):
            message = f"{call.name} read this step's keys before K and V were stored"
            return [Finding(check=NAME, step=step, layer=call.at.layer, field="store_kv", message=message)]
    return []
