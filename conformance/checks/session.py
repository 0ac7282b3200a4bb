"""session: every step of a session gives what a new backend gives for it: what went before changes nothing.

Where another check finds a fault in a step, that step is put to a new backend, over the same pages and the same values.
If nothing is wrong with it there, the fault is one of history: something of an earlier step has stuck, or got lost. One
fault may fail other checks there than here, by the garbage that it reads: then it is the step's own.
"""

from __future__ import annotations

from dataclasses import replace

from cases.model import Case, Request, Step
from cases.tensors import CaseTensors
from conformance.checks.stepwise import STEPWISE, found_by
from conformance.outcome import Finding
from conformance.question import Question
from conformance.trial import Trial

NAME = "session"


def check(trial: Trial) -> list[Finding] | None:
    if not trial.case.session:
        return None
    fresh: dict[int, Trial] = {}
    of_history: dict[int, list[str]] = {}
    for name in STEPWISE:
        step = min((f.step for f in found_by(trial, name) if f.step is not None), default=0)
        if not step:
            continue
        if step not in fresh:
            fresh[step] = _alone(trial, step)
        if not any(found_by(fresh[step], other) for other in STEPWISE):
            of_history.setdefault(step, []).append(name)
    return [_finding(step, names) for step, names in sorted(of_history.items())]


def _finding(step: int, names: list[str]) -> Finding:
    message = (
        f"what fails here ({', '.join(names)}) is right on a new backend over the same pages: "
        "an earlier step has left something behind, or lost it"
    )
    return Finding(check=NAME, step=step, message=message)


def _alone(trial: Trial, step: int) -> Trial:
    """One step of a session on a new backend, over a new pool that holds what the step needs in the same pages."""
    tensors = trial.question.tensors
    case = alone(trial.case, step)
    own = replace(tensors.steps[step], step=case.steps[0])
    plan = replace(tensors.plan, steps=(own.placed,))
    return Trial(Question(case, CaseTensors(case, plan, (own,))), trial.asker)


def alone(case: Case, step: int) -> Case:
    """One step of a session as a case of its own, whose requests have stored what they had."""
    asked = case.steps[step]
    requests = tuple(Request(r.stored_len, r.qo_len, r.uid) for r in asked.requests)
    steps = (Step(requests, asked.phase, asked.kind),)
    return replace(case, steps=steps, session=False, max_seq_len=case.table_width)
