"""pool: K and V stand where `out_loc` says, bit for bit, and every other slot of the pool is unchanged."""

from __future__ import annotations

import numpy as np
import torch

from cases.bits import bits, same_bits
from conformance.outcome import Finding
from conformance.trial import Trial

NAME = "pool"


def check(trial: Trial) -> list[Finding]:
    found: list[Finding] = []
    for step, run in enumerate(trial.first.steps):
        if run.pool is None:
            continue
        for which, after in zip("kv", run.pool, strict=True):
            want = trial.question.tensors.pool(step, which, nan=trial.first.nan, after=True)
            found += difference(trial, step, which, after, want)
    return found


def difference(trial: Trial, step: int, which: str, after: torch.Tensor, want: torch.Tensor) -> list[Finding]:
    """The first slot of K ("k") or V ("v") that does not hold what it must after a step."""
    return [] if same_bits(after, want) else [_finding(trial, step, which, after, want)]


def _finding(trial: Trial, step: int, which: str, after: torch.Tensor, want: torch.Tensor) -> Finding:
    case, tensors = trial.case, trial.question.step(step)
    different = bits(after) != bits(want)
    if case.layout == "HND":
        different = different.transpose(2, 3)
    per_slot = different.flatten(3).any(-1).numpy()
    layer, page, offset = (int(i[0]) for i in np.nonzero(per_slot))
    slot = page * case.page_size + offset
    total = int(per_slot.sum())
    owner = _owner(tensors.placed.slots, slot)
    waits = next((uid for uid, held in tensors.placed.waiting.items() if slot in held), None)
    if owner is None and waits is not None:
        what = (
            f"position {tensors.placed.waiting[waits].index(slot)} of uid {waits}, which waits, was altered"
        )
    elif owner is None:
        what = "a slot that no request owns was written"
    else:
        request, position = owner
        new = position >= tensors.step.requests[request].stored_len
        what = (
            f"position {position} of request {request} {'was not stored as given' if new else 'was altered'}"
        )
    return Finding(
        check=NAME,
        step=step,
        layer=layer,
        request=owner[0] if owner else None,
        field="out_loc",
        message=f"{which.upper()} in slot {slot} (page {page}, offset {offset}): {what}; {total} slots differ",
    )


def _owner(slots: tuple[np.ndarray, ...], slot: int) -> tuple[int, int] | None:
    for request, own in enumerate(slots):
        at = np.flatnonzero(own == slot)
        if len(at):
            return request, int(at[0])
    return None
