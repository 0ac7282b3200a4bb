"""Tokens that FlashInfer's own kernel stores: which array is named where they go elsewhere, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Batch
from backends.fi_base import FIMetadata
from backends.fi_paged import FlashInferPagedBackend
from backends.registry import spec_of
from cases.batches import decode, step
from cases.model import Case
from conformance.appending import AppendingBackend
from conformance.examine import examine
from conformance.outcome import Outcome, Verdict
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable

HITS = Case((step("mixed", [(3, 2), (0, 4), (2, 3)], 0),), page_size=2, placement="scattered")

Places = dict[str, torch.Tensor]
Change = Callable[[Places], Places]


@pytest.fixture(scope="module")
def correct() -> Iterator[Asker]:
    try:
        with Session(["fi-paged"], device_sim="full") as session:
            yield session.askers[0]
    except DeviceUnavailable as error:
        pytest.skip(str(error))


def asked(correct: Asker, faulty: type[AppendingBackend]) -> Verdict:
    spec = replace(spec_of(AppendingBackend), factory=faulty)
    verdict = examine(Question(HITS), replace(correct, spec=spec))
    assert verdict.unsupported is None
    return verdict


def altered(change: Change) -> type[AppendingBackend]:
    class Altered(AppendingBackend):
        def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
            sound = super().places(metadata, num_tokens)
            return sound | change(sound)

    return Altered


def put(name: str, at: int, value: int) -> Change:
    def change(sound: Places) -> Places:
        array = sound[name].clone()
        array[at] = value
        return {name: array}

    return change


def numbers(name: str, *values: int) -> Change:
    return lambda sound: {name: torch.tensor(values, dtype=torch.int32).to(sound[name].device)}


def rolled(sound: Places) -> Places:
    return {"kv_indices": sound["kv_indices"].roll(1)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("positions", 1, 3), "positions[1] is 3, must be 4"),
        (
            numbers("positions", 0, 1, 0, 1, 2, 3, 0, 1, 2),
            "positions[0] is 0, must be 3: the request's stored tokens are not counted",
        ),
        (put("batch_indices", 1, 2), "batch_indices[1] is 2, must be 0"),
        (rolled, "kv_indices[1] is "),
    ],
)
def test_the_array_at_fault_is_named(correct: Asker, change: Change, message: str) -> None:
    verdict = asked(correct, altered(change))
    field = message.partition("[")[0]
    named = [f.message for f in verdict.findings if f.check == "metadata" and f.field == field]
    assert any(text.startswith(message) for text in named), verdict.findings


def test_pool_sees_two_tokens_that_change_places(correct: Asker) -> None:
    verdict = asked(correct, altered(numbers("positions", 4, 3, 0, 1, 2, 3, 2, 3, 4)))
    assert "pool" in verdict.failed
    assert "metadata" not in verdict.failed


class OtherWayRound(AppendingBackend):
    """Its requests are numbered from the last one on."""

    def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
        sound = super().places(metadata, num_tokens)
        counts = sound["kv_indptr"].diff()
        sizes = [int(count) for count in counts]
        parts: list[torch.Tensor] = list(sound["kv_indices"].split_with_sizes(sizes))
        indptr = torch.nn.functional.pad(counts.flip(0).cumsum(0), (1, 0))
        return sound | {
            "batch_indices": len(parts) - 1 - sound["batch_indices"],
            "positions": sound["positions"].long(),
            "kv_indices": torch.cat(parts[::-1]),
            "kv_indptr": indptr,
        }


class OtherWayRoundWrong(OtherWayRound):
    """One of its positions is wrong."""

    def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
        sound = super().places(metadata, num_tokens)
        return sound | put("positions", 1, 2)(sound)


class InThreeDimensions(AppendingBackend):
    """Its cache is one of slots, without pages."""

    def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
        sound = super().places(metadata, num_tokens)
        pages = sound["kv_indices"].repeat_interleave(self.page_size)
        offsets = torch.arange(len(pages), device=pages.device) % self.page_size
        return sound | {
            "kv_indices": (pages * self.page_size + offsets).int(),
            "kv_indptr": sound["kv_indptr"] * self.page_size,
        }

    def cache(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().cache(layer_id)
        return k.flatten(0, 1), v.flatten(0, 1)


class AllLayers(AppendingBackend):
    """One cache of all layers, whose page ids go on from layer to layer."""

    def cache(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        first = super().cache(0)
        pages = self.engine.num_pages * self.engine.num_layers
        self.given = self.given | {"kv_indices": self.ids + layer_id * self.engine.num_pages}
        return tuple(x.as_strided((pages, *x.shape[1:]), x.stride()) for x in first)  # type: ignore[return-value]

    def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
        sound = super().places(metadata, num_tokens)
        self.ids = sound["kv_indices"]
        return sound


class Elsewhere(AppendingBackend):
    """Appends to pages of its own, and stores as usual."""

    def places(self, metadata: FIMetadata, num_tokens: int) -> Places:
        sound = super().places(metadata, num_tokens)
        ids = torch.arange(len(sound["kv_indices"]), dtype=torch.int32, device=sound["kv_indices"].device)
        return sound | {"kv_indices": ids}

    def cache(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = super().cache(layer_id)
        return k.clone(), v.clone()

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
        layer_id, batch = args
        self.engine.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        return super()._run(q, k, v, *args, **options)


class ElsewhereAlone(Elsewhere):
    """Nobody stores to the pool before attention reads it."""

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
        found = AppendingBackend._run(self, q, k, v, *args, **options)
        layer_id, batch = args
        self.engine.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        return found


@pytest.mark.parametrize(
    "design", [OtherWayRound, InThreeDimensions, AllLayers, Elsewhere], ids=lambda design: design.__name__
)
def test_other_ways_to_append_are_right(correct: Asker, design: type[AppendingBackend]) -> None:
    verdict = asked(correct, design)
    assert not verdict.failed, verdict.findings


def test_where_requests_are_numbered_otherwise_no_array_is_named(correct: Asker) -> None:
    found = [f for f in asked(correct, OtherWayRoundWrong).findings if f.check == "metadata"]
    assert {f.field for f in found if f.layer is not None} <= {"out_loc", None}
    assert found[0].field == "out_loc"
    assert "stores position 4 of request 0 in slot" in found[0].message


def test_an_append_to_other_memory_is_no_store(correct: Asker) -> None:
    verdict = asked(correct, ElsewhereAlone)
    assert "lifecycle" in verdict.failed
    assert "metadata" not in verdict.failed


class Late(AppendingBackend):
    """Stores when attention has read."""

    def _run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, **options: Any) -> Any:
        pool, self.kv_pool = self.kv_pool, _Nothing(self.kv_pool)
        found = super()._run(q, k, v, *args, **options)
        self.kv_pool = pool
        layer_id, batch = args
        pool.store_kv(k, v, batch.out_loc, layer_id)
        return found


class _Nothing:
    """A pool that stores nothing."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def store_kv(self, *_: Any) -> None: ...


