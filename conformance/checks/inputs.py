"""inputs: nothing that was handed over was changed: q, k, v, page_table, out_loc, positions, requests and their order;
and of torch's own settings the default dtype, the grad mode and the current stream are as they were.
"""

from __future__ import annotations

from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "inputs"


def check(trial: Trial) -> list[Finding]:
    return [changed(NAME, step, name) for step, run in enumerate(trial.first.steps) for name in run.changed]


def changed(check: str, step: int | None, name: str, how: str = "") -> Finding:
    """An input that is not as it was, "k of layer 1". `how` begins the message."""
    message = f"{how}{name} was changed by the backend"
    return Finding(check=check, step=step, field=name.split(maxsplit=1)[0], message=message)
