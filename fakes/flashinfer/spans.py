"""Which slots each request's rows attend to, by the kernels' arithmetic on the arrays in memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from fakes.flashinfer import cutting, loads
from fakes.flashinfer.arrays import first, words
from fakes.flashinfer.plans import Plan
from fakes.modes import UndefinedRead
from fakes.modes import outside as outside_of
from fakes.recorder import Span, reads_foreign

_NOTHING = np.empty(0, dtype=np.int64)


def paged(
    plan: Plan,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *,
    page_size: int,
    num_pages: int,
    num_rows: int,
    slot_bytes: int,
    window: int = -1,
) -> tuple[Span, ...]:
    """Spans of a paged call. `qo_indptr` None: one row per request (CUDA-core decode).

    A request has (pages - 1) * page_size + last tokens, or none without pages. fa3 takes lengths and offsets
    from the plan instead. Token t of request i lies in page `indices[kv_indptr[i] + t // page_size]`; past the last
    entry of kv_indptr, fa2 and CUDA cores load from the pool's address (here the first slot behind the pool), fa3
    goes on reading `indices`. A request without rows reads nothing.
    `slot_bytes`: from slot to slot of the pool. `window`: keys before a tile's first row at which kernels begin.

    Raises:
        UndefinedRead: an entry past the end of `indices`, or a page outside of the pool.
        WouldHang: chunks were planned behind the last key.
        RuntimeError: a page too far away to find any memory, as CUDA words it.
    """
    kv, pages, last = words(kv_indptr), words(indices), words(last_page_len)
    qo = None if qo_indptr is None else words(qo_indptr)
    key = (
        None if qo is None else qo.tobytes(),
        kv.tobytes(),
        pages.tobytes(),
        last.tobytes(),
        page_size,
        num_pages,
        num_rows,
        window,
    )
    if plan.read is not None and plan.read[0] == key:
        return plan.read[1]
    batch = plan.batch_size
    fa3 = plan.kernel == "fa3"
    if fa3:
        rows, starts, lens = plan.qo, plan.kv, plan.kv_lens or []
        end = None
    else:
        rows = list(range(batch + 1)) if qo is None else first(qo, batch + 1, "qo_indptr")
        starts = first(kv, batch + 1, "paged_kv_indptr")
        tails = first(last, batch, "paged_kv_last_page_len")
        lens = [
            0 if b == a else (b - a - 1) * page_size + tail
            for a, b, tail in zip(starts, starts[1:], tails, strict=False)
        ]
        last_entry = num_rows if plan.kernel == "cuda_core" else kv_indptr.shape[0] - 1
        if plan.kernel == "cuda_core" and plan.scratch and num_rows > batch:
            reads_foreign(f"results of {num_rows} rows are merged, the plan says where those of {batch} are")
        if last_entry < kv.size:
            end = int(kv[last_entry]) * page_size
        else:
            end = starts[-1] * page_size
            reads_foreign(
                f"paged_kv_indptr[{last_entry}] bounds the page ids that are read, the array has {kv.size} entries"
            )
    if page_size == 1:
        slots = pages.astype(np.int64)
    else:
        slots = (pages.astype(np.int64)[:, None] * page_size + np.arange(page_size)).reshape(-1)
    counts = [b - a for a, b in pairwise(rows)]
    limits = cutting.reach(plan, page_size, counts, lens, window)
    total = num_pages * page_size
    strange = slots.size and (int(slots.min()) < 0 or int(slots.max()) >= total)
    spans: list[Span] = []
    for i in range(batch):
        begin, length = starts[i] * page_size, lens[i]
        if limits is not None:
            length = min(length, limits[i])
        if length < 0 or begin < 0 or counts[i] < 0:
            _wraps(plan, i)
            spans.append(Span(rows[i], rows[i], _NOTHING))
            continue
        stop = begin + length
        own = stop if end is None else min(stop, end)
        if own > slots.size and length:
            if not counts[i]:
                spans.append(Span(rows[i], rows[i], _NOTHING))
                continue
            raise UndefinedRead(
                f"paged_kv_indices[{pages.size}] is read for request {i}, but the array has {pages.size} "
                "entries"
            )
        span = slots[begin:own]
        if strange:
            span = _in_pool(plan, i, span, counts[i], lens[i], window, (page_size, num_pages, slot_bytes))
        if stop > own:
            span = np.concatenate((span, np.full(stop - max(begin, own), total)))
        spans.append(Span(rows[i], rows[i + 1], span if length else _NOTHING))
    result = tuple(spans)
    plan.read = (key, result)
    return result


def ragged(
    plan: Plan,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    num_tokens: int,
    window: int = -1,
) -> tuple[Span, ...]:
    """Spans of a ragged call: request i's keys are rows kv_indptr[i] .. kv_indptr[i + 1] of k and v.

    fa3 finds zeros past the end of k: its loads know how many rows there are.

    Raises:
        UndefinedRead: fa2 reads rows past the end of k.
    """
    batch = plan.batch_size
    if plan.kernel == "fa3":
        rows, starts = plan.qo, plan.kv
        stops = [a + n for a, n in zip(starts, plan.kv_lens or [], strict=False)]
    else:
        rows = first(words(qo_indptr), batch + 1, "qo_indptr")
        starts = first(words(kv_indptr), batch + 1, "kv_indptr")
        stops = starts[1:]
    counts = [b - a for a, b in pairwise(rows)]
    limits = cutting.reach(plan, 1, counts, [b - a for a, b in zip(starts, stops, strict=False)], window)
    spans: list[Span] = []
    for i in range(batch):
        begin, stop = starts[i], stops[i]
        if limits is not None:
            stop = min(stop, begin + limits[i])
        if stop < begin or counts[i] < 0:
            _wraps(plan, i)
            spans.append(Span(rows[i], rows[i], _NOTHING))
            continue
        if stop > begin and (stop > num_tokens or begin < 0) and plan.kernel != "fa3":
            if not counts[i]:
                spans.append(Span(rows[i], rows[i], _NOTHING))
                continue
            raise UndefinedRead(f"request {i} reads rows {begin} to {stop - 1} of k, which has {num_tokens}")
        spans.append(Span(rows[i], rows[i + 1], np.arange(begin, stop)))
    return tuple(spans)


def _wraps(plan: Plan, i: int) -> None:
    """A request with less than no rows or keys, of which the planner saw others: as unsigned numbers they are huge."""
    if plan.kernel == "cuda_core" or plan.qo[i + 1] > plan.qo[i]:
        reads_foreign(f"request {i} has less than no rows or keys on the device: its lengths wrap")


def _in_pool(
    plan: Plan, i: int, slots: np.ndarray, count: int, length: int, window: int, pool: tuple[int, int, int]
) -> np.ndarray:
    """The slots of request i; those that its kernel does not load may lie elsewhere, and become 0.

    `count`: its rows. `pool`: page size, pages, bytes from slot to slot.

    Raises:
        UndefinedRead, RuntimeError: what it loads lies elsewhere.
    """
    page_size, num_pages, slot_bytes = pool
    outside = (slots < 0) | (slots >= page_size * num_pages)
    if not outside.any():
        return slots
    span = Span(0, count, np.zeros(length, dtype=np.int64))
    first = min((a for a, _ in loads.ranges(plan, span, group=1, causal=False, window=window)), default=0)
    loaded = slots[first:] if count else _NOTHING
    strange = loaded[(loaded < 0) | (loaded >= page_size * num_pages)]
    if strange.size:
        far = max(-int(strange.min()), int(strange.max()) - num_pages * page_size) * slot_bytes
        raise outside_of(
            far, f"request {i} reads page {int(strange[0]) // page_size} of a pool of {num_pages} pages"
        )
    return np.where(outside, 0, slots)