def test_the_librarys_own_store_must_come_before_attention(correct: Asker) -> None:
    found = [f for f in asked(correct, Late).findings if f.check == "lifecycle"]
    assert (
        found[0].message
        == "BatchPrefillWithPagedKVCacheWrapper.run read this step's keys before K and V were stored"
    )


class Captured(AppendingBackend):
    """Its captured appends read buffers that a replay fills."""

    capabilities = replace(AppendingBackend.capabilities, cuda_graph=True)

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        super().init_capture_graph(max_seq_len, bs_list)
        self.buffers: dict[int, Places] = {}

    def prepare_for_replay(self, batch: Batch) -> None:
        super().prepare_for_replay(batch)
        size = len(batch.padded_reqs)
        if size not in self.buffers:
            self.buffers[size] = {name: array.clone() for name, array in self.given.items()}
            self.buffers[size]["kv_indices"] = torch.zeros_like(self.captured.indices)
        for name, array in self.given.items():
            self.buffers[size][name][: len(array)].copy_(array)
        self.given = self.buffers[size]


class CapturedOnce(Captured):
    """Nobody fills the buffers again."""

    def prepare_for_replay(self, batch: Batch) -> None:
        FlashInferPagedBackend.prepare_for_replay(self, batch)
        if len(batch.padded_reqs) not in self.buffers:
            self.buffers[len(batch.padded_reqs)] = {}
            self.given = {name: array.clone() for name, array in self.given.items()}


REPLAYED = Case((decode(5, 3, 9), decode(6, 4, 10)), page_size=2)


@pytest.mark.parametrize("seed", range(4))
def test_captured_appends_are_right(correct: Asker, seed: int) -> None:
    backend = replace(correct, spec=spec_of(Captured))
    verdict = examine(Question(replace(REPLAYED, seed=seed)), backend)
    assert verdict.outcomes["graphs"] is Outcome.PASSED
    assert not verdict.failed, verdict.findings


def test_captured_appends_of_an_old_batch_are_seen(correct: Asker) -> None:
    backend = replace(correct, spec=spec_of(CapturedOnce))
    assert "graphs" in examine(Question(REPLAYED), backend).failed
