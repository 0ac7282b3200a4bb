"""The edges of several batches: each shows what a backend must not remember."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Batch
from backends.fa import FAMetadata, FlashAttentionBackend
from backends.fi import FlashInferBackend
from backends.registry import spec_of
from cases.beyond_history import BEYOND_HISTORY
from cases.placement import pages_for
from conformance.altered import AlteredMetadata
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable


class PagesByUid(AlteredMetadata):
    """A request's pages are looked up again where their number has changed."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        known: dict[int, torch.Tensor] = self.__dict__.setdefault("known", {})
        table = metadata.page_table.clone()
        for row, req in zip(table, batch.padded_reqs, strict=True):
            count = pages_for(req.device_len, self.page_size)
            if len(known.get(req.uid, ())) != count:
                known[req.uid] = row[:count].clone()
            row[:count] = known[req.uid]
        return replace(metadata, page_table=table)


class PagesByRowAndFirst(FlashInferBackend):
    """Page ids are kept by row, first page and length."""

    def _page_ids(self, reqs: Any) -> torch.Tensor:
        known: dict[Any, torch.Tensor] = self.__dict__.setdefault("known", {})
        found: list[torch.Tensor] = []
        for req in reqs:
            row = self.page_table[req.table_idx, : req.device_len]
            key = (req.table_idx, int(row[0]), req.device_len)
            found.append(known.setdefault(key, row.clone()))
        return torch.cat(found)


class DraftsOfFirst(AlteredMetadata):
    """max_seqlen_q of every verify batch is that of the first."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        if batch.kind != "verify":
            return metadata
        return replace(metadata, max_seqlen_q=self.__dict__.setdefault("longest", metadata.max_seqlen_q))


class SortedKey(AlteredMetadata):
    """Lengths are kept by phase and their sorted values."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        known: dict[Any, FAMetadata] = self.__dict__.setdefault("known", {})
        key = (batch.phase, *sorted((req.extend_len, req.device_len) for req in batch.padded_reqs))
        made = known.setdefault(key, metadata)
        return replace(
            metadata,
            cache_seqlens=made.cache_seqlens,
            cu_seqlens_q=made.cu_seqlens_q,
            cu_seqlens_k=made.cu_seqlens_k,
        )


class _Replaying(FlashAttentionBackend):
    """A replay leaves the captured table alone where `key` is that of the last one."""

    def prepare_for_replay(self, batch: Batch) -> None:
        last: dict[int, Any] = self.__dict__.setdefault("last", {})
        size, requests = self.key(batch)
        table = self.captured.page_table.clone()
        super().prepare_for_replay(batch)
        if last.get(size) == requests:
            self.captured.page_table.copy_(table)
        last[size] = requests

    def key(self, batch: Batch) -> tuple[int, Any]:
        raise NotImplementedError


class CleanBySize(_Replaying):
    """The last one of the same size; another size may have written between."""

    def key(self, batch: Batch) -> tuple[int, Any]:
        sized = [
            (req.uid, req.table_idx, pages_for(req.device_len, self.page_size)) for req in batch.padded_reqs
        ]
        return len(batch.padded_reqs), sized


class CleanByUid(_Replaying):
    """The last one of any size had as many pages for the same uids."""

    def key(self, batch: Batch) -> tuple[int, Any]:
        return 0, [(req.uid, pages_for(req.device_len, self.page_size)) for req in batch.padded_reqs]


class PlansNewOfItsSize(FlashInferBackend):
    """A replay with the requests and lengths of the last one of its size is not planned; buffers serve all sizes."""

    def prepare_for_replay(self, batch: Batch) -> None:
        last: dict[int, Any] = self.__dict__.setdefault("last", {})
        size, requests = len(batch.padded_reqs), [(req.uid, req.device_len) for req in batch.padded_reqs]
        if last.get(size) != requests or batch.reqs[0].uid < 0:
            super().prepare_for_replay(batch)
        last[size] = requests


class CutAtCaptured(AlteredMetadata):
    """Eager decode batches lie in the graph's buffers, which are made for the largest captured size."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = metadata.cache_seqlens.clone()
        if batch.is_decode and "captured" in self.__dict__:
            lens[len(self.captured.cache_seqlens) :] = 1
        return replace(metadata, cache_seqlens=lens)


class PlansPowerOfTwo(FlashInferBackend):
    """The wrapper that is planned is the one for the next power of two, where there is such a graph."""

    def prepare_for_replay(self, batch: Batch) -> None:
        rounded = 1 << (len(batch.reqs) - 1).bit_length()
        if rounded == len(batch.padded_reqs) or rounded not in self.graph_wrappers:
            super().prepare_for_replay(batch)


class RingOf32(FlashAttentionBackend):
    """32 pinned buffers in turn, rewritten without a wait."""

    def _to_device(self, values: Any) -> torch.Tensor:
        ring: list[torch.Tensor] = self.__dict__.setdefault("ring", [])
        turn: int = self.__dict__.get("turn", 0)
        self.turn = turn + 1
        if len(ring) < 32:
            ring.append(torch.empty(256, dtype=torch.int32, pin_memory=True))
        part: torch.Tensor = ring[turn % 32][: len(values)]
        part.copy_(torch.tensor(values, dtype=torch.int32))
        return part.to(self.device, non_blocking=True)


FAULTS: dict[type[Any], tuple[str, str]] = {
    PagesByUid: ("back_with_as_many_pages", "metadata"),
    PagesByRowAndFirst: ("two_borrowers_in_one_row", "metadata"),
    DraftsOfFirst: ("verify_2_then_4_drafts", "metadata"),
    SortedKey: ("lengths_swapped", "metadata"),
    CleanBySize: ("three_then_one_then_three", "graphs"),
    PlansNewOfItsSize: ("three_then_one_then_the_same_three", "graphs"),
    CleanByUid: ("back_with_as_many_pages", "graphs"),
    CutAtCaptured: ("captured_for_the_smaller_alone", "graphs"),
    PlansPowerOfTwo: ("captured_for_3_and_4", "graphs"),
    RingOf32: ("session_of_64_tokens", "lifecycle"),
}


@pytest.fixture(scope="module")
def correct() -> Iterator[Asker]:
    try:
        with Session(["fa", "fi"], device_sim="full") as session:
            yield session.askers[0]
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_edge_shows_its_fault(correct: Asker, fault: type[Any]) -> None:
    name, check = FAULTS[fault]
    verdict = examine(Question(BEYOND_HISTORY[name][0]), replace(correct, spec=spec_of(fault)), {check})
    assert verdict.outcomes[check] is Outcome.MISMATCH, verdict


@pytest.mark.parametrize("name", BEYOND_HISTORY)
def test_a_correct_backend_passes(correct: Asker, name: str) -> None:
    verdict = examine(Question(BEYOND_HISTORY[name][0]), correct)
    assert not verdict.failed, verdict.findings
