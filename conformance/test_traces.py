"""Batches of request traces, on correct backends and on one that loses a shared prefix."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import pytest

import cases
from cases.traces import batches, read_trace
from conformance.mutants import MUTANTS
from conformance.session import Session
from conformance.sweep import Sweep
from conformance.trial import Asker

DATA = Path(cases.__file__).parent / "testdata"
CORRECT = ["torch", "fi", "fi-paged", "fa", "fa,fi", "fi,fa"]


@pytest.mark.parametrize("trace", ["azure_tiny.csv", "mooncake_tiny.jsonl"])
def test_correct_backends_pass(trace: str) -> None:
    asked = list(batches(read_trace(DATA / trace), page_size=16))[::5]
    assert asked
    with Session(CORRECT) as session:
        sweep = Sweep(session.askers)
        sweep.ask_all(asked)
    assert {name: list(tally.failures) for name, tally in sweep.tallies.items() if not tally.clean} == {}


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_lost_prefix_is_caught(mode: str) -> None:
    mutant = MUTANTS["shared_prefix_lost"]
    asked = list(batches(read_trace(DATA / "mooncake_tiny.jsonl"), page_size=16))
    with Session([mutant.base], mode="strict" if mode == "strict" else "faithful") as session:
        (correct,) = session.askers
        sweep = Sweep([Asker(mutant.spec(correct.spec), correct.machine, correct.mode)])
        failures = sweep.tallies[mutant.name].failures
        sweep.ask_all(takewhile(lambda _: not failures, asked))
    assert mutant.check in failures
