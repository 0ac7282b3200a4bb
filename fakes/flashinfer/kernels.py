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
from fakes.flashinfer import cutting, loads, staging
from fakes.flashinfer.plans import Plan
from fakes.loaded import Range, merged_without_nan, without_unloaded
from fakes.modes import illegal_access
from fakes.recorder import Attended, Call, Span, reads_foreign

SENTINEL = -5.0e4
"""Log2-sum-exp of a row without keys before 0.7.2: the masked score, which is finite there."""

LN2 = math.log(2.0)


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

    @property
    def first_window(self) -> int:
        """Keys before a tile's first row at which the kernel begins, -1: all."""
        return max(self.window_left, self.tile_window)


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
    plan, given = launch.plan, (q, k, v)
    staging.ran(plan.staged, out, lse)
    rows = out.shape[0]
    if custom is not None and launch.window_left >= 0:
        custom = [mask & numbers.seen(len(mask), mask.shape[1], launch.window_left, -1) for mask in custom]
    if not q.shape[0] and any(span.q_end > span.q_start for span in spans):
        raise illegal_access("q has no rows, so its address is null")
    missing = max([span.q_end for span in spans], default=0) - q.shape[0]
    behind = launch.layout != "ragged" and _behind(spans, k, launch.layout)
    if missing > 0:  # rows past the end of q: their results lie outside of `out`, too
        if plan.kernel == "fa2" and plan.scratch:
            reads_foreign(
                f"row {rows} is merged behind out, which has {rows} rows: where lse may lie, in any order"
            )
        q = torch.cat((q, q.new_zeros(missing, *q.shape[1:])))
    if launch.call is not None:
        launch.call.attended = Attended(
            q,
            k,
            v,
            launch.layout,
            launch.page_size,
            _within(spans, k, launch.layout) if behind else tuple(spans),
            launch.causal and custom is None,
            launch.window_left,
            -1,
            launch.soft_cap,
            launch.scale * launch.q_scale,
            None if custom is None else tuple(custom),
            launch.k_scale,
            launch.v_scale,
        ).kept()
    if behind:
        k, v = _with_stand_in(launch, k, v)
    group = q.shape[1] // _kv_heads(k, launch.layout)
    cutting.check_starts(plan, spans, group, launch.first_window, causal=launch.causal and custom is None)
    seen = cutting.masks(
        plan,
        spans,
        custom,
        page_size=launch.page_size,
        group=group,
        causal=launch.causal,
        window_left=launch.window_left,
        tile_window=launch.tile_window,
        blind=launch.blind,
    )
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
    if np.isnan(exact.sum()):

        def again(i: int, rows: slice, keys: Range) -> tuple[np.ndarray, np.ndarray]:
            span, visible = spans[i], None if seen is None else seen[i]
            if visible is None:
                rows_and_keys = span.q_end - span.q_start, len(span.slots)
                visible = numbers.seen(*rows_and_keys, launch.window_left, 0 if launch.causal else -1)
            return numbers.attend(
                q[span.q_start + rows.start : span.q_start + rows.stop],
                k,
                v,
                (Span(0, rows.stop - rows.start, span.slots[slice(*keys)]),),
                layout=launch.layout,
                scale=launch.scale * launch.q_scale,
                soft_cap=launch.soft_cap,
                custom=[visible[rows, ..., slice(*keys)]],
                k_scale=launch.k_scale,
                v_scale=launch.v_scale,
            )

        window = launch.first_window
        if launch.layout != "ragged":
            without_unloaded(
                spans,
                exact,
                exact_lse,
                group=group,
                ranges=lambda span: loads.ranges(
                    plan, span, group=group, causal=launch.causal, window=window
                ),
                again=again,
            )
        if releases.at_least("flashinfer", "0.7.2"):
            # from then on partial results are merged by the larger of NaN and -inf
            merged_without_nan(
                spans, exact_lse, chunks=lambda span: loads.chunks(plan, span, window), again=again
            )
    exact_lse /= LN2
    _end_empty_rows(launch, spans, seen, v, exact, exact_lse)
    dropped = cutting.drop_uncut(plan, spans, exact, exact_lse, group, 0.0 if launch.zeroed else np.nan)
    exact, exact_lse, written = cutting.placed(plan, spans, exact, exact_lse, rows, group)
    if missing > 0:
        exact, exact_lse = exact[:rows].copy(), exact_lse[:rows].copy()
    idle = None if written is None else ~written
    if dropped:
        none = np.asarray(np.isnan(exact_lse).all(axis=1))
        idle = none if idle is None else idle | none
    if idle is not None and launch.zeroed:
        exact[idle] = 0.0
        exact_lse[idle] = np.nan
        idle = None
    numbers.rounded(exact, out.dtype, out, idle, of=given)
    if lse is not None:
        numbers.rounded(exact_lse, torch.float32, lse, idle, of=given)


def _kv_heads(k: torch.Tensor, layout: str) -> int:
    return k.shape[2] if layout == "NHD" else k.shape[1]


def _pool_slots(k: torch.Tensor, layout: str) -> int:
    return k.shape[0] * k.shape[1 if layout == "NHD" else 2]


def _behind(spans: Sequence[Span], k: torch.Tensor, layout: str) -> bool:
    """Whether keys behind the last page id are read: `spans.paged` gives them the first slot behind the pool."""
    total = _pool_slots(k, layout)
    return any(len(span.slots) and span.slots[-1] == total for span in spans)


def _within(spans: Sequence[Span], k: torch.Tensor, layout: str) -> tuple[Span, ...]:
    """Spans whose keys behind the last page id are the pool's first slot, which is about what is read for them."""
    total = _pool_slots(k, layout)
    return tuple(
        Span(span.q_start, span.q_end, np.where(span.slots == total, 0, span.slots)) for span in spans
    )


def _with_stand_in(launch: Launch, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool with one page more, for keys behind the last page id: every load of them starts at the pool's address.

    CUDA cores load a row of the first KV head there. Each thread of fa2 loads the first 16 bytes of its block of eight
    such loads, so eight loads repeat.
    """
    pools: list[torch.Tensor] = []
    for pool in (k, v):
        row = pool[0, 0, 0]
        if launch.plan.kernel == "fa2":
            load = 16 // pool.element_size()
            blocks = row.reshape(-1, min(8 * load, len(row)))
            row = blocks[:, :load].repeat(1, blocks.shape[1] // load).reshape(-1)
        pools.append(torch.cat((pool, row.expand(1, *pool.shape[1:]))))
    return pools[0], pools[1]


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
    if launch.plan.kernel == "cuda_core" and launch.window_left >= 0 and launch.plan.is_cut:
        schedule = launch.plan.schedule()
        for span, chunks in zip(spans, schedule.chunks, strict=False):
            length = min(len(span.slots), chunks * (schedule.chunk_tokens or len(span.slots)))
            if length and lonely[span.q_start]:
                weight = cutting.blinded_decode(launch.plan, length)
                values = numbers.gather(v, span.slots[:length], launch.layout)
                mean = values.sum(axis=0) * launch.v_scale / weight
                out[span.q_start] = np.repeat(mean, out.shape[1] // mean.shape[0], axis=0)
                lse[span.q_start] = SENTINEL + math.log2(weight)
        return
    if launch.plan.kernel != "fa3" or not (launch.causal or launch.blind):
        return
    dim = v.shape[-1]
    tile_q = loads.FA3_ROWS.get(dim, 128)
    tile_kv = loads.FA3_KEYS.get(dim, 96)
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
