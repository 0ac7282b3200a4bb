from __future__ import annotations

from hypothesis import HealthCheck, given, settings

from cases.model import Case, Heads, KernelRequest, Mask, Request, Step
from cases.strategies import engine_cases, kernel_cases
from conformance.simplify import MAX_TRIES, simplify
from conformance.sweep import size

SMALLEST = Case((Step((Request(),)),))
BUSY = Case(
    (
        Step(tuple(Request(n, 2, 10 + n) for n in range(6))),
        Step(
            (Request(8, 1, 3), Request(9, 1, 4, prefix_of=3, prefix_len=8), Request(1, 1, 5)),
            "decode",
            "decode",
        ),
    ),
    heads=Heads(8, 2, 128, 128),
    page_size=8,
    layout="HND",
    placement="scattered",
    mask=Mask(window=3, soft_cap=2.0),
    dtype="bfloat16",
    values="random",
    strided=True,
    sm_scale=0.5,
    seed=77,
)


def test_what_always_fails_becomes_the_smallest_case() -> None:
    assert simplify(BUSY, lambda case: True) == SMALLEST
    kernel = Case((Step((KernelRequest(5, 9), KernelRequest(0, 2, 1))),), level="kernel", page_size=4)
    smallest = simplify(kernel, lambda case: True)
    assert smallest == Case((Step((KernelRequest(0, 0),)),), level="kernel")


def test_what_matters_is_kept() -> None:
    def full_page(case: Case) -> bool:
        return case.page_size > 1 and any(
            n % case.page_size == 0 for step in case.steps for n in step.kv_lens
        )

    found = simplify(BUSY, full_page)
    assert found == Case((Step((Request(0, 2),)),), page_size=2)

    def shared(case: Case) -> bool:
        return any(r.prefix_of is not None for step in case.steps for r in step.requests)

    found = simplify(BUSY, shared)
    assert found == Case((Step((Request(1, 1, 0), Request(1, 1, 1, 0, 1)), "decode", "decode"),))

    def two_steps(case: Case) -> bool:
        return len(case.steps) > 1 and case.mask.window is not None and case.heads.group_size == 4

    found = simplify(BUSY, two_steps)
    assert size(found) == (2, 4, 4)
    assert found.mask == Mask(window=3)
    assert found.heads == Heads(4, 1)


def test_it_asks_no_case_twice_and_ends() -> None:
    asked: list[Case] = []

    def fails(case: Case) -> bool:
        asked.append(case)
        return False

    assert simplify(BUSY, fails) == BUSY
    assert len(asked) == len(set(asked)) <= MAX_TRIES
    assert BUSY not in asked


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(engine_cases() | kernel_cases())
def test_every_case_comes_down(case: Case) -> None:
    found = simplify(case, lambda simpler: simpler.level == case.level)
    assert size(found) <= (1, 2, 1)
