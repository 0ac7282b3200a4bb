"""What of a run the tiles and chunks of its plan compute, where they were made for something else.

Planners cut rows into tiles and keys into chunks by the lengths, heads, pages and window that they are told; kernels
count the chunks once more, by what lies on the device. Where both agree, all is computed and nothing here matters.
Source: `prefill.cuh`, `decode.cuh` and `scheduler.cuh` of flashinfer-python 0.6.6; the same in 0.7.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fakes import attend
from fakes.flashinfer.loads import keys_at_once
from fakes.flashinfer.plans import Plan
from fakes.flashinfer.schedule import decode_step
from fakes.modes import WouldHang
from fakes.recorder import Span, reads_foreign


def otherwise(plan: Plan, page_size: int, lens: Sequence[int], window: int) -> bool:
    """Whether KV was split for other lengths, pages or another window than a run has.

    `lens`: keys of each request. `window`: keys before the tile's first row at which the kernel begins, -1: all.
    """
    if plan.kernel == "fa3" or not plan.may_split():
        return False
    pages = [b - a for a, b in pairwise(plan.kv)]
    if min(pages, default=0) < 0:
        return False  # no schedule follows from that
    if page_size != plan.page_size or (plan.kernel == "fa2" and window != max(plan.window_left, -1)):
        return True
    return any(-(-n // page_size) != count for n, count in zip(lens, pages, strict=False))


def reach(
    plan: Plan, page_size: int, counts: Sequence[int], lens: Sequence[int], window: int
) -> list[int] | None:
    """Tokens of each request that the plan's chunks reach; None where they reach all of them.

    With a window, chunks begin at a tile's first visible key (fa2), or end before it (CUDA cores): then None, and
    `masks` says what is seen. `counts`: rows of each request.

    Raises:
        WouldHang: a chunk begins behind the last key, and its length wraps.
    """
    if not otherwise(plan, page_size, lens, window):
        return None
    schedule = plan.schedule()
    chunk = schedule.chunk_tokens
    if chunk is None:
        return None
    for i, (length, chunks) in enumerate(zip(lens, schedule.chunks, strict=False)):
        if plan.kernel == "cuda_core":
            behind = (chunks - 1) * chunk - length
            if behind >= decode_step(plan.head_dim, plan.num_qo_heads // plan.num_kv_heads):
                raise WouldHang(
                    f"the last chunk that was planned for request {i} begins {behind} keys behind its last key: its "
                    f"length is {(1 << 32) - behind}"
                )
            continue
        seen = length if window < 0 else min(length, window + schedule.tile_rows)
        if counts[i] > 1 and -(-max(seen, 1) // chunk) != chunks:
            reads_foreign(
                f"request {i} was split into {chunks} chunks, the kernel counts {-(-max(seen, 1) // chunk)}: partial "
                "results are not where they are merged"
            )
    return None if window >= 0 else [n * chunk for n in schedule.chunks]


def check_starts(plan: Plan, spans: Sequence[Span], group: int, window: int, *, causal: bool) -> None:
    """Whether every tile of fa2 that was planned for a larger group begins within its request's keys.

    Behind them its length wraps, unless KV is split; the count of its steps wraps back if that is less than one step.
    `group`: query heads of a KV head, `window`: keys before a tile's first row at which it begins, -1: all.

    Raises:
        WouldHang: one begins further behind.
    """
    if plan.kernel != "fa2" or window < 0 or causal or plan.scratch or not plan.is_cut:
        return
    schedule = plan.schedule()
    for i, (tiles, span) in enumerate(zip(schedule.tiles, spans, strict=False)):
        behind = (tiles - 1) * schedule.tile_rows // group - (span.q_end - span.q_start) - window
        if behind >= keys_at_once(schedule.tile_rows, plan.head_dim):
            raise WouldHang(
                f"the last tile that was planned for request {i} begins {behind} keys behind its last key: it has "
                f"{(1 << 32) - behind} keys"
            )


def masks(
    plan: Plan,
    spans: Sequence[Span],
    custom: Sequence[np.ndarray] | None,
    *,
    page_size: int,
    group: int,
    causal: bool,
    window_left: int,
    tile_window: int = -1,
    blind: bool = False,
) -> list[np.ndarray] | None:
    """What is seen where chunks, tiles or a window that hides everything decide; `custom` where they do not.

    Bool `[qo_len, kv_len]` of each span; `[qo_len, group, kv_len]` where a tile ends among the heads of a row.

    Args:
        plan: that the run executes.
        spans: requests.
        custom: one bool `[qo_len, kv_len]` a span, in place of `causal`.
        page_size: of the cache.
        group: query heads of a KV head.
        causal: whether rows see no later keys.
        window_left: of the compiled kernel, -1: none.
        tile_window: a window that only moves the first key of a tile.
        blind: the compiled window hides every key.
    """
    begin = max(window_left, tile_window)
    lens = [len(span.slots) for span in spans]
    chunk = None
    if begin >= 0 and otherwise(plan, page_size, lens, begin):
        chunk = plan.schedule().chunk_tokens
    if chunk is None and tile_window < 0 and not blind:
        return None if custom is None else list(custom)
    found: list[np.ndarray] = []
    for i, (span, length) in enumerate(zip(spans, lens, strict=True)):
        count = span.q_end - span.q_start
        key = np.arange(length)[None, :]
        seen = attend.seen(count, length, window_left, 0 if causal else -1) if custom is None else custom[i]
        if blind:
            seen = seen & (key > np.arange(count)[:, None] + length - count)
        first = np.zeros((count, 1), dtype=np.int64)
        if plan.kernel == "fa2" and begin >= 0:
            tile = plan.schedule().tile_rows
            starts = (
                np.arange(count * group) // tile * tile // group
            )  # for each packed row its tile's first row
            first = np.maximum(starts + length - count - begin, 0).reshape(count, group)
            if (first == first[:, :1]).all():
                first = first[:, :1]
        per_head = seen[:, None, :]
        if tile_window >= 0:
            per_head = per_head & (key >= first[..., None])
        if chunk is not None:
            per_head = per_head & (key < (first + plan.schedule().chunks[i] * chunk)[..., None])
        found.append(per_head[:, 0] if per_head.shape[1] == 1 else per_head)
    return found


def blinded_decode(plan: Plan, length: int) -> int:
    """Keys that a CUDA-core decode of `length` keys counts where its chunks reach none that its window shows.

    Before 0.7.2 each has the same weight; what a block takes at once behind a chunk's end counts as well.
    """
    schedule = plan.schedule()
    chunk = schedule.chunk_tokens or length
    step = decode_step(plan.head_dim, plan.num_qo_heads // plan.num_kv_heads)
    edges = range(0, length, chunk)
    return sum(-(-min(chunk, length - at) // step) * step for at in edges)


def drop_uncut(
    plan: Plan, spans: Sequence[Span], out: np.ndarray, lse: np.ndarray, group: int, blank: float
) -> bool:
    """Make `blank` what the plan cut no tile for: heads (fa3), packed rows (fa2). Split ones are merged all the same.

    `group`: query heads of a KV head. Returns whether there were such.
    """
    num_qo_heads = out.shape[1]
    if not plan.is_cut:
        return False
    if plan.kernel == "fa3":
        if num_qo_heads < plan.num_qo_heads and any(span.q_end > span.q_start for span in spans):
            reads_foreign(
                f"the plan has work for {plan.num_qo_heads} heads, q has {num_qo_heads}: what heads beyond them give "
                "lands on the next rows"
            )
        out[:, plan.num_qo_heads :] = blank
        lse[:, plan.num_qo_heads :] = np.nan
        return num_qo_heads > plan.num_qo_heads
    if plan.kernel == "cuda_core" or (not plan.graph and group <= plan.num_qo_heads // plan.num_kv_heads):
        return False
    dropped = False
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
        dropped = True
    return dropped


def placed(
    plan: Plan, spans: Sequence[Span], out: np.ndarray, lse: np.ndarray, rows: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Results where fa2 writes them: at the plan's own running count of rows, from 0. Also the rows written, None: all.

    `out`, `lse`: computed, row by row of q. `rows`: of q as it was handed over; rows behind them are foreign.
    """
    edges = [(a - plan.qo[0], b - plan.qo[0]) for a, b in pairwise(plan.qo)]
    merged = plan.qo[-1] if plan.graph else plan.total_rows
    if plan.kernel == "fa2" and plan.scratch and merged > plan.qo[-1] - plan.qo[0]:
        reads_foreign(
            f"partial results of {merged} rows are merged, the plan cut {plan.qo[-1] - plan.qo[0]}: what lies behind "
            "merge_indptr decides"
        )
    if plan.kernel != "fa2" or all(
        (span.q_start, span.q_end) == edge for span, edge in zip(spans, edges, strict=False)
    ):
        free = attend.uncovered(spans, rows)
        return out, lse, None if free is None else ~free
    schedule = plan.schedule()
    moved, moved_lse = np.full_like(out, np.nan), np.full_like(lse, np.nan)
    taken = np.zeros(rows, dtype=np.bool_)
    for span, (start, end), tiles in zip(spans, edges, schedule.tiles, strict=False):
        count = min(span.q_end - span.q_start, -(-tiles * schedule.tile_rows // group))
        if plan.scratch and count < end - start:
            reads_foreign("rows that the kernel does not find are merged from what the float workspace holds")
        if count > max(rows - start, 0):
            reads_foreign(f"row {rows} is written behind out, which has {rows} rows: where lse may lie")
            count = rows - start
        if count <= 0:
            continue
        if span.q_start + count > rows:
            reads_foreign(f"row {rows} of q is read, which has {rows} rows")
        if taken[start : start + count].any():
            reads_foreign("two requests write the same rows")
        taken[start : start + count] = True
        moved[start : start + count] = out[span.q_start : span.q_start + count]
        moved_lse[start : start + count] = lse[span.q_start : span.q_start + count]
    return moved, moved_lse, taken
