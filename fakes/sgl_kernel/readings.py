"""How FlashAttention 3 reads its index arrays, whatever they hold, and what strict mode says about them."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from fakes import cuda, modes
from fakes.recorder import reads_foreign
from fakes.sgl_kernel import tiles
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.findings import find, strict
from fakes.sgl_kernel.pages import Keys, paged_slots


def query_bounds(args: Forward, shape: Shape, rows: int) -> list[tuple[int, int]]:
    """First row and row after the last of each request.

    Raises:
        UndefinedRead: the array leads out of q.
        RuntimeError: it falls by a tile: the scheduler counts less than no tiles. Measured on an H200 with
            sglang-kernel 0.4.6, head dim 128, as packed rows: 93 and less do no harm, 140 and more crash.
    """
    if args.cu_seqlens_q is None:
        step = shape.seqlen_q
        return [(i * step, (i + 1) * step) for i in range(shape.batch)]
    edges = cuda.host(args.cu_seqlens_q).numpy().tolist()
    if strict():
        _check_edges("cu_seqlens_q", edges, rows, "q")
        longest = max((b - a for a, b in pairwise(edges)), default=0)
        if shape.seqlen_q < longest:
            find(
                "fa.max_seqlen_q.short",
                "max_seqlen_q",
                f"max_seqlen_q is {shape.seqlen_q}, the longest request has {longest} rows: the mask is "
                "simplified by what it says",
            )
    starts, stops = edges[:-1], edges[1:]
    if args.seqused_q is not None:
        used = cuda.host(args.seqused_q).numpy().tolist()
        stops = [start + count for start, count in zip(starts, used, strict=True)]
    group = shape.heads // shape.heads_k
    for index, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        if (start - stop) * group >= tiles.rows_of(shape):
            raise modes.illegal_access(f"cu_seqlens_q gives request {index} {stop - start} rows")
        if stop > start and (start < 0 or stop > rows):
            raise modes.UndefinedRead(
                f"cu_seqlens_q gives request {index} the rows {start} to {stop - 1}, q has {rows}"
            )
    bounds = [(start, max(start, stop)) for start, stop in zip(starts, stops, strict=True)]
    if any(after[0] < before[1] for before, after in pairwise(bounds)):
        ordered = sorted(bound for bound in bounds if bound[0] < bound[1])
        if any(after[0] < before[1] for before, after in pairwise(ordered)):
            reads_foreign("two requests write the same rows: the later one stays")
    return bounds


def key_lengths(args: Forward, shape: Shape) -> np.ndarray:
    """Keys of each request before any are appended, int64 `[batch]`; the kernel takes less than 0 for 0."""
    if args.seqused_k is not None:
        lens = cuda.host(args.seqused_k).numpy().astype(np.int64)
    elif args.cu_seqlens_k is not None:
        lens = np.diff(cuda.host(args.cu_seqlens_k).numpy().astype(np.int64))
    else:
        return np.full(shape.batch, shape.seqlen_k, dtype=np.int64)
    if len(lens) and lens.min() < 0:
        if args.seqused_k is not None:
            for index in np.flatnonzero(lens < 0).tolist():
                message = f"{args.lens_name}[{index}] is {lens[index]}, must not be negative"
                find("fa.lengths.negative", args.lens_name, message, index)
        lens = np.maximum(lens, 0)
    return lens


def planned_lengths(args: Forward, shape: Shape, lens: np.ndarray) -> None:
    """Strict: the scheduler's metadata must have been made for these lengths, and for no more splits than the call has.

    Splits: read of a public report (vllm#20301), not measured.
    """
    if args.scheduler_metadata is None or not strict():
        return
    at = -(-shape.batch // 4) * 4
    held = cuda.host(args.scheduler_metadata).numpy()
    planned = held[at : at + shape.batch]
    if 0 < args.num_splits < held[0]:
        find(
            "fa.scheduler_metadata.splits",
            "num_splits",
            f"scheduler_metadata was made for {held[0]} splits, this call has room for {args.num_splits}: the parts of "
            "the others are read and written outside of it",
            kind="order",
        )
    if (planned != lens).any():
        find(
            "fa.scheduler_metadata.stale",
            "scheduler_metadata",
            f"scheduler_metadata was made for lengths {planned.tolist()}, this call has {lens.tolist()}",
            kind="order",
        )


def keys(args: Forward, shape: Shape, lens: np.ndarray) -> Keys:
    """Where the keys of every request are read."""
    if args.page_table is not None:
        return _paged(args, args.page_table, lens)
    if args.cu_seqlens_k is not None:
        return _ragged(args, args.cu_seqlens_k, lens)
    return _dense(args, shape, lens)


def _paged(args: Forward, table: torch.Tensor, lens: np.ndarray) -> Keys:
    rows = None
    if args.kv_batch_idx is not None:
        rows = _batch_rows(args.kv_batch_idx, table.shape[0], "rows of page_table")
    return paged_slots(
        table,
        lens,
        args.k.shape[1],
        args.k.shape[0],
        rule="fa",
        name="page_table",
        lens_name=args.lens_name,
        rows=rows,
        appended="" if args.k_new is None else " with what is appended",
    )


def _dense(args: Forward, shape: Shape, lens: np.ndarray) -> Keys:
    """One row of the cache per request: a page as long as the cache is."""
    size = args.k.shape[1]
    rows = np.arange(shape.batch)
    if args.kv_batch_idx is not None:
        rows = _batch_rows(args.kv_batch_idx, args.k.shape[0], "rows of the cache")
    found = Keys("NHD", size, [])
    for index, (row, length) in enumerate(zip(rows.tolist(), lens.tolist(), strict=True)):
        found.slots.append(np.arange(row * size, row * size + length))
        if length > size:
            found.lost.add(index)
            message = f"{args.lens_name}[{index}] is {length}, the cache holds {size} tokens a request"
            find("fa.lengths.capacity", args.lens_name, message, index)
    return found


def _batch_rows(kv_batch_idx: torch.Tensor, count: int, what: str) -> np.ndarray:
    rows = cuda.host(kv_batch_idx).numpy().astype(np.int64)
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise modes.UndefinedRead(f"cache_batch_idx is {rows.tolist()}, there are {count} {what}")
    return rows


def _ragged(args: Forward, cu_seqlens_k: torch.Tensor, lens: np.ndarray) -> Keys:
    edges = cuda.host(cu_seqlens_k).numpy().tolist()
    total = args.k.shape[0]
    if strict():
        _check_edges("cu_seqlens_k", edges, total, "k")
    found = Keys("ragged", 1, [])
    for start, length in zip(edges[:-1], lens.tolist(), strict=True):
        slots = np.arange(start, start + length)
        if length and (start < 0 or start + length > total):  # loads know how many rows k has
            slots = np.where((slots < 0) | (slots >= total), total, slots)
            found.zeros = 1
        found.slots.append(slots)
    return found


def _check_edges(name: str, edges: list[int], rows: int, what: str) -> None:
    """Strict: an array of running sums starts at 0, does not fall, and ends at the last row."""
    if edges[0] != 0:
        find(f"fa.{name}.start", name, f"{name}[0] is {edges[0]}, must be 0: is the leading 0 missing?")
    for index, (before, after) in enumerate(pairwise(edges)):
        if after < before:
            message = (
                f"{name}[{index + 1}] is {after}, below {name}[{index}], which is {before}: it must not fall"
            )
            find(f"fa.{name}.falls", name, message, index)
    if edges[-1] != rows:
        fate = "the rows behind are not used" if edges[-1] < rows else "rows behind the last are read"
        find(f"fa.{name}.rows", name, f"{name}[-1] is {edges[-1]}, {what} has {rows} rows: {fate}")
