"""What FlashInfer's kernels compute: numbers for the spans that they read, and how rows end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fakes import attend as numbers
from fakes import releases
from fakes.flashinfer import staging
from fakes.flashinfer.plans import Plan
from fakes.recorder import Attended, Call, Span, reads_foreign

SENTINEL = -5.0e4
"""Log2-sum-exp of a row without keys before 0.7.2: the masked score, which is finite there."""

LN2 = math.log(2.0)

_TILE_Q = {64: 192}
_TILE_KV_PAGED = {64: 96, 128: 96, 256: 32}


@dataclass(slots=True)
class Launch:
    """One kernel launch, frozen: all that a captured graph would keep. Tensors are read when it executes.

    `effective_window`, `soft_cap`, `scale` are what the compiled kernel makes of the run's arguments;
    `tile_window` is a window that only shifts where tiles begin (a kernel built without one).
    """

    plan: Plan
    call: Call | None
    layout: str
    page_size: int
    causal: bool
    window_left: int
    soft_cap: float
    scale: float
    k_scale: float = 1.0
    v_scale: float = 1.0
    q_scale: float = 1.0
    tile_window: int = -1
    blind: bool = False
    """The compiled window hides every key (fa3 built with a window, run without)."""
    zeroed: bool = False
    """Rows that no tile computes hold zeros, not what was there."""
    custom: Any = None


def execute(
    launch: Launch,
    spans: Sequence[Span],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    custom: list[np.ndarray] | None = None,
) -> None:
    """Attend the spans and write `out` and `lse` (host aliases), as the planned kernel would."""
    plan = launch.plan
    staging.ran(plan.staged, out, lse)
    rows = out.shape[0]
    if custom is not None and launch.window_left >= 0:
        custom = [
            mask & windowed(len(mask), mask.shape[1], launch.window_left, causal=False) for mask in custom
        ]
    missing = max((span.q_end for span in spans), default=0) - q.shape[0]
    if missing > 0:  # rows past the end of q: their results lie outside of `out`, too
        q = torch.cat((q, q.new_zeros(missing, *q.shape[1:])))
    if launch.call is not None:
        launch.call.attended = Attended(
            q,
            k,
            v,
            launch.layout,
            launch.page_size,
            tuple(spans),
            launch.causal and custom is None,
            launch.window_left,
            -1,
            launch.soft_cap,
            launch.scale * launch.q_scale,
            None if custom is None else tuple(custom),
            launch.k_scale,
            launch.v_scale,
        )
    seen = custom
    if launch.tile_window >= 0 or launch.blind:
        seen = _tile_masks(launch, spans, q.shape[1] // _kv_heads(k, launch.layout), custom)
    elif _ends_early(launch):
        seen = _reached(launch, spans, q.shape[1] // _kv_heads(k, launch.layout), custom)
    exact, exact_lse = numbers.attend(
        q,
        k,
        v,
        spans,
        layout=launch.layout,
        scale=launch.scale * launch.q_scale,
        causal=launch.causal,
        window_left=launch.window_left,
        soft_cap=launch.soft_cap,
        custom=seen,
        k_scale=launch.k_scale,
        v_scale=launch.v_scale,
    )
    exact_lse /= LN2
    _end_empty_rows(launch, spans, seen, v, exact, exact_lse)
    _drop_uncut(launch, spans, exact, exact_lse, _kv_heads(k, launch.layout))
    exact, exact_lse = _placed(plan, spans, exact, exact_lse)
    if missing > 0:
        exact, exact_lse = exact[:rows].copy(), exact_lse[:rows].copy()
    idle: np.ndarray | None = None
    if numbers.uncovered(spans, rows) is not None:
        idle = np.asarray(np.isnan(exact_lse).all(axis=1))
    if idle is not None and launch.zeroed:
        exact[idle] = 0.0
        idle = None
    numbers.rounded(exact, out.dtype, out, idle)
    if lse is not None:
        numbers.rounded(exact_lse, torch.float32, lse, idle)


def _kv_heads(k: torch.Tensor, layout: str) -> int:
    return k.shape[2] if layout == "NHD" else k.shape[1]


def _end_empty_rows(
    launch: Launch,
    spans: Sequence[Span],
    masks: Sequence[np.ndarray] | None,
    v: torch.Tensor,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Before 0.7.2 masked scores are finite: empty rows end in a sentinel, and fa3 averages its tiles."""
    if not lse.size or np.isfinite(lse.sum()) or releases.at_least("flashinfer", "0.7.2"):
        return  # neither -inf nor NaN anywhere
    if not np.isneginf(lse).any():
        return
    lonely = np.isneginf(lse[:, 0])
    lse[np.isneginf(lse)] = SENTINEL
    if launch.plan.kernel != "fa3" or not (launch.causal or launch.blind):
        return
    dim = v.shape[-1]
    tile_q = _TILE_Q.get(dim, 128)
    tile_kv = _TILE_KV_PAGED.get(dim, 96)
    if launch.layout == "ragged":
        tile_kv = 128 if dim in (64, 128) else 64
    cap = launch.soft_cap if launch.soft_cap > 0 else launch.scale * launch.q_scale
    for span in spans:
        count, length = span.q_end - span.q_start, len(span.slots)
        if not lonely[span.q_start : span.q_end].any() or not length:
            continue
        # a ragged tile is loaded whole: past the request's end it holds the rows that follow in memory
        slots = span.slots
        if launch.layout == "ragged":
            slots = np.arange(slots[0], min(v.shape[0], slots[0] + -(-length // tile_kv) * tile_kv))
        values = np.cumsum(numbers.gather(v, slots, launch.layout), axis=0) * launch.v_scale
        for row in range(count):
            at = span.q_start + row
            if not lonely[at]:
                continue
            reach = -(-length // tile_kv)
            if launch.causal:
                reach = min(reach, -(-((row // tile_q + 1) * tile_q + length - count) // tile_kv))
            if reach <= 0:
                continue
            columns = reach * tile_kv
            mean = values[min(columns, len(slots)) - 1] / columns
            out[at] = np.repeat(mean, out.shape[1] // mean.shape[0], axis=0)
            lse[at] = SENTINEL * cap / LN2 + math.log2(columns)


def windowed(count: int, length: int, window_left: int, *, causal: bool) -> np.ndarray:
    """What `count` rows see of `length` keys, bool `[count, length]`; `window_left` -1: no window."""
    own = np.arange(count)[:, None] + length - count
    key = np.arange(length)[None, :]
    seen = key <= own if causal else np.ones((count, length), dtype=np.bool_)
    return seen & (key >= own - window_left) if window_left >= 0 else seen


def _tile_masks(
    launch: Launch, spans: Sequence[Span], group: int, custom: Sequence[np.ndarray] | None
) -> list[np.ndarray]:
    """What is seen where a window only moves the first key of a tile, or hides everything."""
    masks = []
    for i, span in enumerate(spans):
        count, length = span.q_end - span.q_start, len(span.slots)
        seen = windowed(count, length, -1, causal=launch.causal) if custom is None else custom[i]
        key = np.arange(length)[None, :]
        if launch.blind:
            seen = seen & (key > np.arange(count)[:, None] + length - count)
        else:
            first = _tile_starts(launch, count, group) + length - count - launch.tile_window
            seen = seen & (key >= first[:, None])
        masks.append(seen)
    return masks


def _tile_starts(launch: Launch, count: int, group: int) -> np.ndarray:
    """For each row of a request the first row of its tile."""
    tile = launch.plan.schedule().tile_rows
    return np.arange(count) * group // tile * tile // group


def _ends_early(launch: Launch) -> bool:
    """Whether a windowed plan's chunks, which begin at a tile's first visible key, may end before the last one."""
    plan = launch.plan
    return plan.kernel == "fa2" and launch.window_left >= 0 and _cut_otherwise(plan, launch.page_size)


def _reached(
    launch: Launch, spans: Sequence[Span], group: int, custom: Sequence[np.ndarray] | None
) -> list[np.ndarray] | None:
    """What rows see of the keys that their tile's chunks reach; `custom` where that is all of them."""
    schedule = launch.plan.schedule()
    chunk = schedule.chunk_tokens
    pairs = list(zip(spans, schedule.chunks, strict=False))
    if chunk is None or all(
        max(len(s.slots) - (s.q_end - s.q_start) - launch.window_left, 0) + chunks * chunk >= len(s.slots)
        for s, chunks in pairs
    ):
        return None if custom is None else list(custom)
    masks = []
    for i, (span, chunks) in enumerate(pairs):
        count, length = span.q_end - span.q_start, len(span.slots)
        first = _tile_starts(launch, count, group) + length - count - launch.window_left
        reach = np.maximum(first, 0) + chunks * chunk
        plain = windowed(count, length, launch.window_left, causal=launch.causal)
        seen = plain if custom is None else custom[i]
        masks.append(seen & (np.arange(length)[None, :] < reach[:, None]))
    return masks


def _drop_uncut(
    launch: Launch, spans: Sequence[Span], out: np.ndarray, lse: np.ndarray, num_kv_heads: int
) -> None:
    """Heads and packed rows that the plan made no tile for are not computed; split ones are merged all the same."""
    plan = launch.plan
    blank = 0.0 if launch.zeroed else np.nan
    num_qo_heads = out.shape[1]
    if plan.kernel == "fa3":
        if num_qo_heads > plan.num_qo_heads:
            out[:, plan.num_qo_heads :] = blank
            lse[:, plan.num_qo_heads :] = np.nan
        return
    group = num_qo_heads // num_kv_heads
    if plan.kernel == "cuda_core" or (not plan.graph and group <= plan.num_qo_heads // plan.num_kv_heads):
        return
    schedule = plan.schedule()
    for tiles, span in zip(schedule.tiles, spans, strict=False):
        count = span.q_end - span.q_start
        cut = tiles * schedule.tile_rows
        if cut >= count * group:
            continue
        if plan.scratch:
            reads_foreign("rows that no tile computed are merged from what the float workspace holds")
        packed = np.arange(count)[:, None] * group + np.arange(num_qo_heads)[None, :] % group
        rows = slice(span.q_start, span.q_end)
        out[rows][packed >= cut] = blank
        lse[rows][packed >= cut] = np.nan


def _placed(
    plan: Plan, spans: Sequence[Span], out: np.ndarray, lse: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """fa2 writes a request's rows where the plan's own running count of rows puts them."""
    if plan.kernel != "fa2":
        return out, lse
    starts = [a - plan.qo[0] for a in plan.qo]
    if all(span.q_start == start for span, start in zip(spans, starts, strict=False)):
        return out, lse
    moved, moved_lse = np.full_like(out, np.nan), np.full_like(lse, np.nan)
    for span, start in zip(spans, starts, strict=False):
        count = min(span.q_end - span.q_start, len(out) - start)
        if count > 0:
            moved[start : start + count] = out[span.q_start : span.q_start + count]
            moved_lse[start : start + count] = lse[span.q_start : span.q_start + count]
    return moved, moved_lse


def chunk_limits(plan: Plan, page_size: int) -> list[int] | None:
    """Tokens of each request that the plan's chunks reach; None where they reach all of them for certain.

    A windowed tensor-core plan's chunks begin at each tile's first visible key: `execute` cuts those.
    """
    if not _cut_otherwise(plan, page_size) or (plan.windowed and plan.kernel == "fa2"):
        return None
    schedule = plan.schedule()
    if schedule.chunk_tokens is None:
        return None
    return [n * schedule.chunk_tokens for n in schedule.chunks]


def _cut_otherwise(plan: Plan, page_size: int) -> bool:
    """Whether KV was split for other lengths or pages than the run may have."""
    return plan.kernel != "fa3" and (plan.graph or page_size != plan.page_size) and plan.may_split()
