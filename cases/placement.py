"""Which pages and table rows each request of a case gets, step after step.

A small page allocator: requests that stay keep what they have, requests that left give it back, and what was given
back is handed out again first, so that pages and rows are reused as in a server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cases import noise
from cases.model import AnyRequest, Case, Step


def _none() -> np.ndarray:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the requests of one step stand.

    `rows`: page-table row of each request. `pages`: int64 `[num_pages]` each. `slots`: int64 `[kv_len]` each, the slot
    of every token (page * page_size + offset). `free_pages`: int64, pages that no request owns.

    Of a session: `origins[request]`, (uid, end) of those whose tokens its first ones are; `cleared`: int64, slots that
    hold a token no longer; `given`: int64, tokens (all requests one after the other) that no step of it computed;
    `waiting[uid]`, the slots of those who are there and do not compute.
    """

    rows: tuple[int, ...]
    pages: tuple[np.ndarray, ...]
    slots: tuple[np.ndarray, ...]
    free_pages: np.ndarray
    origins: tuple[tuple[tuple[int, int], ...], ...] | None = None
    cleared: np.ndarray = field(default_factory=_none)
    given: np.ndarray = field(default_factory=_none)
    waiting: dict[int, list[int]] = field(default_factory=dict[int, list[int]])


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement of a whole case: one `Placed` a step, and the sizes that hold for all of them."""

    steps: tuple[Placed, ...]
    num_pages: int
    num_rows: int


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // page_size)


def _own_pages(request: AnyRequest, page_size: int) -> int:
    return pages_for(request.kv_len, page_size) - request.prefix_len // page_size


def _peak_pages(case: Case) -> int:
    return max(sum(_own_pages(r, case.page_size) for r in step.requests) for step in case.steps)


def place(case: Case) -> Plan:
    """Place every request of every step of a case that is no session. Pure: the same case gives the same places."""
    num_pages = _peak_pages(case) + case.spare_pages
    num_rows = max(len(step.requests) for step in case.steps) + 1
    pages = free_order(case, num_pages)
    rows = free_order(case, num_rows)
    held: dict[int, list[int]] = {}
    row_of: dict[int, int] = {}
    steps: list[Placed] = []
    for step in case.steps:
        _release(step, case.page_size, held, pages, row_of, rows)
        for r in step.requests:
            if r.uid not in row_of:
                row_of[r.uid] = rows.pop()
            mine = held.setdefault(r.uid, [])
            mine.extend(pages.pop() for _ in range(_own_pages(r, case.page_size) - len(mine)))
        steps.append(_placed(step, case.page_size, held, row_of, pages))
    return Plan(tuple(steps), num_pages, num_rows)


def free_order(case: Case, count: int) -> list[int]:
    """Free list of `count` items; the next one is popped from its end."""
    if case.placement == "sequential":
        return list(range(count - 1, -1, -1))
    if case.placement == "reversed":
        return list(range(count))
    return noise.order(case.seed, count)


def slots_of(step: Step, pages: Sequence[np.ndarray], page_size: int) -> tuple[np.ndarray, ...]:
    """int64 `[kv_len]` of each request: the slot of every token, by its pages."""
    offsets = np.arange(page_size)
    return tuple(
        (own[:, None] * page_size + offsets).reshape(-1)[: r.kv_len] if page_size > 1 else own[: r.kv_len]
        for r, own in zip(step.requests, pages, strict=True)
    )


def _release(
    step: Step,
    page_size: int,
    held: dict[int, list[int]],
    pages: list[int],
    row_of: dict[int, int],
    rows: list[int],
) -> None:
    own = {r.uid: _own_pages(r, page_size) for r in step.requests}
    rows.extend(row_of.pop(uid) for uid in [uid for uid in row_of if uid not in own])
    for uid, mine in list(held.items()):
        kept = own.get(uid, 0)
        pages.extend(mine[kept:])
        held[uid] = mine[:kept]
        if uid not in own:
            del held[uid]


def _placed(
    step: Step, page_size: int, held: dict[int, list[int]], row_of: dict[int, int], free: list[int]
) -> Placed:
    borrowed = [
        [] if r.prefix_of is None else held[r.prefix_of][: r.prefix_len // page_size] for r in step.requests
    ]
    pages = tuple(
        np.array(lent + held[r.uid], dtype=np.int64) for r, lent in zip(step.requests, borrowed, strict=True)
    )
    slots = slots_of(step, pages, page_size)
    rows = tuple(row_of[r.uid] for r in step.requests)
    return Placed(rows, pages, slots, np.array(sorted(free), dtype=np.int64))
