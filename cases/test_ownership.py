"""Sessions: their rules, who owns what from step to step, and what the pool and the page table then hold."""

# torch and numpy leave the results of tolist, unique and concatenate without types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from cases.codec import from_json, to_json
from cases.model import Case, KernelRequest, Placement, Request, Step
from cases.ownership import Ownership, place_session
from cases.tensors import CaseTensors, materialise


def step(*requests: Request, finished: Iterable[int] = (), decode: bool = False) -> Step:
    return Step(
        requests, "decode" if decode else "prefill", "decode" if decode else "prefill", tuple(finished)
    )


def session(*steps: Step, placement: Placement = "sequential") -> Case:
    return Case(steps, session=True, page_size=4, num_layers=1, placement=placement)


PROMPT = step(Request(extend_len=9))
OTHER = step(Request(extend_len=5, uid=1))
HIT = Request(cached_len=8, extend_len=3, uid=2, prefix_of=0, prefix_len=8)


def test_who_waits_keeps_its_row_and_pages() -> None:
    both = step(Request(cached_len=9, uid=0), Request(cached_len=5, uid=1), decode=True)
    first, second, third = place_session(session(PROMPT, OTHER, both)).steps
    assert third.rows == (first.rows[0], second.rows[0])
    assert np.array_equal(third.pages[0], first.pages[0])
    assert not set(first.pages[0]) & set(second.free_pages)
    assert second.waiting == {0: first.slots[0].tolist()}
    assert third.waiting == {}


@pytest.mark.parametrize("placement", ["sequential", "reversed"])
def test_what_was_given_back_is_reused_at_once(placement: Placement) -> None:
    case = session(PROMPT, OTHER, step(Request(extend_len=9, uid=2), finished=[0]), placement=placement)
    first, _, last = place_session(case).steps
    assert last.rows == first.rows
    assert set(last.pages[0]) == set(first.pages[0])
    assert set(last.cleared) == {4 * p + i for p in first.pages[0] for i in range(4)}


def test_scattered_pages_that_were_free_for_longest_come_first() -> None:
    case = session(PROMPT, step(Request(extend_len=9, uid=1), finished=[0]), placement="scattered")
    first, last = place_session(case).steps
    assert last.rows == first.rows
    assert len(set(last.pages[0]) - set(first.pages[0])) == case.spare_pages


def test_a_prefix_outlives_its_lender() -> None:
    case = session(PROMPT, step(HIT), step(Request(cached_len=11, uid=2), finished=[0], decode=True))
    first, hit, last = place_session(case).steps
    assert np.array_equal(hit.pages[0][:2], first.pages[0][:2])
    assert np.array_equal(last.pages[0], hit.pages[0])
    assert last.cleared.tolist() == [4 * first.pages[0][2] + i for i in range(4)]
    assert last.origins == (((0, 8),),)


def test_a_borrower_lends_on() -> None:
    again = Request(cached_len=11, extend_len=1, uid=3, prefix_of=2, prefix_len=8)
    longer = replace(again, uid=4, cached_len=12, prefix_len=12)
    grown = step(Request(cached_len=11, uid=2), finished=[0])
    plan = place_session(session(PROMPT, step(HIT), grown, step(again), step(longer)))
    assert plan.steps[3].origins == (((0, 8),),)
    assert plan.steps[4].origins == (((0, 8), (2, 12)),)
    assert np.array_equal(plan.steps[4].pages[0][:3], plan.steps[2].pages[0][:3])


def test_a_lender_may_stand_behind_its_borrower() -> None:
    case = session(step(HIT, Request(cached_len=8, extend_len=1, uid=0)))
    (placed,) = place_session(case).steps
    assert np.array_equal(placed.pages[0][:2], placed.pages[1][:2])
    assert placed.given.tolist() == list(range(11, 19))


def test_stepping_back_clears_what_is_computed_anew() -> None:
    case = session(PROMPT, step(Request(cached_len=5, extend_len=1)))
    first, second = place_session(case).steps
    assert set(first.slots[0][5:]) <= set(second.cleared)
    assert first.pages[0][2] in second.free_pages


def test_all_pages_are_free_when_all_have_left() -> None:
    own = Ownership(4)
    for request in (Request(cached_len=8, uid=0), HIT, replace(HIT, uid=3, prefix_of=2)):
        own.admit(request)
        own.resize(request.uid, request.kv_len)
    assert own.num_pages == 5
    assert own.finish(0) == [2]
    assert own.finish(3) == [4]
    assert sorted(own.finish(2)) == [0, 1, 3]
    assert sorted(own.free_pages) == list(range(5))


