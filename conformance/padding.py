"""What the rows that pad a replayed batch read beside the dummies' only slot, in words."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.decode import OUTSIDE, ReadSpan
from conformance.graphs_run import GraphExecution, Replay


def foreign(done: GraphExecution, at: Replay, padding: Sequence[ReadSpan]) -> str | None:
    """About the first such row that reads another slot; None if there is none."""
    dummy = done.room.dummy_slot
    for span in padding:
        slots = [int(s) for s in (*span.k_slots, *span.v_slots) if s != dummy]
        if slots:
            count = len(span.k_slots)
            keys = "" if count == 1 else f"{count} keys, among them "
            return (
                f"row {span.rows[0]}, which pads the batch, reads {keys}{_named(done, at, slots[0])}; "
                f"a dummy has slot {dummy} alone{_cause(done, at, int(span.rows[0]), slots)}"
            )
    return None


def _named(done: GraphExecution, at: Replay, slot: int) -> str:
    if slot <= OUTSIDE:
        return "one outside of this layer's pool"
    placed = done.room.steps[at.step].placed
    owner = next((i for i, own in enumerate(placed.slots) if slot in own), None)
    return f"slot {slot} ({'nobody' if owner is None else f'request {owner}'}'s)"


def _cause(done: GraphExecution, at: Replay, row: int, slots: Sequence[int]) -> str:
    """All of it was this row's in an earlier replay."""
    for earlier in done.replays:
        if earlier is at:
            break
        held = done.room.steps[earlier.step].placed.slots
        if row < len(held) and set(slots) <= {int(s) for s in held[row]}:
            return f": its row still holds that of step {earlier.step}"
    return ""
