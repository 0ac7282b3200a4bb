"""Making a call on which two libraries disagree as small as the disagreement allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from conformance.fidelity.call import DEFAULTS, LibraryCall
from conformance.fidelity.compare import Disagreement

FLAGS = (
    "custom_mask",
    "seq_lens",
    "host_metadata",
    "strided_q",
    "stacked_cache",
    "poisoned",
    "empty_states",
    "causal",
    "num_splits",
    "layout",
)
MAX_ASKED = 200

AskAgain = Callable[[LibraryCall], Disagreement | None]


def shrink(found: Disagreement, ask: AskAgain, limit: int = MAX_ASKED) -> Disagreement:
    """The smallest disagreement of the same kind that greedy steps lead to, within `limit` questions.

    The kind is the pair of verdicts: the reason for one may be found in fewer malformations.
    """
    asked = 0
    while True:
        for call in candidates(found.call):
            if asked == limit:
                return found
            asked += 1
            smaller = ask(call)
            if smaller is not None and smaller.group[2:] == found.group[2:]:
                found = smaller
                break
        else:
            return found


def candidates(call: LibraryCall) -> Iterator[LibraryCall]:
    """Calls that are one step simpler, the boldest first."""
    for at in range(len(call.malformations)):
        yield from _changed(call, malformations=call.malformations[:at] + call.malformations[at + 1 :])
    count = len(call.qo_lens)
    if count > 2:
        for half in (slice(0, count // 2), slice(count // 2, count)):
            yield from _changed(call, qo_lens=call.qo_lens[half], kv_lens=call.kv_lens[half])
    if count > 1:
        for at in range(count):
            yield from _changed(call, qo_lens=_without(call.qo_lens, at), kv_lens=_without(call.kv_lens, at))
    if (call.num_qo_heads, call.num_kv_heads) != (1, 1):
        yield from _changed(call, num_qo_heads=1, num_kv_heads=1)
        if call.num_kv_heads > 1:
            yield from _changed(call, num_qo_heads=call.num_qo_heads // call.num_kv_heads, num_kv_heads=1)
        if call.num_qo_heads > 2 * call.num_kv_heads:
            yield from _changed(call, num_qo_heads=2 * call.num_kv_heads)
    for flag in FLAGS:
        if getattr(call, flag) != DEFAULTS[flag]:
            yield from _changed(call, **{flag: DEFAULTS[flag]})
    if call.variant != "plain":
        yield from _changed(call, variant="plain", window_left=-1, soft_cap=0.0)
    for smaller in (1, 2, call.page_size // 2):
        if 0 < smaller < call.page_size:
            yield from _changed(call, page_size=smaller)
    decode = "decode" in call.entry
    for at in range(count):
        for lens in ("kv_lens",) if decode else ("kv_lens", "qo_lens"):
            length: int = getattr(call, lens)[at]
            for shorter in {1, length // 2, length - call.page_size, length - 1} - {length}:
                if 0 <= shorter < length:
                    yield from _changed(call, **{lens: _with(getattr(call, lens), at, shorter)})
    if call.window_left > 0:
        yield from _changed(call, window_left=call.window_left // 2)
    if call.num_states > 1 and call.entry == "fi.merge_states":
        yield from _changed(call, num_states=call.num_states - 1)
    if call.seed:
        yield from _changed(call, seed=0)


def _changed(call: LibraryCall, **changes: Any) -> Iterator[LibraryCall]:
    try:
        yield replace(call, **changes)
    except ValueError:  # not a call: heads that do not divide
        return


def _without(lens: tuple[int, ...], at: int) -> tuple[int, ...]:
    return lens[:at] + lens[at + 1 :]


def _with(lens: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*lens[:at], value, *lens[at + 1 :])
