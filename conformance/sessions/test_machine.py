from __future__ import annotations

import re

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from cases.model import Case, Heads, Request, Step
from conformance.mutants import MUTANTS
from conformance.session import Session
from conformance.sessions import machine_for
from conformance.trial import Asker

FEW = settings(
    max_examples=6,
    stateful_step_count=8,
    database=None,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # shrinking takes a while
    suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
)
CASE = Case((Step((Request(),)),), heads=Heads(2, 1), page_size=2, placement="scattered")


@pytest.mark.parametrize("name", ["torch", "fi"])
def test_correct_backends_pass(name: str) -> None:
    with Session([name]) as session:
        run_state_machine_as_test(machine_for(session.askers[0], CASE), settings=FEW)


@pytest.mark.slow
def test_a_fault_is_told_with_its_session() -> None:
    planted = MUTANTS["stored_where_the_last_batch_was"]
    with Session([planted.base]) as session:
        correct = session.askers[0]
        faulty = Asker(planted.spec(correct.spec), correct.machine, correct.mode)
        with pytest.raises(AssertionError) as caught:
            run_state_machine_as_test(machine_for(faulty), settings=FEW)
    said = str(caught.value)
    assert re.search(r"session: step \d+: what fails here \(", said)
    assert "one session" in said
    assert '"session":true' in said
