"""Who owns which page and which page-table row while a session runs: a plain model of an engine's allocator.

A page has as many holders as requests that keep it, the lender of a prefix and its borrowers; it is free when the last
of them has left. What was given back last is handed out first, so a session reuses pages and rows as soon as it can.
"""

from __future__ import annotations

import numpy as np

from cases.model import AnyRequest, Case, Step
from cases.placement import Placed, Plan, free_order, pages_for

Origin = tuple[int, int]
"""uid of a lender, and the position at which its tokens end."""


class Ownership:
    """Pages and rows by number, each number the lowest that was free; `place_session` says where they lie.

    `pages[uid]`, `row[uid]`, `kv_len[uid]` of every live request. `origins[uid]` says whose the first tokens of a
    borrower are. `num_pages` and `num_rows`: most that were ever owned at a time.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[int, list[int]] = {}
        self.row: dict[int, int] = {}
        self.kv_len: dict[int, int] = {}
        self.origins: dict[int, tuple[Origin, ...]] = {}
        self.free_pages: list[int] = []
        self.num_pages = self.num_rows = 0
        self._holders: dict[int, int] = {}
        self._free_rows: list[int] = []

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
                mine.append(self.free_pages.pop())
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
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        self.free_pages += freed
        return freed


def place_session(case: Case) -> Plan:
    """Place every request of every step of a session. Pure: the same case gives the same places."""
    own = Ownership(case.page_size)
    drafts = [_Draft(own, step) for step in case.steps]
    num_pages, num_rows = own.num_pages + case.spare_pages, own.num_rows + 1
    page_at = np.array(free_order(case, num_pages)[::-1], dtype=np.int64)
    row_at = free_order(case, num_rows)[::-1]
    return Plan(tuple(draft.placed(case.page_size, page_at, row_at) for draft in drafts), num_pages, num_rows)


class _Draft:
    """One step, by the numbers that `Ownership` gives."""

    def __init__(self, own: Ownership, step: Step) -> None:
        self.step = step
        self.freed: list[int] = []
        self.rolled_back: list[int] = []
        self.given: list[int] = []
        for uid in step.finished:
            self.freed += own.finish(uid)
        start = 0
        starts: dict[int, int] = {}
        for r in step.requests:
            starts[r.uid] = start
            start += r.kv_len
        lenders_first = sorted(step.requests, key=lambda r: r.prefix_of is not None)
        for r in lenders_first:
            if r.uid in own.row:
                self.rolled_back += own.slots(r.uid, r.stored_len, own.kv_len[r.uid])
            else:
                own.admit(r)
                self.given += range(starts[r.uid] + r.prefix_len, starts[r.uid] + r.stored_len)
            self.freed += own.resize(r.uid, r.kv_len)
        self.rows = [own.row[r.uid] for r in step.requests]
        self.pages = [list(own.pages[r.uid]) for r in step.requests]
        self.origins = tuple(own.origins.get(r.uid, ()) for r in step.requests)
        self.held = {page for pages in own.pages.values() for page in pages}

    def placed(self, page_size: int, page_at: np.ndarray, row_at: list[int]) -> Placed:
        offsets = np.arange(page_size)
        pages = tuple(page_at[mine] for mine in self.pages)
        slots = tuple(
            (mine[:, None] * page_size + offsets).reshape(-1)[: r.kv_len]
            for r, mine in zip(self.step.requests, pages, strict=True)
        )
        freed = (page_at[np.array(self.freed, dtype=np.int64)][:, None] * page_size + offsets).reshape(-1)
        back = np.array(self.rolled_back, dtype=np.int64)
        free = [number for number in range(len(page_at)) if number not in self.held]
        return Placed(
            rows=tuple(row_at[row] for row in self.rows),
            pages=pages,
            slots=slots,
            free_pages=np.sort(page_at[free]),
            origins=self.origins,
            cleared=np.concatenate((freed, page_at[back // page_size] * page_size + back % page_size)),
            given=np.array(self.given, dtype=np.int64),
        )
