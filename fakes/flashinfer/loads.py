"""Which keys the tile of a row loads: a value that is NaN spoils the rows whose tile loads it, seen or not.

Weights of keys that a row does not see are 0, and 0 times NaN is NaN. What a tile does not load spoils nothing.
Source: `prefill.cuh` and `hopper/` of flashinfer-python 0.6.6; the same in 0.7.4.
"""

from __future__ import annotations

from fakes.flashinfer.plans import Plan
from fakes.loaded import Range
from fakes.recorder import Span

FA3_ROWS = {64: 192}
FA3_KEYS = {64: 96, 128: 96, 256: 32}
"""Rows and keys in a tile of paged fa3, by head dim; 128 rows and 96 keys for others."""

_MULTIPROCESSOR = 233472
"""Bytes of shared memory that one multiprocessor of sm_90 has."""


def ranges(plan: Plan, span: Span, *, group: int, causal: bool, window: int) -> list[Range]:
    """For each packed row of a paged request, the keys that its tile loads: first, and one past the last.

    Packed rows are the query heads of a KV head, row by row: `group` to a row.

    Args:
        plan: that the run executes.
        span: of the request.
        group: query heads of a KV head.
        causal: whether tiles stop at their last row's own key.
        window: keys before a tile's first row at which it begins, -1: all.
    """
    count, length = span.q_end - span.q_start, len(span.slots)
    if plan.kernel == "cuda_core" or not plan.is_cut:
        return [(0, length)] * (count * group)
    if plan.kernel == "fa3":
        rows, keys = FA3_ROWS.get(plan.head_dim, 128), FA3_KEYS.get(plan.head_dim, 96)
        return [
            _of_fa3(packed // group // rows, rows, keys, count, length, causal, window)
            for packed in range(count * group)
        ]
    schedule = plan.schedule()
    rows = schedule.tile_rows
    keys = keys_at_once(rows, plan.head_dim)
    found: list[Range] = []
    for packed in range(count * group):
        tile = packed // rows
        first = max(length + tile * rows // group - count - window, 0) if window >= 0 else 0
        stop = length
        if causal:
            stop = min(length, max(length - count - (-(tile + 1) * rows // group), first))
        chunk = schedule.chunk_tokens if plan.scratch else None
        begin = first if chunk is None else first + max(stop - 1 - first, 0) // chunk * chunk
        end = min(begin + -(-(stop - begin) // keys) * keys, length)
        found.append((first, end if chunk is None else min(end, begin + chunk)))
    return found


def _of_fa3(tile: int, rows: int, keys: int, count: int, length: int, causal: bool, window: int) -> Range:
    tiles = -(-length // keys)
    if causal:
        tiles = min(tiles, -(-((tile + 1) * rows + length - count) // keys))
    first = 0
    if window >= 0:
        first = max((tile * rows + length - count - window) // keys - 1, 0) * keys
    return first, min(max(tiles * keys, first), length)


def chunks(plan: Plan, span: Span, window: int) -> list[Range]:
    """The keys of each chunk that a request is split into, from its first tile's first key on."""
    count, length = span.q_end - span.q_start, len(span.slots)
    chunk = plan.schedule().chunk_tokens if plan.scratch and plan.kernel != "fa3" else None
    if chunk is None:
        return [(0, length)]
    first = max(length - count - window, 0) if window >= 0 else 0
    return [(start, min(start + chunk, length)) for start in range(first, length, chunk)]


def keys_at_once(tile_rows: int, head_dim: int) -> int:
    """Keys in a tile of fa2, of 16-bit numbers."""
    warps = 4 if tile_rows == 16 else 1  # that share the keys
    queries, keys = tile_rows * head_dim * 2, head_dim * 2 * 16 * warps * 2
    blocks = 2 if 2 * (queries + keys) <= _MULTIPROCESSOR else 1
    most = min(4 if tile_rows == 128 else 8, (_MULTIPROCESSOR // blocks - queries) // keys)
    return max(n for n in (1, 2, 4, 8) if n <= max(most, 1)) * 16 * warps
