"""Known failures in a run: excused where they are known, told when they are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.registry import resolve
from cases.model import Case, KernelRequest, Step
from conformance.campaign import Campaign
from conformance.examine import examine
from conformance.matrix import matrix
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.selection import named_cases
from conformance.session import Session
from conformance.trial import Asker
from fakes.releases import select

BEFORE = Case((Step((KernelRequest(3, 2), KernelRequest(1, 1, uid=1))),), level="kernel", num_layers=1)
KEYLESS = Case((Step((KernelRequest(1, 0), KernelRequest(1, 3, uid=1))),), level="kernel", num_layers=1)
WAIVED = {
    "kernel:fi-prefill-fa3": (BEFORE, {"values"}),
    "kernel:fi-ragged-fa3": (BEFORE, {"values"}),
    "kernel:fi-merge": (KEYLESS, {"values", "lse", "poison"}),
    "kernel:fa-merge": (KEYLESS, {"metadata", "values", "lse", "poison"}),
}


@pytest.mark.parametrize("name", WAIVED)
def test_a_known_failure_is_known(name: str) -> None:
    case, checks = WAIVED[name]
    for seed in range(8):  # the merges draw by it how many states there are
        question = Question(replace(case, seed=seed))
        with Session([name]) as session:
            (one,) = session.askers
            verdict = examine(question, one)
            assert verdict.passed
            if Outcome.KNOWN not in verdict.outcomes.values():
                continue
            assert {c for c, outcome in verdict.outcomes.items() if outcome is Outcome.KNOWN} == checks
            assert all("[notyet: " in f.message and f.outcome is Outcome.KNOWN for f in verdict.findings)
            plain = Asker(replace(one.spec, waivers=()), one.machine, one.mode)
            assert examine(question, plain).failed == checks
            return
    pytest.fail("nothing failed")


def test_every_pinned_case_shows_its_fault() -> None:
    with Session(list(WAIVED)) as session:
        campaign = Campaign(session.askers)
        campaign.run()
        assert campaign.clean
        for name, tally in campaign.tallies.items():
            assert tally.outcomes["waivers"][Outcome.PASSED] >= 1, name


def test_a_stale_waiver_fails_the_run() -> None:
    spec = resolve("kernel:fi-prefill-fa3")
    right = resolve("kernel:fi-prefill")
    with Session(["kernel:fi-prefill"]) as session:
        (one,) = session.askers
        mended = replace(spec, factory=right.factory)
        campaign = Campaign([Asker(mended, one.machine, one.mode)])
        campaign.run()
        assert not campaign.clean
        (failure,) = campaign.failures(mended.name)
        assert failure.checks == {"waivers"}
        (message,) = [f.message for f in failure.verdict.findings]
        assert message.startswith("a stale waiver: its pinned case ended with values passed; remove it: ")
        assert "flashinfer.toml, waiver 1: notyet: fa3 gives rows" in message
        assert "FAIL 1/1" in matrix(campaign.tallies.values())


def test_nothing_is_waived_where_the_release_has_it_right() -> None:
    with select(flashinfer="0.7.4"), Session(["kernel:fi-prefill-fa3", "kernel:fi-merge"]) as session:
        campaign = Campaign(session.askers, given=[BEFORE, KEYLESS])
        campaign.run()
        assert campaign.clean
        for tally in campaign.tallies.values():
            assert "waivers" not in tally.outcomes
            assert not any(counts[Outcome.KNOWN] for counts in tally.outcomes.values())


def test_a_crash_is_not_excused_by_a_wrong_answer() -> None:
    waiver = resolve("kernel:fi-prefill-fa3").waivers[0]
    assert waiver.covers("values", Outcome.MISMATCH, BEFORE)
    assert not waiver.covers("values", Outcome.CRASHED, BEFORE)


def test_pinned_cases_are_of_the_corpus() -> None:
    for name in WAIVED:
        for waiver in resolve(name).waivers:
            assert waiver.case in named_cases("kernel")