def _held(tensors: CaseTensors) -> list[np.ndarray]:
    pools = [tensors.pool(i, "v", nan=True, after=True) for i in range(len(tensors.steps))]
    return [pool.flatten(1, 2)[0, :, 0, 0].float().numpy() for pool in pools]


def test_a_pool_holds_what_live_requests_stored_and_nothing_else() -> None:
    case = session(PROMPT, OTHER, step(HIT), step(Request(cached_len=5, uid=1), finished=[0]))
    tensors = materialise(case)
    steps, after = tensors.steps, _held(tensors)
    assert np.isfinite(after[0]).sum() == 9
    assert np.isfinite(after[1]).sum() == 14
    assert np.isfinite(after[2]).sum() == 17
    assert np.isfinite(after[3]).sum() == 17
    assert np.array_equal(after[3][steps[2].slots], steps[2].v_all[0, :, 0, 0].float().numpy())
    assert np.array_equal(after[3][steps[3].slots], steps[3].v_all[0, :, 0, 0].float().numpy())


def test_tokens_from_elsewhere_stand_there_before_the_step() -> None:
    tensors = materialise(session(PROMPT, step(Request(cached_len=6, extend_len=1, uid=1))))
    before = tensors.pool(1, "k", nan=True, after=False).flatten(1, 2)[0, :, 0, 0]
    s = tensors.steps[1]
    assert np.array_equal(before[s.slots[:6]].numpy(), s.k_all[0, :6, 0, 0].numpy())
    assert before[s.slots[6]].isnan()


def test_columns_behind_a_length_keep_what_stood_there() -> None:
    tensors = materialise(session(PROMPT, OTHER, step(Request(extend_len=2, uid=2), finished=[0])))
    row = tensors.steps[0].placed.rows[0]
    assert tensors.steps[2].placed.rows == (row,)
    first, last = tensors.page_table(0)[row], tensors.page_table(2)[row]
    assert last[2:].equal(first[2:])
    assert last[:2].tolist() == tensors.steps[2].placed.slots[0].tolist()


def test_a_session_travels_as_text() -> None:
    case = session(PROMPT, OTHER, step(HIT, finished=[1]))
    assert '"finished":[1]' in to_json(case)
    assert '"session":true' in to_json(case)
    assert from_json(to_json(case)) == case


def test_other_cases_have_no_new_keys() -> None:
    assert to_json(Case((PROMPT,))) == '{"steps":[{"requests":[{"extend_len":9}]}]}'


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((step(Request(), finished=[1]),), "step 0: finished names uid 1, which is not there"),
        ((PROMPT, step(Request(cached_len=9), finished=[0])), "step 1: uid 0 has finished and is computed"),
        ((PROMPT, step(Request(cached_len=10))), "is more than the 9 tokens it had before"),
        ((PROMPT, step(HIT), step(Request(cached_len=7, uid=2))), "steps back into the 8 tokens"),
        ((PROMPT, step(HIT), step(Request(cached_len=7))), "steps back into the 8 tokens that it shares"),
        ((PROMPT, step(replace(HIT, uid=1), finished=[0])), "prefix_of 0 is no other request that is there"),
        ((PROMPT, step(replace(HIT, prefix_of=2))), "prefix_of 2 is no other request that is there"),
        ((PROMPT, step(replace(HIT, prefix_len=6))), "is no positive multiple of page_size 4"),
        ((OTHER, step(replace(HIT, prefix_of=1))), "exceeds what both requests have stored"),
        ((PROMPT, step(HIT, replace(HIT, uid=3, prefix_of=2))), "borrows itself in this step"),
        ((PROMPT, step(replace(HIT, prefix_of=None))), "prefix_len without prefix_of"),
        (
            (PROMPT, step(HIT), step(Request(11, 1, 2, prefix_of=0, prefix_len=8))),
            "belongs to the step that admits",
        ),
    ],
)
def test_broken_rules_are_named(steps: tuple[Step, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        session(*steps)


def test_finished_belongs_to_a_session() -> None:
    with pytest.raises(ValueError, match="finished belongs to a session"):
        Case((PROMPT, step(Request(uid=1), finished=[0])))


def test_a_session_is_asked_of_engines() -> None:
    with pytest.raises(ValueError, match="a session is a case of level engine, level is kernel"):
        Case((Step((KernelRequest(),)),), level="kernel", session=True)
