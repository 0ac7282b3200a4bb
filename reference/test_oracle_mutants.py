"""Faults put into the oracle, one at a time: each must fail the comparisons that the oracle passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from cases.model import Mask
from reference import agreement, attention, masks, merge, softmax
from reference.problems import Problem, make_problem

Check = Callable[[Problem], None]
three_loops, sdpa, chunk_sizes, rows_cut, splits = (
    agreement.agrees_with_three_loops,
    agreement.agrees_with_sdpa,
    agreement.same_for_every_chunk_size,
    agreement.same_when_rows_are_cut,
    agreement.split_equals_whole,
)


@dataclass(frozen=True)
class Mutant:
    """`fault` stands in for `place.name`; `caught_by` holds problems and the checks that see it on them."""

    place: Any
    name: str
    fault: Callable[..., Any]
    caught_by: tuple[tuple[str, Check], ...]


def top_left(row: Any, qo_len: int, kv_len: int) -> Any:
    return row


def window_too_narrow(position: Any, mask: Mask) -> Any:
    return position - (mask.window - 2) if mask.window is not None else 0


def window_too_wide(position: Any, mask: Mask) -> Any:
    return position - mask.window if mask.window is not None else 0


def own_key_hidden(position: Any, kv_len: int, mask: Mask) -> Any:
    return position if mask.causal else kv_len


def cap_before_scale(q: Any, k: Any, soft_cap: float | None, hidden: Any, lib: Any) -> Any:
    scale = 8**-0.5
    return softmax.hide(scale * softmax.cap(softmax.products(q, k) / scale, soft_cap, lib), hidden, lib)


def cap_after_mask(q: Any, k: Any, soft_cap: float | None, hidden: Any, lib: Any) -> Any:
    return softmax.cap(softmax.hide(softmax.products(q, k), hidden, lib), soft_cap, lib)


def cap_of_twice(scores: Any, soft_cap: float | None, lib: Any) -> Any:
    return scores if soft_cap is None else lib.tanh(scores / soft_cap)


def groups_interleaved(q: Any, num_kv_heads: int) -> Any:
    rows, heads, dim = q.shape
    by_group = q.reshape(rows, heads // num_kv_heads, num_kv_heads, dim).swapaxes(1, 2)
    return by_group.swapaxes(0, 1).reshape(num_kv_heads, -1, dim)


def scale_forgotten(q: Any, scale: float) -> Any:
    return q


def scale_twice(q: Any, scale: float) -> Any:
    return q * scale * scale


def base_two(x: Any, lib: Any) -> Any:
    return lib.log(x) / math.log(2.0)


def not_rescaled(old_top: Any, top: Any, lib: Any) -> Any:
    return lib.exp(old_top - old_top)


def last_chunk_dropped(length: int, size: int) -> list[tuple[int, int]]:
    return [(start, start + size) for start in range(0, length - size + 1, size)] or [(0, length)]


def chunks_overlap(length: int, size: int) -> list[tuple[int, int]]:
    return [(max(start - 1, 0), min(start + size, length)) for start in range(0, length, size)]


def not_cleared(out: Any, batch: Any, ranges: Any, lib: Any) -> None:
    return None


def only_keyless_requests_cleared(out: Any, batch: Any, ranges: Any, lib: Any) -> None:
    line, group = 0, out.shape[1] // sum(batch.qo_lens)
    for qo_len, kv_len in zip(batch.qo_lens, batch.kv_lens, strict=True):
        if not kv_len:
            out[:, line : line + qo_len * group] = 0.0
        line += qo_len * group


def custom_upside_down(piece: Any, batch: Any, ranges: Any, lib: Any) -> Any:
    first, end = (start - piece.row_start for start in piece.rows)
    keys = slice(piece.keys[0] - piece.key_start, piece.keys[1] - piece.key_start)
    return ~lib.array(batch.custom[piece.request].flip(0))[first:end, keys]


def neighbours_seen(piece: Any, batch: Any, ranges: Any, lib: Any) -> Any:
    return lib.arange(*piece.keys) >= ranges[1][piece.rows[0] : piece.rows[1]]


right_gather = attention.gathered


def not_dequantised(cache: Any, slots: Any, factor: float, compute: Any, lib: Any) -> Any:
    return right_gather(cache, slots, 1.0, compute, lib)


def slots_off_by_one(cache: Any, slots: Any, factor: float, compute: Any, lib: Any) -> Any:
    return right_gather(cache, np.roll(slots, 1), factor, compute, lib)


right_pieces = attention.seen_of


def trimmed_too_much(piece: Any, first: Any, end: Any) -> Any:
    *others, last = right_pieces(piece, first, end) or [piece]
    return [*others, last._replace(keys=(last.keys[0], last.keys[1] - 1))]


def trimmed_by_its_first_row(piece: Any, first: Any, end: Any) -> Any:
    last = int(end[piece.rows[0]])
    return [part._replace(keys=(part.keys[0], last)) for part in right_pieces(piece, first, end)][:1]


def edge_taken_twice(piece: Any, first: Any, end: Any) -> Any:
    *others, last = right_pieces(piece, first, end)
    return [*others, last._replace(keys=(last.keys[0] - 1, last.keys[1]))] if others else [last]


def second_step_forgets(piece: Any, first: Any, end: Any) -> Any:
    return [part._replace(first=True) for part in right_pieces(piece, first, end)]


def visible_to_its_last_row(piece: Any, first: Any, end: Any) -> bool:
    return bool(end[piece.rows[1] - 1] >= piece.keys[1])


def neutral_is_zero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.logaddexp(a.nan_to_num(neginf=0.0), b.nan_to_num(neginf=0.0))


def merged_in_base_two(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return torch.exp2(part - whole).nan_to_num()[..., None]


MUTANTS = {
    "causal top left": Mutant(
        masks, "row_position", top_left, (("causal prefill", three_loops), ("causal prefill", sdpa))
    ),
    "window too narrow": Mutant(
        masks, "first_key", window_too_narrow, (("window", three_loops), ("window", sdpa))
    ),
    "window too wide": Mutant(
        masks, "first_key", window_too_wide, (("window", three_loops), ("window", sdpa))
    ),
    "own key hidden": Mutant(masks, "end_key", own_key_hidden, (("decode", three_loops), ("window", sdpa))),
    "cap before scale": Mutant(attention, "block_scores", cap_before_scale, (("soft cap", three_loops),)),
    "cap after mask": Mutant(
        attention,
        "block_scores",
        cap_after_mask,
        (("soft cap and window", three_loops), ("soft cap", three_loops)),
    ),
    "cap not multiplied back": Mutant(softmax, "cap", cap_of_twice, (("soft cap", three_loops),)),
    "GQA interleaved": Mutant(
        attention, "grouped", groups_interleaved, (("groups of five", three_loops), ("groups of five", sdpa))
    ),
    "scale forgotten": Mutant(
        attention, "scaled", scale_forgotten, (("decode", three_loops), ("decode", sdpa))
    ),
    "scale twice": Mutant(
        attention, "scaled", scale_twice, (("own scale", three_loops), ("own scale", sdpa))
    ),
    "LSE in base 2": Mutant(softmax, "natural_log", base_two, (("decode", three_loops), ("decode", splits))),
    "running maximum not rescaled": Mutant(softmax, "kept", not_rescaled, (("extreme logits", chunk_sizes),)),
    "last chunk dropped": Mutant(attention, "chunks", last_chunk_dropped, (("decode", chunk_sizes),)),
    "chunks overlap": Mutant(attention, "chunks", chunks_overlap, (("decode", chunk_sizes),)),
    "empty row is NaN": Mutant(
        attention, "clear_empty_rows", not_cleared, (("rows without keys", three_loops),)
    ),
    "empty row of a request with keys is NaN": Mutant(
        attention,
        "clear_empty_rows",
        only_keyless_requests_cleared,
        (("rows without keys", three_loops), ("rows without keys, window", three_loops)),
    ),
    "custom mask upside down": Mutant(
        attention, "hidden_block", custom_upside_down, (("custom", three_loops),)
    ),
    "keys of earlier requests seen": Mutant(
        attention, "hidden_block", neighbours_seen, (("decode", three_loops),)
    ),
    "KV not dequantised": Mutant(
        attention, "gathered", not_dequantised, (("e4m3 cache", three_loops), ("e5m2 cache", three_loops))
    ),
    "slots off by one": Mutant(
        attention, "gathered", slots_off_by_one, (("decode", three_loops), ("causal prefill", sdpa))
    ),
    "trimmed too much": Mutant(
        attention, "seen_of", trimmed_too_much, (("long", three_loops), ("long, window", rows_cut))
    ),
    "trimmed by its first row": Mutant(
        attention, "seen_of", trimmed_by_its_first_row, (("long", three_loops), ("long", rows_cut))
    ),
    "edge taken twice": Mutant(attention, "seen_of", edge_taken_twice, (("two steps", sdpa),)),
    "second step forgets the first": Mutant(
        attention, "seen_of", second_step_forgets, (("two steps", sdpa),)
    ),
    "visible because its last row sees it": Mutant(
        attention, "all_visible", visible_to_its_last_row, (("causal prefill", three_loops), ("long", sdpa))
    ),
    "neutral element is (0, 0)": Mutant(merge, "combined_lse", neutral_is_zero, (("one request", splits),)),
    "merge weights in base 2": Mutant(merge, "share", merged_in_base_two, (("one request", splits),)),
}
PROBLEMS = agreement.PROBLEMS | {
    "one request": lambda: make_problem([3], [9]),
    "two steps": lambda: make_problem([280], [300]),
}


def _pairs() -> list[tuple[str, str, Check]]:
    return [(name, problem, check) for name, m in MUTANTS.items() for problem, check in m.caught_by]


@pytest.mark.parametrize(("mutant", "problem", "check"), _pairs())
def test_each_mutant_is_caught(
    monkeypatch: pytest.MonkeyPatch, mutant: str, problem: str, check: Check
) -> None:
    asked = PROBLEMS["one request"]() if check is splits else PROBLEMS[problem]()
    check(asked)
    fault = MUTANTS[mutant]
    monkeypatch.setattr(fault.place, fault.name, fault.fault)
    with pytest.raises(AssertionError):
        check(asked)


def _dropped_key_of_weight(weight: float, num_keys: int) -> tuple[Problem, Problem]:
    """A problem whose first key has about this weight, and the same without that key."""
    problem = make_problem([1], [num_keys], heads=(1, 1), dims=(4, 4), mask=Mask(causal=False), scale=1.0)
    q, k, v = (x.clone() for x in problem.tensors)
    q[...] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    k[problem.slots] = 0.0
    k[problem.slots[0], :, 0] = math.log(weight * num_keys)
    v[problem.slots[0]] = 3.0
    whole = problem._replace(q=q, k_cache=k, v_cache=v)
    return whole, whole._replace(slots=problem.slots[1:], kv_lens=[num_keys - 1])


@pytest.mark.parametrize("num_keys", [16, 2048, 8192])
def test_a_dropped_key_of_weight_1e_9_is_seen(num_keys: int) -> None:
    whole, dropped = _dropped_key_of_weight(1e-9, num_keys)
    right = attention.paged_attention(*whole.tensors, **whole.options)
    wrong = attention.paged_attention(*dropped.tensors, **dropped.options)
    agreement.assert_close(right, right.out, right.lse, "itself")
    with pytest.raises(AssertionError, match="out differs"):
        agreement.assert_close(wrong, right.out, right.lse, "one key fewer")
    with pytest.raises(AssertionError, match="lse differs"):
        agreement.assert_close(right._replace(lse=wrong.lse), right.out, right.lse, "one key fewer")
