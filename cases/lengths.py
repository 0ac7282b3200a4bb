"""Lengths at which faults live, in tables whose indices mean the same for every page size and window.

So a case that fails at an index keeps failing while shrinking makes its pages smaller: index 2 is one full
page, whatever the page size.
"""

from __future__ import annotations

from functools import cache

NUM_LENGTHS = 32
"""Entries of a length table: five bits."""
NUM_SPLITS = 8
"""Ways to split a length into stored and new tokens: three bits."""

_PLAIN = (2, 3, 5, 6, 8, 11, 13, 20, 24, 29, 40)


@cache
def lengths(page_size: int, window: int | None, zero: bool) -> tuple[int, ...]:
    """32 values of kv_len, the simplest first, borders of page and window several times.

    With `zero` the last two are 0.
    """
    p = page_size
    w = window if window is not None else 4
    table = [1, p - 1, p, p + 1, 2 * p, 3 * p, 2 * p - 1, 2 * p + 1]
    table += [w, w + 1, w - 1, w + p, 2 * w, 3 * p + 1, 4 * p]
    table += [*_PLAIN, p, p + 1, 2 * p, p - 1, 2 * p + 1, 3 * p - 1]
    table = [max(1, n) for n in table]
    if zero:
        table[-2:] = [0, 0]
    return tuple(table)


def prefill_cached(split: int, kv_len: int, page_size: int) -> int:
    """Stored tokens of a request in a prefill batch: mostly none, else a prefix hit."""
    last = kv_len - 1
    if split == 4:
        return last // page_size * page_size
    if split == 5:
        return page_size if page_size <= last else 0
    if split == 6:
        return kv_len // 2
    if split == 7:
        return last
    return 0


def chunked_cached(split: int, kv_len: int, page_size: int) -> int:
    """Stored tokens of a request whose prompt comes in pieces: mostly some, at and beside page edges."""
    last = kv_len - 1
    pages = last // page_size * page_size
    choice = (
        kv_len // 2,
        pages,
        pages - 1,
        pages + 1,
        page_size,
        last,
        last - 1,
        0,
    )[split]
    return min(max(choice, 0), last)


def query_len(split: int, kv_len: int) -> int:
    """Query rows of a kernel-level request: from one row over all of them to more rows than keys, or none."""
    return (1, kv_len, 2, kv_len // 2 + 1, max(kv_len - 1, 0), kv_len // 4 + 1, kv_len + 1, 0)[split]
