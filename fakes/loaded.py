"""What a kernel does not load spoils nothing: rows that are NaN are computed anew without keys outside their tile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fakes.recorder import Span

Range = tuple[int, int]
"""Keys of a request: the first, and one past the last."""


def without_unloaded(
    spans: Sequence[Span],
    out: np.ndarray,
    lse: np.ndarray,
    *,
    group: int,
    ranges: Callable[[Span], list[Range]],
    again: Callable[[int, slice, Range], tuple[np.ndarray, np.ndarray]],
) -> None:
    """Compute rows that are NaN once more, where their tiles load not all keys, with those that they load.

    Args:
        spans: requests.
        out: `[rows, num_qo_heads, dim]`, overwritten. lse: `[rows, num_qo_heads]`, the same.
        group: query heads of a KV head.
        ranges: of a request, the keys that each packed row's tile loads; packed rows are the query heads of a KV head,
            row by row, `group` to a row. Ranges rise with their tiles.
        again: `again(i, rows, keys)`: out and LSE of some rows of request i over a range of its keys.
    """
    for i, span in enumerate(spans):
        spoilt = np.isnan(out[span.q_start : span.q_end]).any(axis=(1, 2))
        if not spoilt.any():
            continue
        found = ranges(span)
        for keys in dict.fromkeys(found):
            if keys == (0, len(span.slots)):
                continue
            first = found.index(keys)
            end = first + found.count(keys)
            rows = slice(first // group, -(-end // group))
            packed = (
                np.arange(rows.start, rows.stop)[:, None] * group + np.arange(out.shape[1])[None, :] % group
            )
            own = (packed >= first) & (packed < end)
            at = slice(span.q_start + rows.start, span.q_start + rows.stop)
            new_out, new_lse = again(i, rows, keys)
            out[at][own], lse[at][own] = new_out[own], new_lse[own]


def merged_without_nan(
    spans: Sequence[Span],
    lse: np.ndarray,
    *,
    chunks: Callable[[Span], list[Range]],
    again: Callable[[int, slice, Range], tuple[np.ndarray, np.ndarray]],
) -> None:
    """The LSE of rows that are NaN, merged from chunks of their keys of which those that are NaN count as none.

    Args:
        spans: requests.
        lse: `[rows, num_qo_heads]`, natural, overwritten.
        chunks: the keys of each chunk of a request. again: as for `without_unloaded`.
    """
    for i, span in enumerate(spans):
        part = lse[span.q_start : span.q_end]
        spoilt = np.isnan(part)
        found = chunks(span) if spoilt.any() else []
        if len(found) < 2:
            continue
        rows = slice(0, span.q_end - span.q_start)
        partial = np.stack([again(i, rows, keys)[1] for keys in found])
        partial[np.isnan(partial)] = -np.inf
        part[spoilt] = np.logaddexp.reduce(partial, axis=0)[spoilt]
