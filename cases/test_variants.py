"""Variants: every case drawn has the settings of one, and all of them come up."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from cases.model import Case
from cases.strategies import engine_cases, kernel_cases
from cases.wanted import ENGINE, KERNEL, Variant, Wanted

SMALL, LARGE = frozenset(range(1, 4)), frozenset(range(4, 65))
VARIANTS = (
    Variant(),
    Variant(dtype="bfloat16", kv_dtype="bfloat16", head_dims=(128, 128), window=True, group_sizes=LARGE),
    Variant(dtype="bfloat16", kv_dtype="float8_e4m3fn", soft_cap=True, group_sizes=SMALL),
    Variant(head_dims=(192, 128), window=True, soft_cap=True, phases=frozenset({"prefill"})),
    Variant(head_dims=(256, 256), phases=frozenset({"decode"})),
)


def drawn(wanted: Wanted, count: int = 200) -> list[Case]:
    cases: list[Case] = []
    strategy = engine_cases(wanted) if wanted.level == "engine" else kernel_cases(wanted)

    @seed(5)
    @settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
    )
    @given(strategy)
    def collect(case: Case) -> None:
        cases.append(case)

    collect()
    return cases


def wanting(base: Wanted, *variants: Variant) -> Wanted:
    return replace(
        base,
        variants=variants,
        window=True,
        soft_cap=True,
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        head_dims=frozenset({(64, 64), (128, 128), (192, 128), (256, 256)}),
    )


def test_every_case_has_the_settings_of_one() -> None:
    for base in (ENGINE, KERNEL):
        cases = drawn(wanting(base, *VARIANTS))
        reached = Counter(variant for case in cases for variant in VARIANTS if variant.holds(case))
        assert all(any(variant.holds(case) for variant in VARIANTS) for case in cases)
        assert min(reached[variant] for variant in VARIANTS) > len(cases) / 20


def test_one_variant_takes_no_byte() -> None:
    cases = drawn(wanting(KERNEL, VARIANTS[1]), 60)
    assert all(VARIANTS[1].holds(case) for case in cases)
    assert {case.mask.custom for case in cases} == {None}
    assert len({case.heads for case in cases}) > 2


def test_scales_come_with_an_fp8_cache_alone() -> None:
    for variant, scaled in ((VARIANTS[2], True), (VARIANTS[0], False)):
        cases = drawn(wanting(KERNEL, variant), 60)
        assert any((case.k_scale, case.v_scale) != (1.0, 1.0) for case in cases) is scaled


def test_variants_that_leave_nothing_are_passed_over() -> None:
    other = (Variant(phases=frozenset({"prefill"})), Variant(group_sizes=LARGE))
    wanted = replace(wanting(KERNEL, *other, VARIANTS[2]), phases=frozenset({"decode"}), group_sizes=SMALL)
    assert all(VARIANTS[2].holds(case) for case in drawn(wanted, 60))
    with pytest.raises(ValueError, match="no variant"):
        drawn(replace(wanted, variants=other))


def test_what_a_variant_does_not_hold() -> None:
    (case, *_) = drawn(wanting(KERNEL, VARIANTS[1]), 5)
    assert VARIANTS[1].holds(case)
    assert not any(variant.holds(case) for variant in VARIANTS if variant is not VARIANTS[1])
