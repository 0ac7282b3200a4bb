"""The oracle: paged attention by definition, in float64, over any number of keys.

The ragged stream of keys (request after request) is walked in chunks; each chunk is gathered and converted once, and
every request that has keys in it folds them into the running softmax of its rows.

`reference.library` says which arrays the work is done in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from cases.model import Mask
from reference import masks
from reference.library import Library, library_of
from reference.ragged import WORTH_A_PIECE, Piece, Ragged, chunks, pieces
from reference.softmax import PLAIN_SCORE, RunningSoftmax, block_scores
from reference.state import AttentionState

CPU_CHUNK_BYTES = 4 << 20
"""Of float64 K and V, and of scores, that live at a time: what a core's cache holds."""
GPU_CHUNK_BYTES = 256 << 20
"""The same on a GPU: enough for one kernel to keep all of it busy."""
WORTH_TWO = 1 << 16
"""Pairs of row and key from which on masking all of them costs more than two steps."""


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor | np.ndarray,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    mask: Mask,
    scale: float,
    custom: Sequence[torch.Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    chunk_bytes: int | None = None,
) -> AttentionState:
    """softmax(mask(cap(scale * q . k))) v, in this order, for a ragged batch over a paged cache.

    Query head h reads KV head h // group_size. A masked key has weight 0; NaN and Inf in a listed slot act as IEEE
    arithmetic has it (0 times NaN is NaN), in an unlisted slot never.

    Args:
        q: `[rows, num_qo_heads, head_dim_qk]`, any float dtype and strides; everything runs on its device.
        k_cache: `[num_slots, num_kv_heads, head_dim_qk]`, any float dtype (fp8 included) and strides.
        v_cache: the same with `head_dim_vo`.
        slots: integers `[sum(kv_lens)]`: where each request's keys stand, in order, request after request.
        qo_lens: query rows of each request. kv_lens: its keys. Either may be 0 and neither bounds the other.
        mask: causal (bottom right), window (keys visible, the row's own included) and soft cap.
        scale: factor on q . k.
        custom: one bool `[qo_len, kv_len]` a request; replaces causal and window.
        k_scale: what stored K is multiplied by to dequantise it. v_scale: the same for V.
        chunk_bytes: most bytes of float64 K and V that live at a time, and most bytes of scores; None: what suits the
            device.

    Returns:
        float64 out `[rows, num_qo_heads, head_dim_vo]` and natural-log lse `[rows, num_qo_heads]`; (0, -inf) for a
        row that sees no key.

    Raises:
        ValueError: shapes, lengths or slots that do not fit each other.
    """
    batch = Ragged.of(
        q, k_cache, v_cache, slots=slots, qo_lens=qo_lens, kv_lens=kv_lens, mask=mask, custom=custom
    )
    return attend(
        q,
        k_cache,
        v_cache,
        batch,
        scales=(scale, k_scale, v_scale),
        compute=torch.float64,
        chunk_bytes=chunk_bytes or chunk_bytes_on(q.device),
    )


