from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Batch, EngineContext
from backends.registry import spec_of
from backends.torch_sdpa import TorchBackend
from cases.strategies import engine_cases
from conformance.campaign import Campaign
from conformance.examine import examine
from conformance.find import MAX_SHRINKS, smallest
from conformance.mutants import MUTANTS
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session
from conformance.sweep import draw
from conformance.trial import Asker


class SecondPageWrong(TorchBackend):
    """Wrong wherever a request of a batch of two or more has a second page."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch) -> Any:
        out = super().forward(q, k, v, layer_id, batch)
        wrong = len(batch.reqs) > 1 and any(r.device_len > self.page_size > 1 for r in batch.reqs)
        return out + 1 if wrong else out

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.page_size: int = engine.page_size


class Flickers(TorchBackend):
    """Wrong in its first two forwards of the process, right from then on."""

    left = 2

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch) -> Any:
        out = super().forward(q, k, v, layer_id, batch)
        if Flickers.left:
            Flickers.left -= 1
            return out + 1
        return out


@pytest.fixture(scope="module")
def asker() -> Iterator[Asker]:
    with Session(["torch"]) as session:
        yield session.askers[0]


def test_smallest_case_is_small(asker: Asker) -> None:
    faulty = replace(asker, spec=spec_of(SecondPageWrong))
    case = smallest(faulty, "values", engine_cases(), seed=0, max_examples=300)
    assert case is not None
    (step,) = case.steps
    assert (len(step.requests), sorted(step.kv_lens), case.page_size) == (2, [1, 3], 2)
    assert (case.heads.num_qo_heads, case.placement, case.values) == (1, "sequential", "needles")


def test_full_last_page_shrinks_to_one_request_of_one_page() -> None:
    mutant = MUTANTS["lastlen_0_when_multiple"]
    with Session([mutant.base]) as session:
        correct = session.askers[0]
        planted = replace(correct, spec=mutant.spec(correct.spec))
        case = smallest(planted, "metadata", engine_cases(), seed=1, max_examples=300)
    assert case is not None
    assert [step.kv_lens for step in case.steps] == [(case.page_size,)]


def test_same_seed_finds_the_same_case(asker: Asker) -> None:
    faulty = replace(asker, spec=spec_of(SecondPageWrong))
    found = {smallest(faulty, "values", engine_cases(), seed=5, max_examples=200) for _ in range(2)}
    assert len(found) == 1


class LongWrongShortRaises(TorchBackend):
    """Wrong from three tokens on; of two it takes none."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch) -> Any:
        longest = max(r.device_len for r in batch.reqs)
        if longest == 2:
            raise ValueError("two tokens")
        out = super().forward(q, k, v, layer_id, batch)
        return out + 1 if longest > 2 else out


def test_another_way_to_fail_is_not_taken_for_it(asker: Asker) -> None:
    faulty = replace(asker, spec=spec_of(LongWrongShortRaises))
    case = smallest(faulty, "values", engine_cases(), seed=0, max_examples=100)
    assert case is not None
    assert examine(Question(case), faulty).outcomes["values"] is Outcome.MISMATCH
    assert max(r.kv_len for step in case.steps for r in step.requests) == 3


class LongRaisesShortWrong(TorchBackend):
    """Takes no six tokens, and is wrong about two."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch) -> Any:
        longest = max(r.device_len for r in batch.reqs)
        if longest >= 6:
            raise ValueError("six tokens")
        out = super().forward(q, k, v, layer_id, batch)
        return out + 1 if longest == 2 else out


@pytest.mark.parametrize("seed", range(3))
def test_a_campaign_shrinks_to_what_failed_as_before(seed: int) -> None:
    with Session([LongRaisesShortWrong]) as session:
        campaign = Campaign(session.askers, count=40, seed=seed, checks=["values"])
        campaign.run()
        name = session.specs[0].name
        known, failure = campaign.failure(name, "values"), campaign.shrink(name, "values")
    assert failure.verdict.outcomes["values"] is known.verdict.outcomes["values"]


def test_correct_backend_has_none(asker: Asker) -> None:
    assert smallest(asker, "values", engine_cases(), seed=0, max_examples=20) is None


def test_search_asks_the_cases_that_a_run_asks(asker: Asker) -> None:
    (drawn,) = draw(engine_cases(), 25, 4)
    seen: list[EngineContext] = []

    class Spy(TorchBackend):
        def __init__(self, engine: EngineContext) -> None:
            super().__init__(engine)
            seen.append(engine)

    asked = replace(asker, spec=spec_of(Spy))
    smallest(asked, "values", engine_cases(), seed=4, max_examples=25)
    pages = [(e.page_size, e.num_qo_heads, e.max_batch) for e in seen]
    want = [
        (c.page_size, c.heads.num_qo_heads, max(len(s.requests) for s in c.steps))
        for c in dict.fromkeys(drawn)
    ]
    assert pages == want


def test_flickering_fault_is_still_reported() -> None:
    with Session([Flickers]) as session:
        campaign = Campaign(session.askers, count=10)
        campaign.run()
        (failure, *_) = campaign.failures(session.specs[0].name)
    assert "values" in failure.checks


def test_search_ends(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_SHRINKS >= 1000
    monkeypatch.setattr("conformance.find.MAX_SHRINKS", 3)
    faulty = replace(asker, spec=spec_of(SecondPageWrong))
    assert smallest(faulty, "values", engine_cases(), seed=0, max_examples=300) is not None
