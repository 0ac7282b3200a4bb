"""Releases that were not measured: the fakes do what their stand-in did."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

from fakes import cuda, extract, recorder, releases
from fakes.contract import rules
from fakes.contract.rule import Lab, Rule, observe
from fakes.contract.unmeasured import STAND_INS, expected

CASES = [
    (rule, found.release)
    for found in STAND_INS
    for rule in rules(found.library)
    if rule.device == "light" and found.like in rule.verdicts and len(set(rule.verdicts.values())) > 1
]
"""Rules that tell releases apart: whatever else a fake does, it does for every release."""


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    with cuda.simulated_cuda("light"):
        yield


@pytest.mark.parametrize(("rule", "release"), CASES, ids=lambda c: c.id if isinstance(c, Rule) else str(c))
def test_fake_does_what_stands_in_for_a_measurement(rule: Rule, release: str) -> None:
    verdict, measured = expected(rule, release)
    assert verdict is not None
    assert not measured
    library = import_module(f"fakes.{rule.library}")
    with releases.select(**{rule.library: release}), recorder.recording("faithful") as record:
        seen = observe(rule, Lab(library, "cuda", mark=lambda batch: setattr(record, "at", batch)))
    assert verdict.accepts(seen), f"{rule.id}: {verdict} expected of {release}, saw {seen}"


def test_every_unmeasured_release_has_a_stand_in_that_was_measured() -> None:
    stands = {(s.library, s.release) for s in STAND_INS}
    assert stands == {(name, r) for name, unmeasured in releases.UNMEASURED.items() for r in unmeasured}
    for found in STAND_INS:
        assert found.like not in releases.UNMEASURED[found.library]
        assert found.release in extract.releases(found.library)


def test_a_measured_release_answers_for_itself() -> None:
    rule = rules("flashinfer")[0]
    release = next(iter(rule.verdicts))
    assert expected(rule, release) == (rule.verdicts[release], True)
    assert expected(rule, "9.9") == (None, False)
