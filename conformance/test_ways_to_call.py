"""Backends that cut a layer's work into calls of their own: by heads, by chunks of keys, with queries of their own.

What is right passes; what is wrong is named by its cause, and no array that is right for its call is blamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import pytest
import torch

from backends.contract import Batch, window_size
from backends.fa import FAMetadata, FlashAttentionBackend
from backends.fi_paged import FlashInferPagedBackend
from backends.registry import spec_of
from cases.batches import decode, step
from cases.model import Case, Heads, Mask, Request, Step
from conformance.examine import examine
from conformance.outcome import Finding
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable


class _Parts(FlashAttentionBackend):
    """One call of the kernel, to be made in other ways."""

    def _call(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata, **given: Any) -> Any:
        options = {
            "k_cache": self.kv_pool.k_cache(layer_id),
            "v_cache": self.kv_pool.v_cache(layer_id),
            "page_table": metadata.page_table,
            "cache_seqlens": metadata.cache_seqlens,
            "cu_seqlens_q": metadata.cu_seqlens_q,
            "max_seqlen_q": metadata.max_seqlen_q,
            "softmax_scale": self.engine.scale,
            "causal": True,
            "window_size": window_size(self.engine.windows[layer_id], causal=True),
            "softcap": self.engine.soft_cap or 0.0,
            "return_softmax_lse": True,
        }
        call = cast("Any", self.flash_attn_with_kvcache)  # pyright: ignore[reportUnknownMemberType]
        return call(q=q, **(options | given))

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        *,
        return_softmax_lse: bool,
    ) -> Any:
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        assert isinstance(batch.attn_metadata, FAMetadata)
        out, lse, *_ = self._by_parts(q, layer_id, batch.attn_metadata)
        return (out, lse) if return_softmax_lse else out

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        raise NotImplementedError


class HeadByHead(_Parts):
    """A call a KV head, over views of q and of the cache."""

    shift = 0

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        k, v = self.kv_pool.k_cache(layer_id), self.kv_pool.v_cache(layer_id)
        count, group = self.engine.num_kv_heads, q.shape[1] // self.engine.num_kv_heads
        parts: list[Any] = []
        for head in range(count):
            own = slice(head, head + 1)
            lens = metadata.cache_seqlens - self.shift if head else metadata.cache_seqlens
            given = {"k_cache": k[:, :, own], "v_cache": v[:, :, own], "cache_seqlens": lens}
            parts.append(self._call(q[:, head * group : (head + 1) * group], layer_id, metadata, **given))
        return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts])


class LastHeadShort(HeadByHead):
    shift = 1


class GroupsAsRows(_Parts):
    """Decode: the heads of a group are query rows of their KV head, as they see the same keys."""

    capabilities = replace(_Parts.capabilities, window=False, layer_windows=False)

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        if metadata.max_seqlen_q > 1:
            return self._call(q, layer_id, metadata)
        (rows, heads, dim), kv_heads = q.shape, self.engine.num_kv_heads
        group = heads // kv_heads
        packed = q.view(rows, kv_heads, group, dim).transpose(1, 2).reshape(-1, kv_heads, dim)
        given = {"cu_seqlens_q": metadata.cu_seqlens_q * group, "max_seqlen_q": group, "causal": False}
        out, lse, *_ = self._call(packed, layer_id, metadata, **given)
        out = out.view(rows, group, kv_heads, -1).transpose(1, 2).reshape(rows, heads, -1)
        return out, lse.view(kv_heads, rows, group).transpose(1, 2).reshape(heads, rows)


class ScaledQueries(_Parts):
    """The scale is in q already, which rounds it once more."""

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        return self._call(q * self.engine.scale, layer_id, metadata, softmax_scale=1.0)


class WarmsUp(_Parts):
    """Calls twice and uses the later result, as an autotuner does."""

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        self._call(q, layer_id, metadata)
        return self._call(q, layer_id, metadata)


class ByChunks(_Parts):
    """Decode: keys four at a time, every chunk merged in the dtype of the model."""

    capabilities = replace(
        _Parts.capabilities, window=False, layer_windows=False, cuda_graph=False, host_reads=1
    )

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        import sgl_kernel  # pyright: ignore[reportMissingImports]

        self.merge = cast("Any", sgl_kernel).merge_state_v2
        if metadata.max_seqlen_q > 1 or self.page_size > 1:
            return self._call(q, layer_id, metadata)
        out = lse = cast("Any", None)
        for first in self._chunks(range(0, metadata.max_seqlen_k, 4)):
            given = {
                "page_table": metadata.page_table[:, first : first + 4].contiguous(),
                "cache_seqlens": (metadata.cache_seqlens - first).clamp(0, 4),
                "causal": False,
            }
            part, its_lse, *_ = self._call(q, layer_id, metadata, **given)
            its_lse = its_lse.T.contiguous()
            out, lse = (part, its_lse) if out is None else self._merged(out, lse, part, its_lse)
        return out, lse.T

    def _chunks(self, chunks: range) -> range:
        return chunks

    def _merged(self, *states: torch.Tensor) -> Any:
        return self.merge(*states)


class IntoTheLast(ByChunks):
    """The latest keys first, and what is merged goes where the first state stood: 16 bits may hold the same."""

    def _chunks(self, chunks: range) -> range:
        return chunks[::-1]

    def _merged(self, *states: torch.Tensor) -> Any:
        out, lse, *_ = states
        merged, merged_lse = self.merge(*states)
        return out.copy_(merged), lse.copy_(merged_lse)


class CutToWindow(_Parts):
    """Decode in a window: the table holds the window's keys alone."""

    capabilities = replace(_Parts.capabilities, layer_windows=False, cuda_graph=False)
    from_the_front = False

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        window, metadata = self.engine.windows[0], batch.attn_metadata
        if window is None or metadata.max_seqlen_q > 1 or self.page_size > 1:
            return
        lens = [min(r.device_len, window) for r in batch.padded_reqs]
        table = torch.zeros((len(lens), max(lens)), dtype=torch.int32, device=self.device)
        for row, (r, n) in enumerate(zip(batch.padded_reqs, lens, strict=True)):
            first = 0 if self.from_the_front else r.device_len - n
            table[row, :n] = self.page_table[r.table_idx, first : first + n]
        batch.attn_metadata = replace(metadata, page_table=table, cache_seqlens=self._to_device(lens))

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        return self._call(q, layer_id, metadata)