def chunk_bytes_on(device: torch.device) -> int:
    """The size of chunks that suits a device."""
    return CPU_CHUNK_BYTES if device.type == "cpu" else GPU_CHUNK_BYTES


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: Ragged,
    *,
    scales: tuple[float, float, float],
    compute: torch.dtype,
    chunk_bytes: int,
    round_weights: Callable[[Any], Any] | None = None,
) -> AttentionState:
    """`paged_attention` of a checked batch in the dtype `compute`; out and lse have that dtype.

    `round_weights` rounds P (not yet normalised) before P @ V. The lse is then that of the rounded weights, and out is
    still divided by the sum of the exact ones: real kernels differ in which sum they take, and each is so measured
    where it errs most.
    """
    lib = library_of(q.device)
    scale, k_scale, v_scale = scales
    num_rows, num_qo_heads, _ = q.shape
    _, num_kv_heads, head_dim_vo = v_cache.shape
    group = num_qo_heads // num_kv_heads
    queries = grouped(scaled(converted(q, compute, lib), scale), num_kv_heads)
    running = RunningSoftmax.start((num_kv_heads, num_rows * group, head_dim_vo), compute, lib, round_weights)
    key_bytes = compute.itemsize * num_kv_heads * (k_cache.shape[2] + head_dim_vo)
    max_scores = chunk_bytes // compute.itemsize
    max_k = max_v = 0.0
    with np.errstate(all="ignore"):
        first, end = masks.key_ranges(batch.qo_lens, batch.kv_lens, batch.mask)
        ranges = lib.from_host(first[:, None]), lib.from_host(end[:, None])
        largest_q, q_is_finite = largest_norm(queries, lib)
        for chunk in chunks(batch.slots.shape[0], max(1, chunk_bytes // key_bytes)):
            slots = batch.slots[chunk[0] : chunk[1]]
            k = gathered(k_cache, slots, k_scale, compute, lib)
            v = gathered(v_cache, slots, v_scale, compute, lib)
            largest_v, v_is_finite = largest(v, lib)
            largest_k, k_is_finite = largest_norm(k, lib)
            max_k, max_v = max(max_k, largest_k), max(max_v, largest_v)
            small = q_is_finite and k_is_finite and largest_q * largest_k <= PLAIN_SCORE
            # A joined piece gives weight 0 to the keys of other requests, and 0 times their NaN would be NaN.
            join = v_is_finite and batch.custom is None
            for whole in pieces(batch, chunk, num_qo_heads=num_qo_heads, max_scores=max_scores, join=join):
                for piece in seen_of(whole, first, end) if join else [whole]:
                    lines = slice(piece.rows[0] * group, piece.rows[1] * group)
                    keys = slice(piece.keys[0] - chunk[0], piece.keys[1] - chunk[0])
                    hidden = None
                    if batch.custom is not None or not all_visible(piece, first, end):
                        hidden = hidden_block(piece, batch, ranges, lib)
                    scores = block_scores(queries[:, lines], k[:, keys], batch.mask.soft_cap, hidden, lib)
                    running.fold(lines, scores, v[:, keys], first=piece.first, small=small)
            del k, v  # before the next chunk is gathered
        out, lse = running.finish()
        if not running.total.all():
            clear_empty_rows(out, batch, ranges, lib)
        max_score = max_k * largest_q
    return AttentionState(ungrouped(out, group, lib), ungrouped(lse, group, lib), max_score, max_v)


def converted(x: torch.Tensor, compute: torch.dtype, lib: Library) -> Any:
    """A tensor as an array of the dtype `compute`."""
    if x.dtype == torch.float16 and x.numel() > 1 << 13:
        x = x.to(torch.float32)  # torch has vector code for either step, none for both at once
    return lib.array(x.double() if compute is torch.float64 else x.to(compute))  # a shorter way to the same


def scaled(q: Any, scale: float) -> Any:
    """Queries with the softmax scale in them, so that their products with keys are scores."""
    return q * scale


def grouped(q: Any, num_kv_heads: int) -> Any:
    """`[rows, num_qo_heads, dim]` as `[num_kv_heads, rows * group, dim]`: head h belongs to KV head h // group."""
    num_rows, num_qo_heads, dim = q.shape
    by_group = q.reshape(num_rows, num_kv_heads, num_qo_heads // num_kv_heads, dim)
    return by_group.swapaxes(0, 1).reshape(num_kv_heads, num_rows * (num_qo_heads // num_kv_heads), dim)


def ungrouped(x: Any, group: int, lib: Library) -> torch.Tensor:
    """`[num_kv_heads, rows * group, ...]` as a tensor `[rows, num_qo_heads, ...]`."""
    num_kv_heads, num_lines, *rest = x.shape
    by_row = x.reshape(num_kv_heads, num_lines // group, group, *rest).swapaxes(0, 1)
    return lib.tensor(by_row.reshape(num_lines // group, num_kv_heads * group, *rest))


def gathered(cache: torch.Tensor, slots: Any, factor: float, compute: torch.dtype, lib: Library) -> Any:
    """The named slots, converted and dequantised: `[num_kv_heads, keys, dim]`."""
    bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache  # no kernel picks fp8 everywhere
    taken = converted(bits.index_select(0, lib.tensor(slots)).view(cache.dtype), compute, lib).swapaxes(0, 1)
    return taken if factor == 1.0 else taken * factor


def seen_of(piece: Piece, first: np.ndarray, end: np.ndarray) -> list[Piece]:
    """A piece without the keys that none of its rows sees, maybe nothing; a large one in two: keys that every row sees,
    and those that a mask must hide from some.

    first, end: int64 `[rows]`, the range of keys that each row sees; both rise with the rows.
    """
    if piece.num_pairs <= WORTH_A_PIECE:
        return [piece]
    lo = max(piece.keys[0], int(first[piece.rows[0]]))
    hi = min(piece.keys[1], int(end[piece.rows[1] - 1]))
    if lo >= hi:
        return []
    edge = int(end[piece.rows[0]])
    if piece.num_pairs <= WORTH_TWO or first[piece.rows[1] - 1] > lo or not lo < edge < hi:
        return [piece._replace(keys=(lo, hi))]
    return [piece._replace(keys=(lo, edge)), piece._replace(keys=(edge, hi), first=False)]


def all_visible(piece: Piece, first: np.ndarray, end: np.ndarray) -> bool:
    """Whether every row of a piece sees every key of it."""
    return bool(first[piece.rows[1] - 1] <= piece.keys[0] and end[piece.rows[0]] >= piece.keys[1])


def hidden_block(piece: Piece, batch: Ragged, ranges: tuple[Any, Any], lib: Library) -> Any:
    """Bool `[rows, keys]` of one piece, True where a row does not see a key."""
    if batch.custom is not None:
        rows = slice(piece.rows[0] - piece.row_start, piece.rows[1] - piece.row_start)
        keys = slice(piece.keys[0] - piece.key_start, piece.keys[1] - piece.key_start)
        return ~lib.array(batch.custom[piece.request])[rows, keys]
    first, end = (x[piece.rows[0] : piece.rows[1]] for x in ranges)
    key = lib.arange(*piece.keys)
    return (key < first) | (key >= end)


def clear_empty_rows(out: Any, batch: Ragged, ranges: tuple[Any, Any], lib: Library) -> None:
    """Write 0 to the lines of rows that see no key. A row whose keys all score -inf stays 0 / 0."""
    if batch.custom is not None:
        empty = lib.array(torch.cat([~seen.any(1) for seen in batch.custom]))
    else:
        empty = (ranges[1] <= ranges[0])[:, 0]
    by_row = out.reshape(out.shape[0], len(empty), -1, out.shape[2])
    by_row[:, empty] = 0.0


def largest(x: Any, lib: Library) -> tuple[float, bool]:
    """Largest |element| that is finite (0.0 if there is none), and whether all are."""
    if 0 in x.shape:
        return 0.0, True
    top = max(float(x.max()), -float(x.min()))
    if math.isfinite(top):
        return top, True
    return largest(x[lib.isfinite(x)], lib)[0], False


def largest_norm(x: Any, lib: Library) -> tuple[float, bool]:
    """Largest finite Euclidean norm along the last axis (0.0 if there is none), and whether all are finite."""
    squares = lib.vecdot(x, x)
    if 0 in squares.shape:
        return 0.0, True
    top = float(squares.max())
    if math.isfinite(top):
        return math.sqrt(top), True
    return math.sqrt(largest(squares, lib)[0]), False
