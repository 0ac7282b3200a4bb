"""What a worker makes of a case after which its process, or its GPU, is not what it was; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cases.model import Case, Request, Step
from conformance.isolation import desk
from conformance.isolation.desk import judge
from conformance.isolation.messages import Broke, Judged, Retired
from conformance.machine import Machine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker

CASE = Case((Step((Request(2, 3),)),), page_size=4)
ILLEGAL = "CUDA error: an illegal memory access was encountered\nCompile with `TORCH_USE_CUDA_DSA`"


class Lost(Machine):
    """A GPU whose context was lost while the case ran."""

    def settle(self) -> None:
        raise RuntimeError(ILLEGAL)


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with Session(["torch"]) as session:
        yield session.askers[0]


def throwing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def examine(*_: object) -> None:
        raise error

    monkeypatch.setattr(desk, "examine", examine)


def test_lost_context_is_a_crash_whatever_the_checks_saw(asker: Asker) -> None:
    said = judge(Question(CASE), asker, None, Lost(None))
    assert isinstance(said, Retired)
    assert said.outcome is Outcome.CRASHED
    assert said.message == (
        "the CUDA context is lost: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert said.verdict is not None
    assert said.verdict.passed


def test_lost_context_that_the_harness_runs_into(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    throwing(monkeypatch, RuntimeError(ILLEGAL))
    said = judge(Question(CASE), asker, None, Lost(None))
    assert isinstance(said, Retired)
    assert (said.outcome, said.verdict) == (Outcome.CRASHED, None)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory.")])
def test_no_memory_for_the_harness(error: Exception, asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    throwing(monkeypatch, error)
    said = judge(Question(CASE), asker, None, None)
    assert isinstance(said, Retired)
    assert said.outcome is Outcome.RAISED
    assert said.message.startswith("no memory is left for the harness: ")


def test_late_error_is_the_backends(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    throwing(monkeypatch, RuntimeError("CUDA error: invalid configuration argument"))
    said = judge(Question(CASE), asker, None, Machine(None))
    assert isinstance(said, Retired)
    assert said.outcome is Outcome.RAISED
    assert said.message.endswith("RuntimeError: CUDA error: invalid configuration argument")


def test_fault_of_the_harness_is_told_as_one(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    throwing(monkeypatch, RuntimeError("a bug of ours"))
    for gpu in (None, Machine(None)):
        said = judge(Question(CASE), asker, None, gpu)
        assert isinstance(said, Broke)
        assert said.text.endswith("RuntimeError: a bug of ours\n")


def test_sound_process_goes_on(asker: Asker) -> None:
    said = judge(Question(CASE), asker, frozenset({"values"}), Machine(None))
    assert isinstance(said, Judged)
    assert said.verdict.outcomes == {"values": Outcome.PASSED}
    assert not said.last