class NoWindowInGraphs(_Parts):
    """What is captured reads all keys."""

    def _by_parts(self, q: torch.Tensor, layer_id: int, metadata: FAMetadata) -> Any:
        given = {"window_size": (-1, 0)} if torch.cuda.is_current_stream_capturing() else {}
        return self._call(q, layer_id, metadata, **given)


class CutFromTheFront(CutToWindow):
    from_the_front = True


class Appends(_Parts):
    """The kernel stores the new tokens: lengths are those of before."""

    capabilities = replace(_Parts.capabilities, cuda_graph=False)

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        reqs = batch.padded_reqs
        self.cached = self._to_device([r.cached_len for r in reqs])
        self.new = self._to_device([0, *accumulate(r.extend_len for r in reqs)])

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        *,
        return_softmax_lse: bool,
    ) -> Any:
        given = {"k": k, "v": v, "cache_seqlens": self.cached, "cu_seqlens_k_new": self.new}
        assert isinstance(batch.attn_metadata, FAMetadata)
        return self._call(q, layer_id, batch.attn_metadata, return_softmax_lse=return_softmax_lse, **given)


class AppendsAfter(Appends):
    """Lengths that count what the call stores."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        self.cached = batch.attn_metadata.cache_seqlens


class AppendsAll(Appends):
    """New tokens counted as keys are."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        self.new = batch.attn_metadata.cu_seqlens_k


class KeepsPlanWithinPage(FlashInferPagedBackend):
    """A replay of the pages that the last one had is not planned: its last pages hold more tokens, that is all."""

    held: list[int] | None = None

    def prepare_for_replay(self, batch: Batch) -> None:
        metadata = batch.attn_metadata
        pages = [*metadata.cu_seqlens_k_cpu.tolist(), *metadata.indices.tolist()]
        if pages == self.held:
            count = len(batch.padded_reqs)
            self.captured.last_page_len[:count].copy_(metadata.last_page_len_cpu, non_blocking=True)
            return
        self.held = pages
        super().prepare_for_replay(batch)


