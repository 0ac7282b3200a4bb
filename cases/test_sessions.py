"""Drawn sessions: valid, small, varied, and shrinking to one request of one token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, find, given, seed, settings

from cases.codec import from_json, to_json
from cases.mix import default_mix
from cases.model import Case, Request, Step
from cases.model import Phase as CasePhase
from cases.schedule import Schedule
from cases.sessions import session_cases
from cases.simplify import simplify
from cases.wanted import ENGINE, KERNEL, Variant, Wanted


@cache
def drawn(wanted: Wanted = ENGINE) -> tuple[Case, ...]:
    found: list[Case] = []

    @seed(7)
    @settings(
        max_examples=200,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(session_cases(wanted))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


def test_drawn_sessions_keep_the_limits() -> None:
    mix = default_mix().session
    for case in drawn():
        live: dict[int, int] = {}
        for step in case.steps:
            live = {uid: n for uid, n in live.items() if uid not in step.finished}
            live |= {r.uid: r.kv_len for r in step.requests}
            assert len(live) <= mix.max_live
            assert sum(live.values()) <= mix.token_limit
        assert case.session
        assert len(case.steps) <= mix.max_actions
        assert from_json(to_json(case)) == case


def test_drawn_sessions_reach_what_a_session_is_about() -> None:
    seen: Counter[str] = Counter()
    for case in drawn():
        live: set[int] = set()
        gone: set[int] = set()
        for step in case.steps:
            live -= set(step.finished)
            gone |= set(step.finished)
            computed = {r.uid for r in step.requests}
            seen[step.kind] += 1
            seen["finished"] += bool(step.finished)
            seen["waiting"] += bool(live - computed)
            seen["came back"] += bool(computed & gone)
            seen["lender waits"] += any(r.prefix_of in live - computed for r in step.requests)
            seen["lender computes"] += any(r.prefix_of in live & computed for r in step.requests)
            seen["from elsewhere"] += any(
                r.stored_len > r.prefix_len for r in step.requests if r.uid not in live
            )
            live |= computed
            gone -= computed
    kinds = {"decode", "prefill", "mixed", "chunked", "verify"}
    events = {"finished", "waiting", "came back", "lender waits", "lender computes", "from elsewhere"}
    assert {name for name, count in seen.items() if count >= 5} >= kinds | events


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_backend_of_one_phase_is_asked_that_phase(phase: CasePhase) -> None:
    assert {step.phase for case in drawn(Wanted(phases=frozenset({phase}))) for step in case.steps} == {phase}


def test_every_step_of_a_session_has_its_variant() -> None:
    both, half = (
        Variant(dtype="bfloat16", kv_dtype="bfloat16"),
        Variant(window=True, phases=frozenset({"prefill"})),
    )
    for case in drawn(replace(ENGINE, window=True, variants=(both, half))):
        assert both.holds(case)
    for case in drawn(replace(ENGINE, window=True, variants=(half,))):
        assert half.holds(case)


def test_the_smallest_session() -> None:
    smallest = find(session_cases(), lambda _: True, settings=settings(database=None))
    assert smallest == Case((Step((Request(),)),), session=True)


def test_sessions_shrink_to_what_shows_the_fault() -> None:
    def row_reused(case: Case) -> bool:
        return any(step.finished for step in case.steps)

    found = find(session_cases(), row_reused, settings=settings(database=None, derandomize=True))
    smallest = simplify(found, row_reused)  # as the product shrinks: hypothesis alone may stop early
    assert [(len(step.requests), sum(step.kv_lens), bool(step.finished)) for step in smallest.steps] == [
        (1, 1, False),
        (1, 1, True),
    ]


def test_sessions_are_for_engines() -> None:
    with pytest.raises(ValueError, match=r"wanted\.level is kernel"):
        session_cases(KERNEL)


def test_a_full_schedule_lets_the_first_ones_go() -> None:
    schedule = Schedule(page_size=4, token_limit=16, max_live=2)
    for _ in range(3):
        schedule.admit(6)
    assert schedule.steps[2].finished == (0,)
    assert schedule.live == {1: 6, 2: 6}
    schedule.extend(list(schedule.live), 4)
    assert schedule.steps[3].finished == (1,)
    assert schedule.live == {2: 10}


def test_one_request_alone_outgrows_the_limit_and_starts_anew() -> None:
    schedule = Schedule(page_size=4, token_limit=8)
    schedule.admit(8)
    schedule.decode()
    assert schedule.steps[1] == Step((Request(uid=1),), "decode", "decode", finished=(0,))


def test_a_lender_that_had_to_go_lends_nothing() -> None:
    schedule = Schedule(page_size=4, token_limit=8)
    schedule.admit(8)
    schedule.hit(0, 3)
    assert schedule.steps[1] == Step((Request(extend_len=8, uid=1),), finished=(0,))


def test_who_lends_steps_not_back_into_the_prefix() -> None:
    schedule = Schedule(page_size=4)
    schedule.admit(4)
    schedule.hit(0, 2)
    schedule.verify(2)
    assert schedule.steps[2].requests == (Request(5, 2, 1),)
