"""refusals: what a backend does not declare, it refuses with a clear sentence; never a wrong answer, never a crash.

Asked only of backends that promise it (`refuses = True`). One provocation is drawn by the case's seed: the case with
one thing changed that the backend does not declare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from pydantic import ValidationError

from cases.model import Case, Mask
from conformance.outcome import Finding, Outcome
from conformance.support import unsupported
from conformance.trial import Trial

NAME = "refusals"
DRAWN_FROM = 16
"""Every so many cases, by seed, one provocation is put."""


def check(trial: Trial) -> list[Finding] | None:
    if not trial.spec.refuses or trial.case.seed % DRAWN_FROM:
        return None
    declared = replace(trial.spec.capabilities, variants=())
    provocations = [
        (case, why)
        for case in _provocations(trial.case)
        if (why := unsupported(case, declared)) is not None  # float32 is declared, in any mode
    ]
    if not provocations:
        return None
    case, why = provocations[trial.case.seed // DRAWN_FROM % len(provocations)]
    failure = trial.asker.ask(case).failure
    if failure is None:
        message = f"{why} is not declared, and was answered instead of refused"
        return [Finding(check=NAME, message=message)]
    if not failure.refused:
        message = f"{why} is not declared; it must raise Refused, and raised {failure}"
        return [Finding(check=NAME, outcome=Outcome.RAISED, message=message)]
    if len(failure.text.split()) < 3:
        message = f"{why} was refused without a reason: {failure.text!r}"
        return [Finding(check=NAME, message=message)]
    return []


_CHANGES: tuple[Callable[[Case], Case], ...] = (
    lambda c: replace(c, mask=Mask(window=3)),
    lambda c: replace(c, mask=Mask(window=3, window_layers=(0,))),
    lambda c: replace(c, mask=Mask(soft_cap=30.0)),
    lambda c: replace(c, layout="HND"),
    lambda c: replace(c, dtype="float32"),
    lambda c: replace(c, kv_dtype="float8_e4m3fn"),
    lambda c: replace(c, heads=replace(c.heads, head_dim_qk=72, head_dim_vo=72)),
    lambda c: replace(c, heads=replace(c.heads, num_qo_heads=9, num_kv_heads=1)),
    lambda c: replace(c, page_size=3, spare_pages=2),
)


def _provocations(case: Case) -> Iterator[Case]:
    for change in _CHANGES:
        try:
            yield change(case)
        except ValidationError:  # the change does not go with this case, say a shared prefix of other pages
            continue