GROUPED = Case((decode(9, 4), step("mixed", [(9, 2), (0, 6)], 2)), heads=Heads(4, 2))
WIDE = replace(GROUPED, heads=Heads(2, 1, 128, 128))
LONG = Case((decode(63, 4),), heads=Heads(2, 1))
WINDOW = Case((decode(9, 4),), mask=Mask(window=3))
WITHIN_PAGE = Case(
    (
        Step((Request(0, 2, 0), Request(0, 5, 1))),
        Step((Request(2, 1, 0), Request(5, 1, 1)), "decode", "decode"),
        Step((Request(3, 1, 0), Request(6, 1, 1)), "decode", "decode"),
    ),
    page_size=4,
    session=True,
)

RIGHT: dict[type[Any], tuple[Case, ...]] = {
    HeadByHead: (GROUPED, WIDE),
    GroupsAsRows: (
        GROUPED,
        replace(GROUPED, heads=Heads(2, 1, 192, 128)),
        Case((decode(1),), heads=Heads(2, 1)),
    ),
    ScaledQueries: (GROUPED, WIDE, replace(WIDE, values="extreme")),
    WarmsUp: (GROUPED,),
    ByChunks: tuple(replace(LONG, seed=seed) for seed in range(12)),
    IntoTheLast: (Case((decode(61),), heads=Heads(1, 1, 256, 256), values="low"),),
    CutToWindow: (WINDOW, GROUPED),
    Appends: (GROUPED, WINDOW),
    KeepsPlanWithinPage: (WITHIN_PAGE,),
}


@pytest.fixture(scope="module")
def asker() -> Iterator[Callable[[type[Any]], Asker]]:
    try:
        with Session(["fa", "fi-paged"], device_sim="full") as session:
            fa, paged = session.askers
            yield lambda cls: replace(
                paged if issubclass(cls, FlashInferPagedBackend) else fa, spec=spec_of(cls)
            )
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("design", RIGHT, ids=lambda design: design.__name__)
def test_right_ways_pass(asker: Callable[[type[Any]], Asker], design: type[Any]) -> None:
    for case in RIGHT[design]:
        verdict = examine(Question(case), asker(design))
        assert verdict.unsupported is None
        assert not verdict.failed, verdict.findings


def _found(asker: Asker, case: Case, check: str = "metadata") -> list[Finding]:
    return [f for f in examine(Question(case), asker).findings if f.check == check]


def test_a_head_that_reads_too_few_keys_is_told_by_its_number(asker: Callable[[type[Any]], Asker]) -> None:
    (found, *_) = _found(asker(LastHeadShort), Case((decode(3),), heads=Heads(4, 2)))
    assert found.field is None
    assert "row 0, head 2 (request 0, position 2) does not read the key at position 2" in found.message


def test_lengths_of_a_table_that_is_cut_to_a_window_are_not_blamed(
    asker: Callable[[type[Any]], Asker],
) -> None:
    (found, *others) = _found(asker(CutFromTheFront), Case((decode(3),), mask=Mask(window=2)))
    assert found.field is None
    assert "does not read the key at position 2, reads the key at position 0" in found.message
    assert all(other.message == found.message for other in others)


@pytest.mark.parametrize(
    ("design", "words"),
    [
        (AppendsAfter, ["cache_seqlens[0] is 3, must be 2", "cache_seqlens[0] is 4 with what is appended"]),
        (AppendsAll, ["cu_seqlens_k_new[1] is 3, must be 1", "cache_seqlens[0] is 5 with what is appended"]),
    ],
)
def test_arrays_of_a_call_that_stores_are_those_of_before(
    asker: Callable[[type[Any]], Asker], design: type[Any], words: list[str]
) -> None:
    found = [f.message for f in _found(asker(design), Case((decode(3),)))]
    assert all(any(part in message for message in found) for part in words), found
    assert len({message for message in found if "must be" in message}) == 1


def test_a_window_that_a_graph_lacks_is_told_by_the_keys_it_reads(
    asker: Callable[[type[Any]], Asker],
) -> None:
    (found, *_) = _found(asker(NoWindowInGraphs), Case((decode(3),), mask=Mask(window=2)), "graphs")
    assert "row 0 (request 0, position 2) reads the key at position 0, which it must not see" in found.message
