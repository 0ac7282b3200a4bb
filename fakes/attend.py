"""The numbers of both fakes: paged or ragged attention in float64, rounded once.

Semantics, as FlashInfer and FlashAttention define them: query head h reads KV head h // group size; the causal mask is
aligned bottom right; a window counts keys on either side of the row's own position; scale, soft cap, mask and softmax
follow in this order; a row that sees no key is (0, -inf).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from fakes import recorder
from fakes.recorder import Span

SCORES_AT_ONCE = 1 << 23
"""Scores held at once; longer calls go through their query rows in chunks."""

SAFE_SCORE = 300.0
"""Scores below this need no running maximum: float64 holds exp(300) and its inverse to full precision."""

_CACHED_MASK = 1 << 14

FEW = 600
"""Numbers from which on torch's functions are faster than numpy's, their calls included."""

TOGETHER = 1 << 14
"""Up to this many scores, requests are computed in one block whose mask keeps them apart: fewer and larger steps."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: Sequence[Span],
    *,
    layout: str,
    scale: float,
    causal: bool = False,
    window_left: int = -1,
    window_right: int = -1,
    soft_cap: float = 0.0,
    custom: Sequence[np.ndarray] | None = None,
    k_scale: float | np.ndarray = 1.0,
    v_scale: float | np.ndarray = 1.0,
    sinks: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Attention of every span, unrounded.

    Args:
        q: host tensor `[rows, num_qo_heads, head_dim_qk]`, any float dtype and strides.
        k: host tensor, NHD `[pages, page_size, num_kv_heads, dim]`, HND `[pages, num_kv_heads, page_size, dim]`
            or "ragged" `[tokens, num_kv_heads, dim]`.
        v: the same with its own dim.
        spans: requests; `slots` must lie within k and v (the caller checks).
        layout: "NHD", "HND" or "ragged".
        scale: factor on q . k.
        causal: row i of n sees keys up to kv_len - n + i.
        window_left: keys seen before the row's own, -1 for all.
        window_right: keys seen after it, -1 for all; `causal` goes before.
        soft_cap: 0 for none.
        custom: one bool `[qo_len, kv_len]` per span, in place of `causal` and the window; `[qo_len, group, kv_len]`
            where the query heads of a KV head see different keys.
        k_scale: dequantisation of k, a number or `[spans, num_kv_heads]`.
        v_scale: the same of v.
        sinks: float64 `[num_qo_heads]`: a score per head that takes weight and brings no value.

    Returns:
        Out, float64 `[rows, num_qo_heads, head_dim_vo]`, and LSE, float64 `[rows, num_qo_heads]`, in natural
        log. Rows that no span covers are NaN in both.
    """
    rows, num_qo_heads, dim_qk = q.shape
    num_kv_heads = k.shape[1] if layout in ("HND", "ragged") else k.shape[2]
    group = num_qo_heads // num_kv_heads
    packed_rows = rows * group  # rows of one KV head: its query heads, row by row
    result = np.empty((num_kv_heads, packed_rows, v.shape[-1]))
    top, total = np.zeros((num_kv_heads, packed_rows, 1)), np.empty((num_kv_heads, packed_rows, 1))
    in_order = _in_order(spans)
    if not (in_order and spans and spans[0].q_start == 0 and spans[-1].q_end == rows):
        result.fill(np.nan)
        total.fill(np.nan)
    if not spans:
        return _unpacked(result, top, total, rows, group)
    slots = np.concatenate([span.slots for span in spans]) if len(spans) > 1 else spans[0].slots
    keys = gather(k, slots, layout)
    values = keys if v is k else gather(v, slots, layout)
    per_head = isinstance(k_scale, np.ndarray) or isinstance(v_scale, np.ndarray)
    factor = scale if per_head else scale * k_scale
    query = _doubles(q)
    if num_kv_heads > 1:
        query = query.reshape(rows, num_kv_heads, group, dim_qk).transpose(1, 0, 2, 3)
    query = (query * factor).reshape(num_kv_heads, packed_rows, dim_qk)
    sink = None if sinks is None else np.tile(sinks.reshape(num_kv_heads, 1, group), (1, rows, 1))
    if sink is not None:
        sink = sink.reshape(num_kv_heads, packed_rows, 1)
    limit = _largest_score(query, keys)
    small, strange = sink is None and limit < SAFE_SCORE, not math.isfinite(limit)
    scores_in_all = num_qo_heads * (spans[-1].q_end - spans[0].q_start) * len(slots)
    plain = custom is None and not per_head and len(spans) > 1
    # A weight of 0 keeps a neighbour's key out only if that key's value is finite.
    if small and plain and scores_in_all <= TOGETHER and in_order and _finite(values):
        at = slice(spans[0].q_start * group, spans[-1].q_end * group)
        shape = tuple((span.q_end - span.q_start, len(span.slots)) for span in spans)
        bias, some_empty = _cached_block(shape, window_left, 0 if causal else window_right, group)
        scores = np.matmul(query[:, at], keys.transpose(1, 2, 0))
        if soft_cap > 0.0:
            scores = capped(scores, soft_cap)
        scores += bias
        exponential(scores)
        np.add.reduce(scores, axis=-1, keepdims=True, out=total[:, at])
        np.matmul(scores, values.transpose(1, 0, 2), out=result[:, at])
        spans = ()
    else:
        some_empty = False
    start = 0
    for index, span in enumerate(spans):
        length = len(span.slots)
        stop = start + length
        key, value = keys[start:stop].transpose(1, 2, 0), values[start:stop].transpose(1, 0, 2)
        start = stop
        if per_head:
            key = key * _heads(k_scale, index)
            value = value * _heads(v_scale, index)
        count = span.q_end - span.q_start
        step = max(1, SCORES_AT_ONCE // max(1, num_qo_heads * length))
        for first in range(0, count, step):
            last = min(first + step, count)
            at = slice((span.q_start + first) * group, (span.q_start + last) * group)
            if custom is not None:
                bias, empty = _bias(custom[index][first:last], group)
            else:
                bias, empty = _mask(count, length, causal, window_left, window_right, first, last, group)
            empty = empty or length == 0
            some_empty = some_empty or empty
            scores = np.matmul(query[:, at], key)  # [kv heads, rows * group, keys]
            if soft_cap > 0.0:
                scores = capped(scores, soft_cap)
            if bias is not None:
                scores += bias
                if strange:  # a score that is NaN is masked as well
                    np.copyto(scores, -np.inf, where=np.isneginf(bias))
            if not small:
                peak = top[:, at]
                np.maximum.reduce(scores, axis=-1, keepdims=True, initial=-np.inf, out=peak)
                if sink is not None:
                    np.maximum(peak, sink[:, at], out=peak)
                if empty:
                    peak[np.isneginf(peak)] = 0.0
                scores -= peak
            exponential(scores)
            np.add.reduce(scores, axis=-1, keepdims=True, out=total[:, at])
            np.matmul(scores, value, out=result[:, at])
    if sink is not None:
        total += np.exp(sink - top)
    if some_empty:
        lonely = total == 0.0
        total[lonely] = 1.0
        top[lonely] = -np.inf
    if not per_head and v_scale != 1.0:
        result *= v_scale
    return _unpacked(result, top, total, rows, group)


def rounded(
    exact: np.ndarray,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
    untouched: np.ndarray | None = None,
    of: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """A result: `exact` rounded once to `dtype`, its unrounded values kept with the open recorder.

    Args:
        exact: float64; its untouched rows are overwritten by what `into` holds.
        dtype: of the result.
        into: host tensor to write instead of a new one; it must have the shape of `exact`.
        untouched: bool `[rows]`: rows that the library does not write; they keep what `into` holds.
        of: what it was computed from. Of numbers that may have been rounded on the way, `exact` is not kept.
    """
    if into is None:
        result = torch.from_numpy(exact).to(dtype)
    else:
        result = into
        if untouched is not None and untouched.any():
            exact[untouched] = into.detach().to(torch.float64).numpy()[untouched]
        into.copy_(torch.from_numpy(exact))
    record = recorder.current()
    if record is not None and result.is_contiguous() and record.knows(*of):
        record.keep_exact(result, exact)
    return result


def uncovered(spans: Sequence[Span], rows: int) -> np.ndarray | None:
    """Bool `[rows]`: rows that no span computes; None when all are computed."""
    end = 0
    for span in spans:
        if span.q_start != end:
            break
        end = span.q_end
    else:
        if end == rows:
            return None
    free = np.ones(rows, dtype=np.bool_)
    for span in spans:
        free[span.q_start : span.q_end] = False
    return free if free.any() else None


def seen(qo_len: int, kv_len: int, left: int, right: int, rows: tuple[int, int] | None = None) -> np.ndarray:
    """Bool `[qo_len, kv_len]`, or of a range of rows: keys up to `left` before the row's own and `right` after it, -1
    for all."""
    first, last = rows or (0, qo_len)
    own = np.arange(kv_len - qo_len + first, kv_len - qo_len + last)[:, None]
    key = np.arange(kv_len)[None, :]
    found = key <= own + right if right >= 0 else np.ones((last - first, kv_len), dtype=np.bool_)
    return found & (key >= own - left) if left >= 0 else found


def exponential(numbers: np.ndarray) -> None:
    """exp in place. Beyond some hundred numbers torch's vector code is up to three times faster than numpy's loop."""
    if numbers.size < FEW:
        np.exp(numbers, out=numbers)
    else:
        torch.from_numpy(numbers).exp_()


def capped(scores: np.ndarray, soft_cap: float) -> np.ndarray:
    """soft_cap * tanh(scores / soft_cap)."""
    scores = scores / soft_cap
    if scores.size < FEW:
        np.tanh(scores, out=scores)
    else:
        torch.from_numpy(scores).tanh_()
    scores *= soft_cap
    return scores


def _largest_score(query: np.ndarray, keys: np.ndarray) -> float:
    """A number that no |score| is above; NaN or Inf where a query or a key is not finite (or may not be)."""
    norms = math.sqrt(_square(query)) * math.sqrt(_square(keys))
    if norms < SAFE_SCORE or not math.isfinite(norms):
        return norms
    return _bound(query) * _bound(keys) * query.shape[-1]


def _square(numbers: np.ndarray) -> float:
    """Sum of squares, in one pass; not finite where a number is not."""
    return float(np.vdot(numbers, numbers))


def _finite(numbers: np.ndarray) -> bool:
    return math.isfinite(_square(numbers)) or bool(np.isfinite(numbers).all())


def _bound(numbers: np.ndarray) -> float:
    """Largest absolute value; NaN if there is one."""
    return float(max(numbers.max(), -numbers.min())) if numbers.size else 0.0


def _unpacked(
    result: np.ndarray, top: np.ndarray, total: np.ndarray, rows: int, group: int
) -> tuple[np.ndarray, np.ndarray]:
    """Out and LSE, row by row, from unnormalised sums `[kv heads, rows * group, ...]`."""
    result /= total
    np.log(total, out=total)
    total += top
    heads = result.shape[0]
    dim = result.shape[-1]
    out = result.reshape(heads, rows, group, dim).transpose(1, 0, 2, 3).reshape(rows, heads * group, dim)
    return out, total.reshape(heads, rows, group).transpose(1, 0, 2).reshape(rows, heads * group)


def _mask(
    qo_len: int, kv_len: int, causal: bool, left: int, right: int, first: int, last: int, group: int
) -> tuple[np.ndarray | None, bool]:
    """What to add to the scores `[(last - first) * group, kv_len]`, or None; whether a row may see no key."""
    right = 0 if causal else right
    if (left < 0 and right < 0) or (qo_len == 1 and (left < 0 or left >= kv_len - 1)):
        return None, False  # a single row, aligned bottom right, has every key on its left
    if (last - first) * kv_len * group <= _CACHED_MASK:
        return _cached_mask(qo_len, kv_len, left, right, first, last, group)
    return _build_mask(qo_len, kv_len, left, right, first, last, group)


def _build_mask(
    qo_len: int, kv_len: int, left: int, right: int, first: int, last: int, group: int
) -> tuple[np.ndarray | None, bool]:
    return _bias(seen(qo_len, kv_len, left, right, (first, last)), group)


_cached_mask = lru_cache(maxsize=512)(_build_mask)


def _in_order(spans: Sequence[Span]) -> bool:
    """Whether the rows of the spans follow each other."""
    return all(a.q_end == b.q_start for a, b in pairwise(spans))


def _build_block(
    shape: tuple[tuple[int, int], ...], left: int, right: int, group: int
) -> tuple[np.ndarray, bool]:
    """`_bias` of several requests side by side; `shape` holds (rows, keys) of each."""
    rows, keys = np.array(shape).T
    row_of, key_of = np.repeat(np.arange(len(shape)), rows), np.repeat(np.arange(len(shape)), keys)
    own = np.arange(len(row_of)) - (np.cumsum(rows) - keys)[row_of]
    key = np.arange(len(key_of)) - (np.cumsum(keys) - keys)[key_of]
    mask = row_of[:, None] == key_of
    if right >= 0:
        mask &= key <= own[:, None] + right
    if left >= 0:
        mask &= key >= own[:, None] - left
    bias = np.where(mask, 0.0, -np.inf)
    return np.repeat(bias, group, axis=0) if group > 1 else bias, not mask.any(axis=1).all()


_cached_block = lru_cache(maxsize=512)(_build_block)


def _bias(mask: np.ndarray, group: int) -> tuple[np.ndarray | None, bool]:
    if mask.all():
        return None, False
    bias = np.where(mask, 0.0, -np.inf)
    if mask.ndim == 3:
        bias = bias.reshape(-1, mask.shape[-1])
    elif group > 1:
        bias = np.repeat(bias, group, axis=0)
    return bias, not mask.any(axis=-1).all()


def _heads(scale: float | np.ndarray, span: int) -> float | np.ndarray:
    return scale[span][:, None, None] if isinstance(scale, np.ndarray) else scale


def _doubles(tensor: torch.Tensor) -> np.ndarray:
    return (tensor.detach() if tensor.requires_grad else tensor).double().numpy()


def gather(cache: torch.Tensor, slots: np.ndarray, layout: str) -> np.ndarray:
    """Float64 `[len(slots), num_kv_heads, dim]`: the keys or values in these slots."""
    flat, index = cache.detach() if cache.requires_grad else cache, slots
    if layout != "ragged":
        nhd = flat if layout == "NHD" else flat.transpose(1, 2)
        pages, page_size, heads, dim = nhd.shape
        page_stride, slot_stride, head_stride, dim_stride = nhd.stride()
        if not slot_stride or page_stride % slot_stride:
            page, offset = np.divmod(slots, page_size)
            return _doubles(nhd[torch.from_numpy(page), torch.from_numpy(offset)])
        per_page = (
            page_stride // slot_stride
        )  # slots from page to page: more than page_size in a stacked cache
        flat = nhd.as_strided(
            ((pages - 1) * per_page + page_size if pages else 0, heads, dim),
            (slot_stride, head_stride, dim_stride),
        )
        if per_page != page_size:
            index = slots // page_size * per_page + slots % page_size
    at = torch.from_numpy(index)
    if cache.element_size() == 1:  # index_select knows no float8
        return _doubles(flat.view(torch.uint8).index_select(0, at).view(cache.dtype))
    return _doubles(flat.index_select(0, at))
