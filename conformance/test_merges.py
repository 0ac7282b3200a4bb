"""Merges are held to float32 where a real library gives nothing finer."""

from __future__ import annotations

import pytest

from cases.model import Case, KernelRequest, Mask, Step
from conformance.checks import lse
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Trial


@pytest.mark.parametrize("backend", ["kernel:fi-merge", "kernel:fa-merge"])
def test_a_large_lse_is_held_to_float32(backend: str) -> None:
    case = Case(
        (Step((KernelRequest(64, 64),), "prefill", "prefill"),),
        level="kernel",
        num_layers=1,
        page_size=16,
        mask=Mask(soft_cap=50.0),
        values="extreme",
    )
    with Session([backend]) as session:
        trial = Trial(Question(case), session.askers[0])
        (run,) = trial.first.steps
        handed = run.layers[0]
        handed.exact_lse = None
        assert handed.lse_values is not None
        assert float(handed.lse_values.abs().max()) > 32.0
        assert lse.check(trial) == []
        handed.lse_values += 1e-3
        assert lse.check(trial)
