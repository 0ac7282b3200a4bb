"""host_reads: `forward` makes the host wait for the device no more often than the backend declares.

Such a wait stalls the host in every layer of every batch, and a CUDA graph cannot be captured over it.
"""

from __future__ import annotations

from collections import Counter

from conformance.outcome import Finding
from conformance.trial import Trial
from fakes.recorder import Wait

NAME = "host_reads"


def check(trial: Trial) -> list[Finding] | None:
    capabilities = trial.spec.capabilities
    budget = capabilities.host_read_budget
    if budget is None or not trial.asker.machine.simulated or not trial.first.steps:
        return None
    waits: dict[tuple[int, int], list[Wait]] = {}
    for wait in trial.first.recorder.waits:
        step = wait.at.batch - trial.first.first_batch
        if wait.at.layer >= 0 and 0 <= step < len(trial.first.steps):
            waits.setdefault((step, wait.at.layer), []).append(wait)
    declared = f"{_times(budget)} is declared"
    if capabilities.host_reads == "auto":
        declared = "never is what cuda_graph declares where host_reads says nothing else"
    return [
        _finding(step, layer, made, declared) for (step, layer), made in waits.items() if len(made) > budget
    ]


def _finding(step: int, layer: int, made: list[Wait], declared: str) -> Finding:
    lines = Counter(f"{wait.what} at {wait.where}" for wait in made)
    causes = "; ".join(cause if times == 1 else f"{cause} ({times} times)" for cause, times in lines.items())
    return Finding(
        check=NAME,
        step=step,
        layer=layer,
        field="host_reads",
        message=f"forward makes the host wait for the device {_times(len(made))}, {declared}: {causes}",
    )


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")
