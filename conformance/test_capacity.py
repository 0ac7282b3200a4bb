"""What is asked at the limits, and that nothing is said where there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cases.model import Case, Heads, Request, Step
from conformance.checks import capacity, graphs
from conformance.mutants import MUTANTS
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker, Trial


def decode(*kv_lens: int) -> Step:
    return Step(tuple(Request(n - 1, 1, i) for i, n in enumerate(kv_lens)), "decode", "decode")


CASE = Case((decode(4, 9, 2), Step((Request(0, 5, 7),))), page_size=4, dtype="float16")


def test_a_full_batch_is_as_large_as_the_engine_allows() -> None:
    full = capacity.at_the_limits(CASE)
    assert full is not None
    assert full.steps == (decode(13, 13, 13),)
    assert full.table_width == 13
    prefill = capacity.at_the_limits(Case((Step((Request(2, 3),)),), max_seq_len=8))
    assert prefill is not None
    assert prefill.steps == (Step((Request(7, 1),)),)
    assert capacity.at_the_limits(Case((decode(3000),))) is None


def test_without_graphs_a_full_batch_is_asked_eagerly() -> None:
    with Session(["fa"], device_sim="light") as session:
        (asker,) = session.askers
        trial = Trial(Question(CASE), asker)
        assert graphs.check(trial) is None
        assert capacity.check(trial) == []


@pytest.mark.parametrize("kv_len", [1, 7])
def test_a_table_that_is_cut_is_found_below_the_limit(kv_len: int) -> None:
    mutant = MUTANTS["last_column_cut"]
    with Session([mutant.base], device_sim="light") as session:
        (correct,) = session.askers
        asker = Asker(mutant.spec(correct.spec), correct.machine, correct.mode)
        found = capacity.check(Trial(Question(Case((decode(kv_len),))), asker))
    assert found
    assert f"a full batch (1 requests of max_seq_len {kv_len + 1} tokens)" in found[0].message


def test_what_is_wrong_in_any_engine_is_no_matter_of_room() -> None:
    mutant = MUTANTS["gqa_interleaved"]
    with Session([mutant.base], device_sim="light") as session:
        (correct,) = session.askers
        asker = Asker(mutant.spec(correct.spec), correct.machine, correct.mode)
        trial = Trial(Question(replace(CASE, heads=Heads(4, 2))), asker)
        assert trial.first.failure is None
        assert capacity.check(trial) == []
