"""What each query row read, against what it must read; the difference in words."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np

from cases.model import Case, Mask
from cases.tensors import StepTensors
from conformance.decode import OUTSIDE, ReadSpan, visible_keys
from fakes.recorder import Attended
from reference import visible


def compare(
    case: Case, tensors: StepTensors, mask: Mask, decoded: list[tuple[Attended, ReadSpan]]
) -> tuple[int, str] | None:
    """The first row whose keys are not those that the layer's mask asks for: its request, and which keys are missing,
    foreign or double."""
    any_ragged = any(attended.layout == "ragged" for attended, _ in decoded)
    ragged = case.level == "kernel" and any_ragged
    known = "k and v" if ragged else "pool, k and v" if any_ragged else "pool"
    by_head = any(span.heads is not None for _, span in decoded)
    heads = case.heads.num_qo_heads if by_head else 1
    read = _read(_distinct(decoded), heads)
    row = 0
    for request, r in enumerate(tensors.step.requests):
        custom = None if tensors.custom is None else tensors.custom[request]
        seen = visible(r.qo_len, r.kv_len, mask, custom).numpy()
        slots = tensors.tokens.of(request) if ragged else tensors.placed.slots[request]
        for i in range(r.qo_len):
            asked: list[int] = slots[seen[i]].tolist()
            want = Counter(asked)
            for head, which in product(range(heads), "kv"):
                got = read.get((which, (row + i) * heads + head), Counter[int]())
                if got == want:
                    continue
                position = r.kv_len - r.qo_len + i
                of_head = f", head {head}" if by_head else ""
                where = f"row {row + i}{of_head} (request {request}, position {position})"
                difference = _difference(tensors, request, which, got, want, slots, known)
                return request, f"{where} {difference}"
        row += r.qo_len
    return None


def of_whole_batch(decoded: list[tuple[Attended, ReadSpan]], tensors: StepTensors, mask: Mask) -> bool:
    """Whether the arrays of a call can be held against those of the whole batch, entry by entry.

    Not where rows are parts of rows or of requests, nor where a page table that is cut to a window gives every row as
    many keys as it must see: other ids are wrong there, no length.
    """
    spans = [(attended, span) for attended, span in decoded if span.num_rows]
    asked = [r for r in range(len(tensors.step.requests)) if tensors.step.requests[r].qo_len]
    if len(spans) > len(asked) or any(span.heads is not None for _, span in spans):
        return False
    if mask.window is None or len(spans) != len(asked):
        return True
    cut = False
    for request, (attended, span) in zip(asked, spans, strict=True):
        r = tensors.step.requests[request]
        cut |= len(span.k_slots) < r.kv_len
        want = visible(r.qo_len, r.kv_len, mask).sum(dim=1).numpy()
        if not np.array_equal(visible_keys(attended, span).sum(axis=1), want):
            return True
    return not cut


def _distinct(decoded: list[tuple[Attended, ReadSpan]]) -> list[tuple[Attended, ReadSpan]]:
    """Without calls that read what an earlier one has read already: to warm up, say, and one result is not used.

    Where both are used, weights are right still, and the numbers tell.
    """
    calls: dict[int, list[tuple[Attended, ReadSpan]]] = {}
    for pair in decoded:
        calls.setdefault(id(pair[0]), []).append(pair)
    if len(calls) == 1:
        return decoded
    first: dict[tuple[tuple[bytes, ...], ...], list[tuple[Attended, ReadSpan]]] = {}
    for call in calls.values():
        first.setdefault(tuple(_reads(*pair) for pair in call), call)
    return [pair for call in first.values() for pair in call]


def _reads(attended: Attended, span: ReadSpan) -> tuple[bytes, ...]:
    heads = np.zeros(0) if span.heads is None else span.heads
    arrays = (span.rows, heads, span.k_slots, span.v_slots, visible_keys(attended, span))
    return tuple(array.tobytes() for array in arrays)


def _read(decoded: list[tuple[Attended, ReadSpan]], heads: int) -> dict[tuple[str, int], Counter[int]]:
    """How often each row (or each of its heads, as `row * heads + head`) reads each slot, for K and for V."""
    read: dict[tuple[str, int], Counter[int]] = {}
    for attended, span in decoded:
        seen = visible_keys(attended, span)
        own = span.rows[:, None] * heads + np.arange(heads) if span.heads is None else span.heads
        for i in range(span.num_rows):
            for which, slots in (("k", span.k_slots), ("v", span.v_slots)):
                keys: list[int] = slots[seen[i]].tolist()
                for unit in own[i]:
                    read.setdefault((which, int(unit)), Counter()).update(keys)
    return read


def _difference(
    tensors: StepTensors,
    request: int,
    which: str,
    got: Counter[int],
    want: Counter[int],
    slots: np.ndarray,
    known: str,
) -> str:
    missing, extra = want - got, got - want
    where = {int(slot): position for position, slot in enumerate(slots)}
    parts: list[str] = []
    if missing:
        positions = sorted(where[s] for s in missing)
        parts.append(f"does not read {_positions(positions)}")
    own = sorted(where[s] for s in extra if s in where and s not in want)
    if own:
        parts.append(f"reads {_positions(own)}, which it must not see")
    double = sorted(where[s] for s in extra if s in want)
    if double:
        parts.append(f"reads {_positions(double)} more than once")
    foreign = Counter({s: count for s, count in extra.items() if s > OUTSIDE and s not in where})
    if foreign:
        first = min(foreign)
        named = f"slot {first} ({_owner(tensors, request, first)})"
        count = foreign.total()
        only = f"a key that is not its own: {named}"
        parts.append(
            f"reads {f'{count} keys that are not its own, among them {named}' if count > 1 else only}"
        )
    outside = sum(count for s, count in extra.items() if s <= OUTSIDE)
    if outside:
        parts.append(
            f"reads {'a key' if outside == 1 else f'{outside} keys'} outside of this layer's {known}"
        )
    return f"of {which.upper()} " + ", ".join(parts) if which == "v" else ", ".join(parts)


def _positions(positions: list[int]) -> str:
    if len(positions) == 1:
        return f"the key at position {positions[0]}"
    shown = ", ".join(map(str, positions[:4]))
    return f"{len(positions)} keys (positions {shown}{', ...' if len(positions) > 4 else ''})"


def _owner(tensors: StepTensors, request: int, slot: int) -> str:
    for other, slots in enumerate(tensors.placed.slots):
        if other != request and slot in slots:
            return f"request {other}'s"
    for uid, held in tensors.placed.waiting.items():
        if slot in held:
            return f"uid {uid}'s, which waits"
    return "nobody's"
