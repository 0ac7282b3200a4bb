"""Who owns which page and which page-table row while a session runs: a plain model of an engine's allocator.

A page has as many holders as requests that keep it, the lender of a prefix and its borrowers; it is free when the last
of them has left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from cases.model import AnyRequest, Case, Step
from cases.placement import Placed, Plan, free_order, pages_for, slots_of

Origin = tuple[int, int]
"""uid of a lender, and the position at which its tokens end."""


class Ownership:
    """Pages and rows of the live requests.

    `pages[uid]`, `row[uid]`, `kv_len[uid]` of each. `origins[uid]` says whose the first tokens of a borrower are.
    `num_pages` and `num_rows` count what there is; both grow where nothing is free.

    Args:
        free_pages, free_rows: those that exist from the start, handed out from their ends.
        oldest_first: the page that has been free for longest comes next, not the one that was given back last.
    """

    def __init__(
        self,
        page_size: int,
        free_pages: Sequence[int] = (),
        free_rows: Sequence[int] = (),
        *,
        oldest_first: bool = False,
    ) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int]] = {}
        self.row: dict[int, int] = {}
        self.kv_len: dict[int, int] = {}
        self.origins: dict[int, tuple[Origin, ...]] = {}
        self.num_pages, self.num_rows = len(free_pages), len(free_rows)
        self.free_pages, self._free_rows = deque(free_pages), list(free_rows)
        self._oldest_first = oldest_first
        self._holders: dict[int, int] = {}

    def finish(self, uid: int) -> list[int]:
        """A request leaves; the pages that nobody holds any more."""
        self._free_rows.append(self.row.pop(uid))
        del self.kv_len[uid]
        self.origins.pop(uid, None)
        return self._drop(self.pages.pop(uid))

    def admit(self, request: AnyRequest) -> None:
        """A request gets a row, and the pages of the prefix that it borrows."""
        if self._free_rows:
            self.row[request.uid] = self._free_rows.pop()
        else:
            self.row[request.uid] = self.num_rows
            self.num_rows += 1
        mine: list[int] = []
        if request.prefix_of is not None:
            mine = self.pages[request.prefix_of][: request.prefix_len // self.page_size]
            for page in mine:
                self._holders[page] += 1
            self.origins[request.uid] = self._lent(request.prefix_of, request.prefix_len)
        self.pages[request.uid] = mine
        self.kv_len[request.uid] = 0

    def resize(self, uid: int, kv_len: int) -> list[int]:
        """A live request holds pages for `kv_len` tokens; the pages that it gave back."""
        mine, wanted = self.pages[uid], pages_for(kv_len, self.page_size)
        given_back, mine[wanted:] = mine[wanted:], []
        while len(mine) < wanted:
            if self.free_pages:
                mine.append(self.free_pages.popleft() if self._oldest_first else self.free_pages.pop())
            else:
                mine.append(self.num_pages)
                self.num_pages += 1
            self._holders[mine[-1]] = 1
        self.kv_len[uid] = kv_len
        return self._drop(given_back)

    def slots(self, uid: int, first: int, end: int) -> list[int]:
        """Slots of the positions `first` to `end`."""
        p, pages = self.page_size, self.pages[uid]
        return [pages[i // p] * p + i % p for i in range(first, end)]

    def _lent(self, lender: int, prefix_len: int) -> tuple[Origin, ...]:
        found: list[Origin] = []
        for uid, end in (*self.origins.get(lender, ()), (lender, prefix_len)):
            if not found or found[-1][1] < prefix_len:
                found.append((uid, min(end, prefix_len)))
        return tuple(found)

    def _drop(self, pages: list[int]) -> list[int]:
        freed: list[int] = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        self.free_pages += freed
        return freed


def place_session(case: Case) -> Plan:
    """Place every request of every step of a session. Pure: the same case gives the same places.

    Rows are reused at once, pages too; only with placement "scattered" those free for longest come first.
    """
    counted = Ownership(case.page_size)
    for step in case.steps:
        _turn(counted, step)
    num_pages, num_rows = counted.num_pages + case.spare_pages, counted.num_rows + 1
    pages, rows = free_order(case, num_pages), free_order(case, num_rows)
    own = Ownership(case.page_size, pages, rows, oldest_first=case.placement == "scattered")
    return Plan(tuple(_placed(own, step) for step in case.steps), num_pages, num_rows)


def _turn(own: Ownership, step: Step) -> tuple[list[int], list[int], list[int]]:
    """Requests leave, come and grow: pages that became free, slots stepped back from, tokens from elsewhere."""
    freed: list[int] = []
    back: list[int] = []
    given: list[int] = []
    for uid in step.finished:
        freed += own.finish(uid)
    starts = dict(zip((r.uid for r in step.requests), accumulate(step.kv_lens, initial=0), strict=False))
    lenders_first = sorted(step.requests, key=lambda r: r.prefix_of is not None)
    for r in lenders_first:
        if r.uid in own.row:
            back += own.slots(r.uid, r.stored_len, own.kv_len[r.uid])
        else:
            own.admit(r)
            given += range(starts[r.uid] + r.prefix_len, starts[r.uid] + r.stored_len)
        freed += own.resize(r.uid, r.kv_len)
    return freed, back, given


def _placed(own: Ownership, step: Step) -> Placed:
    freed, back, given = _turn(own, step)
    page_size = own.page_size
    offsets = np.arange(page_size)
    pages = tuple(np.array(own.pages[r.uid], dtype=np.int64) for r in step.requests)
    computed = {r.uid for r in step.requests}
    cleared = (np.array(freed, dtype=np.int64)[:, None] * page_size + offsets).reshape(-1)
    return Placed(
        rows=tuple(own.row[r.uid] for r in step.requests),
        pages=pages,
        slots=slots_of(step, pages, page_size),
        free_pages=np.array(sorted(own.free_pages), dtype=np.int64),
        origins=tuple(own.origins.get(r.uid, ()) for r in step.requests),
        cleared=np.concatenate((cleared, np.array(back, dtype=np.int64))),
        given=np.array(given, dtype=np.int64),
        waiting={uid: own.slots(uid, 0, n) for uid, n in own.kv_len.items() if uid not in computed},
    )
