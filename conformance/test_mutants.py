"""The proof of the checks: every mutant is caught by the check that claims it, in both modes of the fakes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.fi_paged import FlashInferPagedBackend
from backends.registry import BackendSpec
from cases.model import Case, Request, Step
from conformance.checks import CHECKS
from conformance.examine import examine
from conformance.mutants import MUTANTS, Mutant
from conformance.mutants.lifecycles import decodes_by_xqa
from conformance.mutants.run import hunt
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable

OVERLAPPING = {"smoke", "poison", "session"}
"""Checks whose faults others see too, by nature."""

STRICT = [(m, "strict") for m in MUTANTS.values()]
FAITHFUL = list(
    {(m.base, m.check): (m, "faithful") for m in MUTANTS.values() if "faithful" in m.modes}.values()
)
"""One of each backend and check, for time; `make mutants` hunts all of them in both modes."""
HUNTS = [
    *(pytest.param(m, mode, id=f"{m.name}-{mode}") for m, mode in STRICT),
    *(pytest.param(m, mode, id=f"{m.name}-{mode}", marks=pytest.mark.slow) for m, mode in FAITHFUL),
]


@pytest.mark.parametrize(("mutant", "mode"), HUNTS)
def test_mutant_is_caught_and_shrunk(mutant: Mutant, mode: str) -> None:
    try:
        session = Session(
            [mutant.base], mode="strict" if mode == "strict" else "faithful", device_sim=mutant.device
        )
        with session:
            caught = hunt(mutant, session)
    except DeviceUnavailable as error:
        pytest.skip(str(error))
    assert caught.faults == [], f"{mutant.name} ({mutant.why}): {caught.case}"


def test_a_mutant_that_breaks_down_has_shown_nothing() -> None:
    meant_to_answer = replace(MUTANTS["one_token_fails"], raises=False)
    with Session([meant_to_answer.base]) as session:
        caught = hunt(meant_to_answer, session)
    assert caught.case is not None
    assert caught.faults[0].startswith("it raised: forward raised: IndexError")


def test_last_page_len_shrinks_to_one_full_page() -> None:
    case = _smallest("lastlen_0_when_multiple")
    (step,) = case.steps
    assert len(step.requests) == 1
    assert step.kv_lens == (case.page_size,)
    assert case.page_size == 2  # the smallest that shows it
    assert case.heads.num_qo_heads == 1


def test_last_page_len_is_named_with_its_cause() -> None:
    mutant = MUTANTS["lastlen_0_when_multiple"]
    with Session([mutant.base]) as session:
        verdict = hunt(mutant, session).verdict
    assert verdict is not None
    messages = [str(f) for f in verdict.findings if f.field and "last_page_len" in f.field]
    assert any("is 0" in m and "request 0" in m for m in messages)
    assert verdict.findings[0].check == "metadata"


def test_decode_on_counters_that_are_zero_is_right() -> None:
    """The fault of `counter_not_zero` is the workspace alone."""
    with Session(["fi-paged"]) as session:
        (correct,) = session.askers
        capabilities = replace(correct.spec.capabilities, lse=None, cuda_graph=False)
        faulty: Any = decodes_by_xqa(FlashInferPagedBackend, 0)
        backend = BackendSpec("zeros", faulty, capabilities)
        case = Case((Step((Request(80, 1), Request(0, 1, uid=1)), "decode", "decode"),), page_size=16)
        verdict = examine(Question(case), Asker(backend, correct.machine, correct.mode))
    assert not verdict.findings


def _smallest(name: str) -> Case:
    mutant = MUTANTS[name]
    with Session([mutant.base]) as session:
        case = hunt(mutant, session).case
    assert case is not None
    return case


def test_every_check_has_a_mutant_that_only_it_catches() -> None:
    claimed = {m.check for m in MUTANTS.values() if m.alone}
    assert claimed == CHECKS.keys() - OVERLAPPING


def test_every_mutant_names_a_check() -> None:
    assert {m.check for m in MUTANTS.values()} == CHECKS.keys()
    assert len(MUTANTS) >= 40


def test_half_of_the_mutants_show_without_the_contract() -> None:
    faithful = [m for m in MUTANTS.values() if "faithful" in m.modes]
    assert len(faithful) >= len(MUTANTS) / 2
