"""What a backend changes beside its results, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Batch
from backends.fa import FlashAttentionBackend
from backends.registry import spec_of
from cases.batches import decode
from cases.model import Case
from conformance.examine import examine
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker

CASE = Case((decode(4, 2), decode(5, 3)))


class LeavesDoubles(FlashAttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        torch.set_default_dtype(torch.float64)


class LeavesNoGrad(FlashAttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        torch.set_grad_enabled(not torch.is_grad_enabled())


class LeavesStream(FlashAttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        torch.cuda.set_stream(torch.cuda.Stream())


class BuiltInDoubles(FlashAttentionBackend):
    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        torch.set_default_dtype(torch.float64)


class SortsPadded(FlashAttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        batch.padded_reqs.sort(key=lambda req: req.device_len)


class MarksRow(FlashAttentionBackend):
    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        batch.reqs[0].table_idx += 1


class DropsRequests(FlashAttentionBackend):
    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch, **named: Any
    ) -> Any:
        dropped: Any = None
        batch.padded_reqs = batch.reqs = dropped
        return super()._attend(q, k, v, layer_id, batch, **named)


class EmptiesSizes(FlashAttentionBackend):
    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        super().init_capture_graph(max_seq_len, bs_list)
        bs_list.clear()


class CapturedDoubles(FlashAttentionBackend):
    def prepare_for_capture(self, batch: Batch) -> None:
        super().prepare_for_capture(batch)
        torch.set_default_dtype(torch.float64)


CAPTURED: dict[type[Any], str] = {EmptiesSizes: "bs_list", CapturedDoubles: "default_dtype of torch"}
CHANGES: dict[type[Any], str] = {
    LeavesDoubles: "default_dtype of torch",
    BuiltInDoubles: "default_dtype of torch",
    LeavesNoGrad: "grad_mode of torch",
    LeavesStream: "current_stream of torch",
    SortsPadded: "padded_reqs",
    MarksRow: "reqs",
    DropsRequests: "reqs",
}


@pytest.fixture(scope="module")
def fa() -> Iterator[Asker]:
    with Session(["fa"]) as session:
        yield session.askers[0]


@pytest.mark.parametrize("fault", CHANGES, ids=lambda fault: fault.__name__)
def test_a_change_is_named_and_undone(fa: Asker, fault: type[Any]) -> None:
    before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.current_stream()
    verdict = examine(Question(CASE), replace(fa, spec=spec_of(fault)))
    assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.cuda.current_stream()) == before
    assert "inputs" in verdict.failed
    said = [finding.message for finding in verdict.findings if finding.check == "inputs"]
    assert said[0] == f"{CHANGES[fault]} was changed by the backend"


@pytest.mark.parametrize("fault", CAPTURED, ids=lambda fault: fault.__name__)
def test_a_change_of_the_captures_is_named_and_undone(fa: Asker, fault: type[Any]) -> None:
    before = torch.get_default_dtype()
    verdict = examine(Question(CASE), replace(fa, spec=spec_of(fault)))
    assert torch.get_default_dtype() is before
    assert verdict.failed == {"graphs"}
    assert verdict.findings[0].message == (
        f"while graphs were captured, {CAPTURED[fault]} was changed by the backend"
    )


def test_the_same_without_a_change(fa: Asker) -> None:
    assert not examine(Question(CASE), fa).failed
