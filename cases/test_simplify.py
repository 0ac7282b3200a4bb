"""A failing case gets as small as what it fails by, and stays valid on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from cases import Case, Heads, KernelRequest, Mask, Request, Step, to_json
from cases.assemble import Assembler
from cases.mix import default_mix
from cases.placement import place
from cases.simplify import simpler, simplify
from cases.wanted import ENGINE, KERNEL, Wanted


def _requests(case: Case) -> list[Request | KernelRequest]:
    return [r for step in case.steps for r in step.requests]


def _failing(wanted: Wanted, fails: Callable[[Case], bool], count: int) -> list[Case]:
    rng = random.Random(3)
    mix = default_mix().engine if wanted.level == "engine" else default_mix().kernel
    assembler = Assembler(mix, wanted)
    found: list[Case] = []
    while len(found) < count:
        case = assembler.build(
            rng.randbytes(rng.randint(1, 8)), rng.randbytes(assembler.settings.num_bytes), rng.randbytes
        )
        if fails(case):
            found.append(case)
    return found


def _decode(*kv_lens: int) -> Step:
    return Step(tuple(Request(n - 1, 1, i) for i, n in enumerate(kv_lens)), "decode", "decode")


ENGINE_FAULTS: dict[str, tuple[Callable[[Case], bool], Case]] = {
    "last_page_len 0": (
        lambda c: c.page_size > 1 and any(r.kv_len % c.page_size == 0 for r in _requests(c)),
        Case((_decode(2),), page_size=2),
    ),
    "last_page_len 0, from two pages on": (
        lambda c: (
            c.page_size > 1
            and any(r.kv_len % c.page_size == 0 and r.kv_len > c.page_size for r in _requests(c))
        ),
        Case((_decode(4),), page_size=2),
    ),
    "a mixed batch": (
        lambda c: any(s.kind == "mixed" for s in c.steps),
        Case((Step((Request(),), kind="mixed"),)),
    ),
    "one key past two large pages": (
        lambda c: c.page_size == 16 and any(r.kv_len == 33 for r in _requests(c)),
        Case((_decode(33),), page_size=16),
    ),
    "stale plan": (
        lambda c: any(a.kv_lens < b.kv_lens for a, b in zip(c.steps, c.steps[1:], strict=False)),
        Case((_decode(1), _decode(2))),
    ),
    "shared page": (
        lambda c: c.page_size > 1 and any(r.prefix_of is not None for r in _requests(c)),
        Case((Step((Request(2, 1), Request(2, 1, 1, 0, 2)), "decode", "decode"),), page_size=2),
    ),
    "causal from the top left": (
        lambda c: any(1 < r.qo_len < r.kv_len for r in _requests(c)),
        Case((Step((Request(1, 2),)),)),
    ),
    "group of seven": (lambda c: c.heads.group_size == 7, Case((_decode(1),), heads=Heads(7, 1))),
    "an address beyond 50 slots": (
        lambda c: any(int(own.max()) >= 50 for placed in place(c).steps for own in placed.slots),
        Case((_decode(1),), placement="reversed", spare_pages=50),
    ),
    "context limit": (
        lambda c: any(r.kv_len == c.max_seq_len for r in _requests(c)) and c.page_size > 1,
        Case((_decode(1),), page_size=2, max_seq_len=1),
    ),
}


@pytest.mark.parametrize(("fails", "smallest"), ENGINE_FAULTS.values(), ids=list(ENGINE_FAULTS))
def test_engine(fails: Callable[[Case], bool], smallest: Case) -> None:
    for case in _failing(ENGINE, fails, 6):
        assert to_json(simplify(case, fails)) == to_json(smallest)


def _kernel(qo_len: int, kv_len: int, **settings: Any) -> Case:
    phase = "decode" if qo_len == 1 else "prefill"
    return Case(
        (Step((KernelRequest(qo_len, kv_len),), phase, phase),), level="kernel", num_layers=1, **settings
    )


KERNEL_FAULTS: dict[str, tuple[Callable[[Case], bool], Case]] = {
    "window": (
        lambda c: (
            c.mask.window is not None and any(r.qo_len and r.kv_len > c.mask.window for r in _requests(c))
        ),
        _kernel(1, 2, mask=Mask(window=1)),
    ),
    "rows without keys": (lambda c: any(r.qo_len > r.kv_len > 0 for r in _requests(c)), _kernel(2, 1)),
    "fp8": (
        lambda c: c.kv_dtype == "float8_e5m2" and any(r.qo_len == r.kv_len == 1 for r in _requests(c)),
        _kernel(1, 1, kv_dtype="float8_e5m2"),
    ),
    "soft cap on rows of a custom mask": (
        lambda c: (
            c.mask.custom is not None and c.mask.soft_cap == 30.0 and any(r.qo_len > 1 for r in _requests(c))
        ),
        _kernel(2, 0, mask=Mask(causal=False, soft_cap=30.0, custom=0)),
    ),
}


@pytest.mark.parametrize(("fails", "smallest"), KERNEL_FAULTS.values(), ids=list(KERNEL_FAULTS))
def test_kernel(fails: Callable[[Case], bool], smallest: Case) -> None:
    for case in _failing(KERNEL, fails, 4):
        assert to_json(simplify(case, fails)) == to_json(smallest)


def test_budget_bounds_the_calls() -> None:
    calls: list[Case] = []

    def fails(case: Case) -> bool:
        calls.append(case)
        return False

    case = Case((_decode(9, 4, 7),), page_size=4, placement="scattered")
    assert simplify(case, fails, budget=10) == case
    assert len(calls) == 10


def test_heirs_keep_a_shared_prefix() -> None:
    lent = Step((Request(4, 1, 0), Request(4, 2, 1, 0, 4), Request(6, 1, 2, 0, 4)))
    pairs = [
        c.steps[0].requests for c in simpler(Case((lent,), page_size=4)) if len(c.steps[0].requests) == 2
    ]
    assert (Request(4, 2, 1), Request(6, 1, 2, 1, 4)) in pairs


def _session(*steps: Step, page_size: int = 1) -> Case:
    return Case(steps, session=True, page_size=page_size)


def _step(*requests: Request, finished: tuple[int, ...] = ()) -> Step:
    return Step(requests, finished=finished)


def test_a_session_loses_its_steps_and_hangs_together() -> None:
    case = _session(
        _step(Request(extend_len=5)),
        _step(Request(extend_len=3, uid=1)),
        _step(Request(5, 2), Request(3, 1, 1)),
        _step(Request(7, 1), Request(extend_len=4, uid=2), finished=(1,)),
        _step(Request(8, 1), Request(4, 1, 2)),
    )

    def row_reused_beside_another(case: Case) -> bool:
        return any(step.finished and len(step.requests) > 1 for step in case.steps)

    smallest = simplify(case, row_reused_beside_another)
    first, second = smallest.steps
    assert (first.kv_lens, second.kv_lens) == ((1,), (1, 1))
    assert second.finished == (first.requests[0].uid,)
    assert first.kind == second.kind == "decode"


def test_a_session_with_a_prefix_keeps_the_lender() -> None:
    case = _session(
        _step(Request(extend_len=9)),
        _step(Request(8, 3, 1, prefix_of=0, prefix_len=8)),
        _step(Request(11, 1, 1), finished=(0,)),
        page_size=4,
    )

    def outlives(case: Case) -> bool:
        lent = {r.uid: r.prefix_of for step in case.steps for r in step.requests if r.prefix_of is not None}
        return any(lent[uid] in step.finished for step in case.steps for uid in lent)

    smallest = simplify(case, outlives)
    assert [step.finished for step in smallest.steps] == [(), (), (0,)]
    assert smallest.page_size == 1
    assert [len(step.requests) for step in smallest.steps] == [1, 1, 1]
    assert max(max(step.kv_lens) for step in smallest.steps) <= 3


def test_a_fault_that_needs_no_session_leaves_it() -> None:
    case = _session(_step(Request(extend_len=2)), _step(Request(extend_len=3, uid=1), finished=(0,)))
    smallest = simplify(case, lambda case: max(max(step.kv_lens) for step in case.steps) >= 3)
    assert not smallest.session
    assert smallest.steps == (Step((Request(2),), "decode", "decode"),)


def test_a_long_session_gets_small_in_few_calls() -> None:
    calls = 0

    def needs_twenty_steps(case: Case) -> bool:
        nonlocal calls
        calls += 1
        return len(case.steps) >= 20

    steps = [_step(*(Request(5 * i + uid, 5, uid) for uid in range(3))) for i in range(1, 24)]
    first = _step(*(Request(extend_len=5 + uid, uid=uid) for uid in range(3)))
    smallest = simplify(_session(first, *steps), needs_twenty_steps)
    assert smallest.steps == (Step((Request(),), "decode", "decode"),) * 20
    assert calls < 400, "one step shorter must not mean to try everything again"


@pytest.mark.parametrize("session", [False, True])
def test_a_request_is_given_for_a_token(session: bool) -> None:
    """Four requests of one token, where as many tokens in one request do as well."""
    requests = tuple(Request(uid=uid) for uid in range(4))
    case = Case((Step(requests),), session=session)
    found = simplify(case, lambda case: sum(sum(step.kv_lens) for step in case.steps) >= 4)
    (step,) = found.steps
    assert step.kv_lens == (4,)
