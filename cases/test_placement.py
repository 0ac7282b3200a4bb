"""Pages and rows: nobody shares what it does not borrow, who stays keeps its own, what was given back is reused."""

# torch and numpy leave the results of tolist, unique and concatenate without types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cases.model import Case, Placement, Request, Step
from cases.placement import free_order, pages_for, place

REQUESTS = (
    Request(cached_len=9, extend_len=3, uid=0),
    Request(cached_len=8, extend_len=2, uid=1, prefix_of=0, prefix_len=8),
    Request(cached_len=0, extend_len=4, uid=2),
)
CASE = Case((Step(REQUESTS),), page_size=4, spare_pages=2)
PLACEMENTS: tuple[Placement, ...] = ("sequential", "reversed", "scattered")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_pages_are_owned_once(placement: Placement) -> None:
    plan = place(replace(CASE, placement=placement, seed=5))
    (step,) = plan.steps
    own = np.concatenate([step.pages[0], step.pages[1][2:], step.pages[2]])
    assert len(set(own)) == len(own)
    assert not set(own) & set(step.free_pages)
    assert len(own) + len(step.free_pages) == plan.num_pages
    assert len(set(step.rows)) == len(step.rows)


def test_a_borrowed_prefix_stands_in_the_lenders_pages() -> None:
    (step,) = place(CASE).steps
    assert np.array_equal(step.pages[1][:2], step.pages[0][:2])
    assert np.array_equal(step.slots[1][:8], step.slots[0][:8])
    assert not set(step.slots[1][8:]) & set(step.slots[0])


def test_slots_are_page_times_size_plus_offset() -> None:
    (step,) = place(CASE).steps
    assert step.slots[0].tolist() == [int(step.pages[0][i // 4]) * 4 + i % 4 for i in range(12)]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_who_stays_keeps_its_place_and_the_rest_is_reused(placement: Placement) -> None:
    first = Step((Request(extend_len=5, uid=0), Request(extend_len=4, uid=1)))
    second = Step((Request(cached_len=5, extend_len=4, uid=0), Request(extend_len=3, uid=2)))
    plan = place(Case((first, second), page_size=4, spare_pages=1, placement=placement))
    before, after = plan.steps
    assert before.rows[0] == after.rows[0]
    assert np.array_equal(before.pages[0], after.pages[0][:2])
    assert before.rows[1] == after.rows[1]
    assert set(before.pages[1]) & set(np.concatenate(after.pages))


def test_pages_for() -> None:
    assert [pages_for(n, 16) for n in (0, 1, 15, 16, 17, 32)] == [0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("count", [0, 1, 2, 37, (1 << 20) - 1, 1 << 20, (1 << 20) + 4096])
def test_scattered_pages_are_all_of_them_in_another_order(count: int) -> None:
    case = Case((Step((Request(),)),), placement="scattered", seed=5)
    order = free_order(case, count)
    assert sorted(order) == list(range(count))
    assert count < 3 or order != sorted(order)
    assert order == free_order(case, count)
