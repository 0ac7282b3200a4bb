"""One file a check. A check is `check(trial) -> list[Finding] | None`; None: it had nothing to look at.

To add one: write its file, name it in `CHECKS`, and add a mutant that only it catches.
"""

from __future__ import annotations

from collections.abc import Callable

from conformance.checks import (
    capacity,
    determinism,
    graphs,
    host_reads,
    inputs,
    lifecycle,
    lse,
    metadata,
    poison,
    pool,
    refusals,
    relations,
    session,
    smoke,
    values,
)
from conformance.outcome import Finding
from conformance.trial import Trial

Check = Callable[[Trial], list[Finding] | None]

CHECKS: dict[str, Check] = {
    "smoke": smoke.check,
    "metadata": metadata.check,
    "lifecycle": lifecycle.check,
    "host_reads": host_reads.check,
    "values": values.check,
    "lse": lse.check,
    "pool": pool.check,
    "poison": poison.check,
    "inputs": inputs.check,
    "determinism": determinism.check,
    "relations": relations.check,
    "graphs": graphs.check,
    "capacity": capacity.check,
    "refusals": refusals.check,
    "session": session.check,
}
"""Every check by name, in the order of the report's columns."""

__all__ = ["CHECKS", "Check"]
