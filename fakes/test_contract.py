"""Every rule of the contract holds on the fakes, for every release that it names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from importlib import import_module

import pytest

from fakes import cuda, recorder, releases
from fakes.contract import rules
from fakes.contract.rule import Lab, Observation, Rule, observe

ALL = rules()
CASES = [(rule, release) for rule in ALL for release in rule.verdicts if rule.device == "light"]


@pytest.fixture(autouse=True, scope="module")
def _device() -> Iterator[None]:
    with cuda.simulated_cuda("light"):
        yield


def _id(case: object) -> str:
    return case.id if isinstance(case, Rule) else str(case)


def _seen(rule: Rule, release: str, mode: recorder.Mode) -> tuple[Observation, recorder.Recorder]:
    library = import_module(f"fakes.{rule.library}")
    with releases.select(**{rule.library: release}), recorder.recording(mode) as record:
        lab = Lab(library, "cuda", mark=lambda batch: setattr(record, "at", batch))
        return observe(rule, lab), record


@pytest.mark.parametrize(("rule", "release"), CASES, ids=_id)
def test_faithful_fake_does_what_was_measured(rule: Rule, release: str) -> None:
    seen, record = _seen(rule, release, "faithful")
    assert rule.verdicts[release].accepts(seen), f"{rule.id}: {rule.verdicts[release]} expected, saw {seen}"
    assert not record.findings


@pytest.mark.parametrize(("rule", "release"), [case for case in CASES if case[0].silent(case[1])], ids=_id)
def test_strict_fake_records_what_the_library_gets_wrong_in_silence(rule: Rule, release: str) -> None:
    seen, record = _seen(rule, release, "strict")
    assert record.findings, f"{rule.id}: no finding, saw {seen}"
    if rule.finding is not None:
        assert rule.finding in {f.rule for f in record.findings}, record.findings
    assert all(f.message and f.argument for f in record.findings)


LONG = ("flashinfer.longest", "flashinfer.long-and-short")
TOLERATED = {"sgl_kernel.fa.max_seqlen_q.short", "sgl_kernel.fa.cu_seqlens_q.rows"}
"""Findings of strict mode about calls that sgl_kernel answers right."""


@pytest.mark.parametrize(
    ("rule", "release"),
    [c for c in CASES if c[0].verdicts[c[1]].kind == "right" and not c[0].id.startswith(LONG)],
    ids=_id,
)
def test_strict_fake_finds_nothing_in_what_is_right_by_right(rule: Rule, release: str) -> None:
    seen, record = _seen(rule, release, "strict")
    assert rule.verdicts[release].accepts(seen), f"{rule.id}: saw {seen}"
    assert {f.rule for f in record.findings} <= {rule.finding, *TOLERATED}, record.findings
    if rule.finding is not None:
        assert record.findings


def test_rule_ids_are_unique() -> None:
    repeated = [name for name, count in Counter(rule.id for rule in ALL).items() if count > 1]
    assert not repeated


def test_rules_that_need_more_than_the_light_device_are_listed() -> None:
    waiting = {rule.id for rule in ALL if rule.device != "light" and rule.library == "flashinfer"}
    assert waiting == {
        "flashinfer.graph-replan-replayed",
        "flashinfer.graph-stale-replayed",
    }
