"""capacity: every buffer holds a full batch of longest sequences, and nothing is written past the end of one.

The case's engine declares `max_batch` and `max_seq_len`. A decode batch at both limits is put to a new backend, eagerly
and, where there are graphs, padded to a size beyond `max_batch`. If it fails, the same batch is put to an engine with
larger limits: what is right there and wrong here is a matter of room.
"""

from __future__ import annotations

from dataclasses import replace

from cases.model import Case, Request, Step
from cases.tensors import materialise
from conformance.checks import graphs
from conformance.checks.stepwise import found_in
from conformance.outcome import Finding
from conformance.question import Question
from conformance.trial import Trial

NAME = "capacity"
DRAWN_FROM = 16
"""Every so many cases, by seed, one is asked at its limits."""
MAX_TOKENS = 1024
"""Tokens of the largest batch that is asked."""


def check(trial: Trial) -> list[Finding] | None:
    if trial.case.level != "engine":
        return None
    found = overruns(trial)
    full = None if trial.case.seed // 16 % DRAWN_FROM else at_the_limits(trial.case)
    if full is None:
        return found or None
    tight = _faults(trial, full, more_room=False)
    if tight and not _faults(trial, full, more_room=True):
        found += [_of_capacity(full, f) for f in tight]
    return found


def overruns(trial: Trial) -> list[Finding]:
    """Buffers of a backend around which a guard word was written to."""
    done = trial.graphs
    return [
        Finding(
            check=NAME,
            step=at.step,
            message=f"{at.how}: something was written past the end of {buffer}",
        )
        for at in (done.replays if done else ())
        for buffer in at.overrun[:1]
    ]


def at_the_limits(case: Case) -> Case | None:
    """As many requests as the engine of a case allows in a batch, each as long as it allows; None: too many tokens.

    By seed, its graph is captured for that many or, where it can be, for twice as many.
    """
    count, longest = max(len(step.requests) for step in case.steps), case.table_width
    if count * longest > MAX_TOKENS:
        return None
    requests = tuple(Request(cached_len=longest - 1, uid=uid) for uid in range(count))
    decode = any(step.phase == "decode" for step in case.steps)
    step = Step(requests, "decode", "decode") if decode else Step(requests)
    return replace(case, steps=(step,), max_seq_len=longest, session=False, seed=case.seed & 1)


def _faults(trial: Trial, full: Case, *, more_room: bool) -> list[Finding]:
    """Everything that is wrong with a batch, in an engine that it fills or in a roomier one."""
    count = len(full.steps[0].requests)
    if more_room:
        full = replace(full, max_seq_len=full.table_width + 2 * full.page_size)
    tensors = materialise(full)
    if more_room:
        plan = replace(tensors.plan, num_rows=tensors.plan.num_rows + 4 * count)
        tensors = replace(tensors, plan=plan)
    there = Trial(Question(full, tensors), trial.asker)
    found = list(found_in(there))
    if there.graphs is not None:
        found += [*graphs.findings(there, there.graphs), *overruns(there)]
    return found


def _of_capacity(full: Case, finding: Finding) -> Finding:
    count = len(full.steps[0].requests)
    where = f"a full batch ({count} requests of max_seq_len {full.table_width} tokens)"
    return replace(finding, check=NAME, step=None, message=f"{where}: {finding.message}")
