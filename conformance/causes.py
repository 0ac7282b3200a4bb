"""Why an array is wrong. A cause is claimed where it explains every wrong entry, and no other explains them as well."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

Cause = tuple[str, np.ndarray]
"""What to say, and the array that there would be; without words it is a mere rival of those that have some."""


def claim(got: np.ndarray, want: np.ndarray, wrong: np.ndarray, causes: Iterable[Cause]) -> str:
    """The one cause under which each entry at `wrong` would be what it is; "" where none is or several are.

    To be off by one is always a rival.
    """
    rivals = (*causes, ("", want - 1), ("", want + 1))
    fitting = {words for words, would_be in rivals if np.array_equal(would_be[wrong], got[wrong])}
    return fitting.pop() if len(fitting) == 1 else ""


@dataclass(frozen=True, slots=True)
class PageIds:
    """Entries of a page table that a library reads, flat: which page of which request each is, what it holds and what
    it must hold. `given`: the whole table."""

    request: np.ndarray
    page: np.ndarray
    got: np.ndarray
    want: np.ndarray
    given: np.ndarray

    @property
    def wrong(self) -> np.ndarray:
        return np.flatnonzero(self.got != self.want)


def of_page(ids: PageIds, at: int, slots: tuple[np.ndarray, ...], page_size: int) -> str:
    """Why entry `at` is wrong. `slots`: those of each request, by position."""
    wrong = ids.wrong
    owners = [_owner(int(page), slots, page_size) for page in ids.got[wrong]]
    of_the_batch = all(owner is not None for owner in owners)
    elsewhere = bool(np.isin(ids.want[wrong], ids.given).all())
    if page_size > 1 and not of_the_batch and not elsewhere:
        words = f": a token location, not a page number (divide it by the page size {page_size})"
        each = zip(ids.request.tolist(), ids.page.tolist(), strict=True)
        unstrided = np.array([slots[r][p] for r, p in each], dtype=np.int64)
        cause = claim(ids.got, ids.want, wrong, [(words, ids.want * page_size), (words, unstrided)])
        if cause:
            return cause
    request = int(ids.request[at])
    own = np.flatnonzero(slots[request][::page_size] // page_size == ids.got[at])
    if len(own):
        return f": its page {own[0]}"
    owner = owners[int(np.searchsorted(wrong, at))]
    return "" if owner is None else f": a page of request {owner}"


def _owner(page: int, slots: tuple[np.ndarray, ...], page_size: int) -> int | None:
    return next((r for r, own in enumerate(slots) if page in own[::page_size] // page_size), None)
