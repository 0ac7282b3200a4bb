"""The numbers of both fakes: paged or ragged attention in float64, rounded once.

Semantics, as FlashInfer and FlashAttention define them: query head h reads KV head h // group size; the causal mask
is aligned bottom right; a window counts keys on either side of the row's own position; scale, soft cap, mask and
softmax follow in this order; a row that sees no key is (0, -inf).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from fakes import recorder
from fakes.recorder import Span

SCORES_AT_ONCE = 1 << 23
"""Scores held at once; longer calls go through their query rows in chunks."""

_CACHED_MASK = 1 << 14


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
            or "ragged" `[tokens, num_kv_heads, dim]`. v: the same with its own dim.
        spans: requests; `slots` must lie within k and v (the caller checks).
        scale: factor on q . k. window_left, window_right: -1 for all keys. soft_cap: 0 for none.
        custom: one bool `[qo_len, kv_len]` per span, in place of `causal` and the window.
        k_scale, v_scale: dequantisation, a number or `[spans, num_kv_heads]`.
        sinks: float64 `[num_qo_heads]`: a score per head that takes weight and brings no value.

    Returns:
        out float64 `[rows, num_qo_heads, head_dim_vo]`, and LSE float64 `[rows, num_qo_heads]` in natural log. Rows
        that no span covers are NaN in both.
    """
    rows, num_qo_heads, _ = q.shape
    num_kv_heads = k.shape[1] if layout in ("HND", "ragged") else k.shape[2]
    group = num_qo_heads // num_kv_heads
    dim_vo = v.shape[-1]
    out = np.full((rows, num_qo_heads, dim_vo), np.nan)
    lse = np.full((rows, num_qo_heads), np.nan)
    if not spans:
        return out, lse
    slots = np.concatenate([span.slots for span in spans]) if len(spans) > 1 else spans[0].slots
    keys = _gather(k, slots, layout)
    values = keys if v is k else _gather(v, slots, layout)
    query = q.detach().to(torch.float64).numpy() * scale
    per_head = isinstance(k_scale, np.ndarray) or isinstance(v_scale, np.ndarray)
    if not per_head and k_scale != 1.0:
        query *= k_scale
    start = 0
    for index, span in enumerate(spans):
        length = len(span.slots)
        stop = start + length
        key, value = keys[start:stop], values[start:stop]
        start = stop
        if per_head:
            key = key * _heads(k_scale, index)
            value = value * _heads(v_scale, index)
        count = span.q_end - span.q_start
        step = max(1, SCORES_AT_ONCE // max(1, num_qo_heads * length)) if count else 1
        for first in range(0, count, step):
            last = min(first + step, count)
            mask = None
            if custom is not None:
                mask = custom[index][first:last]
            elif causal or window_left >= 0 or window_right >= 0:
                mask = _mask(count, length, causal, window_left, window_right, first, last)
            at = slice(span.q_start + first, span.q_start + last)
            _one(query[at], key, value, mask, group, soft_cap, sinks, out[at], lse[at])
    if not per_head and v_scale != 1.0:
        out *= v_scale
    return out, lse


def rounded(
    exact: np.ndarray,
    dtype: torch.dtype,
    into: torch.Tensor | None = None,
    untouched: np.ndarray | None = None,
) -> torch.Tensor:
    """A result: `exact` rounded once to `dtype`, its unrounded values kept with the open recorder.

    Args:
        into: host tensor to write instead of a new one; it must have the shape of `exact`.
        untouched: bool `[rows]`: rows that the library does not write; they keep what `into` holds.
    """
    if into is None:
        result = torch.from_numpy(exact).to(dtype)
    else:
        result = into
        if untouched is not None and untouched.any():
            exact[untouched] = into.detach().to(torch.float64).numpy()[untouched]
        into.copy_(torch.from_numpy(exact))
    record = recorder.current()
    if record is not None and result.is_contiguous():
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


def _one(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    mask: np.ndarray | None,
    group: int,
    soft_cap: float,
    sinks: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Rows of one request: query `[n, heads, dim]` is scaled already; results go to `out` and `lse`."""
    count, num_qo_heads, dim = query.shape
    length, num_kv_heads = key.shape[:2]
    if length == 0 and sinks is None:
        out[:] = 0.0
        lse[:] = -np.inf
        return
    packed = query.reshape(count, num_kv_heads, group, dim).transpose(1, 0, 2, 3)
    packed = packed.reshape(num_kv_heads, count * group, dim)
    scores = np.matmul(packed, key.transpose(1, 2, 0))  # [kv heads, rows * group, keys]
    if soft_cap > 0.0:
        scores = soft_cap * np.tanh(scores / soft_cap)
    may_be_empty = False
    if mask is not None and not mask.all():
        masked = scores.reshape(num_kv_heads, count, group, length)
        np.copyto(masked, -np.inf, where=~mask[None, :, None, :])
        may_be_empty = not mask.any(axis=1).all()
    if sinks is not None:
        sink = np.broadcast_to(sinks.reshape(num_kv_heads, 1, group), (num_kv_heads, count, group))
        sink = sink.reshape(num_kv_heads, count * group, 1)
        top = np.maximum(scores.max(axis=-1, keepdims=True, initial=-np.inf), sink)
    else:
        top = scores.max(axis=-1, keepdims=True)
    if may_be_empty:
        top = np.where(np.isneginf(top), 0.0, top)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sink - top)
    result = np.matmul(scores, value.transpose(1, 0, 2))
    if may_be_empty:
        empty = total == 0.0
        result /= np.where(empty, 1.0, total)
        with np.errstate(divide="ignore"):
            weight = np.log(total) + top
    else:
        result /= total
        weight = np.log(total) + top
    out[:] = (
        result.reshape(num_kv_heads, count, group, -1).transpose(1, 0, 2, 3).reshape(count, num_qo_heads, -1)
    )
    lse[:] = weight.reshape(num_kv_heads, count, group).transpose(1, 0, 2).reshape(count, num_qo_heads)


def _mask(
    qo_len: int, kv_len: int, causal: bool, left: int, right: int, first: int, last: int
) -> np.ndarray | None:
    if qo_len == 1 and (left < 0 or left >= kv_len - 1):
        return None  # one row aligned bottom right sees every key
    if (last - first) * kv_len <= _CACHED_MASK:
        return _cached_mask(qo_len, kv_len, causal, left, right, first, last)
    return _build_mask(qo_len, kv_len, causal, left, right, first, last)


def _build_mask(
    qo_len: int, kv_len: int, causal: bool, left: int, right: int, first: int, last: int
) -> np.ndarray:
    own = np.arange(kv_len - qo_len + first, kv_len - qo_len + last)[:, None]
    key = np.arange(kv_len)[None, :]
    limit = 0 if causal else right
    mask = key <= own + limit if limit >= 0 else np.ones((last - first, kv_len), dtype=np.bool_)
    if left >= 0:
        mask = mask & (key >= own - left)
    return mask


_cached_mask = lru_cache(maxsize=512)(_build_mask)


def _heads(scale: float | np.ndarray, span: int) -> float | np.ndarray:
    return scale[span][None, :, None] if isinstance(scale, np.ndarray) else scale


def _gather(cache: torch.Tensor, slots: np.ndarray, layout: str) -> np.ndarray:
    """Float64 `[len(slots), num_kv_heads, dim]`: the keys or values in these slots."""
    if layout == "ragged":
        flat, index = cache, slots
    else:
        nhd = cache if layout == "NHD" else cache.transpose(1, 2)
        pages, page_size, heads, dim = nhd.shape
        page_stride, slot_stride, head_stride, dim_stride = nhd.stride()
        if not slot_stride or page_stride % slot_stride:
            page, offset = np.divmod(slots, page_size)
            picked = nhd[torch.from_numpy(page), torch.from_numpy(offset)]
            return picked.detach().to(torch.float64).numpy()
        per_page = page_stride // slot_stride  # slots from page to page: more than page_size in a stacked cache
        flat = nhd.detach().as_strided(
            ((pages - 1) * per_page + page_size if pages else 0, heads, dim),
            (slot_stride, head_stride, dim_stride),
            nhd.storage_offset(),
        )
        index = slots if per_page == page_size else slots // page_size * per_page + slots % page_size
    at = torch.from_numpy(np.ascontiguousarray(index))
    if cache.element_size() == 1:  # index_select knows no float8
        return flat.view(torch.uint8).index_select(0, at).view(cache.dtype).to(torch.float64).numpy()
    return flat.detach().index_select(0, at).to(torch.float64).numpy()
