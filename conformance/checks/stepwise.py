"""The checks that judge a run step by step, for those that ask whether a step is wrong already or elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.checks import inputs, lifecycle, lse, metadata, poison, pool, values
from conformance.outcome import Finding
from conformance.trial import Trial

STEPWISE = {
    "metadata": metadata.check,
    "lifecycle": lifecycle.check,
    "values": values.of_first,
    "lse": lse.check,
    "pool": pool.check,
    "poison": poison.check,
    "inputs": inputs.check,
}
"""By name."""
_OF_ONE_EXECUTION = [name for name in STEPWISE if name != "poison"]


def found_by(trial: Trial, name: str) -> list[Finding]:
    """What one of these checks finds; looked for once in a trial."""
    if name not in trial.found:
        trial.found[name] = STEPWISE[name](trial)
    return trial.found[name] or []


def found_in(trial: Trial) -> Iterator[Finding]:
    """What those find that look at the first execution alone."""
    for name in _OF_ONE_EXECUTION:
        yield from found_by(trial, name)
