"""Backends that copy, sort and gather before they call a library: right ones pass, wrong ones are named."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from backends.fa import FlashAttentionBackend
from conformance.copies import UNKNOWN, Known, Source, keys_and_values, rows_in_order
from conformance.examine import examine
from conformance.outcome import Finding
from conformance.question import Question
from conformance.selection import cases_for
from conformance.session import Session
from conformance.sweep import draw
from conformance.trial import Asker

pytestmark = pytest.mark.cpu


class Sorted(FlashAttentionBackend):
    """Requests by falling length: rows of q are permuted before the call, rows of the output after it."""

    capabilities = replace(FlashAttentionBackend.capabilities, cuda_graph=False)

    def prepare_metadata(self, batch: Any) -> None:
        reqs = batch.padded_reqs
        order = sorted(range(len(reqs)), key=lambda i: -reqs[i].device_len)
        starts = np.cumsum([0, *(r.extend_len for r in reqs)])
        rows = [row for i in order for row in range(starts[i], starts[i + 1])]
        batch.padded_reqs = [reqs[i] for i in order]
        super().prepare_metadata(batch)
        batch.padded_reqs = reqs
        self.order = self._to_device(rows).long()
        self.back = self._to_device(np.argsort(rows).tolist()).long()

    def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, *, return_softmax_lse: bool) -> Any:
        order, back = self.order, self.back
        given = super()._attend(q[order], k, v, layer_id, batch, return_softmax_lse=return_softmax_lse)
        return (given[0][back], given[1][:, back]) if return_softmax_lse else given[back]


class UnsortedWrongly(Sorted):
    """Takes the metadata of the requests in their own order."""

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        FlashAttentionBackend.prepare_metadata(self, batch)


class Gathers(FlashAttentionBackend):
    """K and V of the batch gathered from the pool into tensors of their own."""

    capabilities = replace(FlashAttentionBackend.capabilities, layouts=frozenset({"NHD"}), cuda_graph=False)

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        slots = [self.page_table[r.table_idx, : r.device_len] for r in batch.padded_reqs]
        self.slots = torch.cat(slots).long()

    def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, *, return_softmax_lse: bool) -> Any:
        metadata = batch.attn_metadata
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        caches = (self.kv_pool.k_cache(layer_id), self.kv_pool.v_cache(layer_id))
        keys, values = (cache.flatten(0, 1)[self.slots][:, None] for cache in caches)
        starts = torch.nn.functional.pad(metadata.cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
        pages = torch.arange(max(metadata.max_seqlen_k, 1), device=self.device, dtype=torch.int32)
        table = starts[:-1, None] + pages
        kept = self.kv_pool, metadata
        self.kv_pool = _Held(keys, values)
        batch.attn_metadata = replace(metadata, page_table=table.int())
        try:
            return super()._attend(q, k, v, layer_id, batch, return_softmax_lse=return_softmax_lse)
        finally:
            self.kv_pool, batch.attn_metadata = kept


class GathersOneLess(Gathers):
    """The last request's last key is read behind the copy."""

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        self.slots = self.slots[:-1]


class GathersAnother(Gathers):
    """The last request's first key is taken from the first request."""

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        if len(batch.padded_reqs) > 1:
            self.slots[-batch.padded_reqs[-1].device_len] = self.slots[0]


class MergesRounded(FlashAttentionBackend):
    """Keys in two parts, the prefix and the new tokens; their LSEs are copied, as `merge_state_v2` wants them."""

    capabilities = replace(FlashAttentionBackend.capabilities, cuda_graph=False, window=False, lse=None)

    def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, *, return_softmax_lse: bool) -> Any:
        merge_state_v2: Any = import_module("sgl_kernel.attention").merge_state_v2
        flash_attn_varlen_func: Any = import_module("sgl_kernel.flash_attn").flash_attn_varlen_func
        flash_attn_with_kvcache: Any = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache

        whole: Any = batch.attn_metadata
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        new = self._to_device([r.extend_len for r in batch.padded_reqs])
        starts = torch.nn.functional.pad(new.cumsum(0, dtype=torch.int32), (1, 0))
        cached = whole.cache_seqlens - new
        caches = (self.kv_pool.k_cache(layer_id), self.kv_pool.v_cache(layer_id))
        options = {
            "softmax_scale": self.engine.scale,
            "softcap": self.engine.soft_cap or 0.0,
            "max_seqlen_q": whole.max_seqlen_q,
            "cu_seqlens_q": whole.cu_seqlens_q,
            "return_softmax_lse": True,
        }
        old, old_lse, *_ = flash_attn_with_kvcache(
            q=q,
            k_cache=caches[0],
            v_cache=caches[1],
            page_table=whole.page_table,
            cache_seqlens=cached,
            **options,
        )
        own, own_lse, *_ = flash_attn_varlen_func(
            q, k, v, cu_seqlens_k=starts, max_seqlen_k=whole.max_seqlen_q, causal=True, **options
        )
        out, lse = merge_state_v2(old, old_lse.T.contiguous(), own, own_lse.T.contiguous())
        return (out, lse.T) if return_softmax_lse else out


class ScalesQueries(FlashAttentionBackend):
    """The softmax scale is multiplied into q, in the case's own dtype (a rounding that no budget of an LSE has)."""

    capabilities = replace(FlashAttentionBackend.capabilities, cuda_graph=False, lse=None)

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self.factor = engine.scale
        self.engine = replace(engine, scale=1.0)

    def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, *, return_softmax_lse: bool) -> Any:
        return super()._attend(q * self.factor, k, v, layer_id, batch, return_softmax_lse=return_softmax_lse)


class _Held:
    """A pool that is never written."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.k, self.v = k, v

    def store_kv(self, *_: object) -> None:
        """Has been done."""

    def k_cache(self, layer_id: int) -> torch.Tensor:
        return self.k

    def v_cache(self, layer_id: int) -> torch.Tensor:
        return self.v


def found_in(backend: type) -> list[Finding]:
    """What 40 random cases show."""
    with Session([f"{__name__}:{backend.__name__}"]) as session:
        asker = session.askers[0]
        assert isinstance(asker, Asker)
        cases = [case for drawn in draw(cases_for([asker.spec.capabilities]), 40, 0) for case in drawn]
        return [finding for case in cases for finding in examine(Question(case), asker).findings]


@pytest.mark.parametrize("backend", [Sorted, Gathers, MergesRounded, ScalesQueries])
def test_a_right_backend_that_copies_passes(backend: type) -> None:
    assert not found_in(backend)


@pytest.mark.parametrize(
    ("backend", "named"),
    [
        (UnsortedWrongly, "does not read"),
        (GathersAnother, "not its own"),
        (GathersOneLess, "the pool has"),
    ],
)
def test_metadata_names_what_a_copy_holds(backend: type, named: str) -> None:
    assert any(named in finding.message for finding in found_in(backend) if finding.check == "metadata")


ROWS = torch.arange(12.0).reshape(3, 2, 2)


def test_rows_are_known_by_their_content_in_any_dtype() -> None:
    known = Known([Source(ROWS, np.array([7, 8, 9]))], torch.float16)
    assert known.candidates(ROWS.half()[[2, 0]]) == [[9], [7]]
    assert known.candidates(ROWS.half() + 1.0) == [[], [], []]


def test_like_rows_are_taken_in_their_order_and_are_not_sure() -> None:
    names, sure = rows_in_order([[0, 1], [2], [0, 1], []])
    assert names.tolist() == [0, 2, 1, UNKNOWN]
    assert sure.tolist() == [False, True, False, False]


def test_a_row_that_comes_twice_may_be_padding() -> None:
    names, sure = rows_in_order([[0], [1], [0]])
    assert names.tolist() == [0, 1, 0]
    assert sure.tolist() == [False, True, False]


def test_a_key_and_its_value_settle_each_other() -> None:
    k, v, sure = keys_and_values([[3], [4, 5]], [[1, 3], [5, 6]])
    assert (k.tolist(), v.tolist(), sure) == ([3, 5], [3, 5], True)
    k, v, sure = keys_and_values([[3]], [[4]])
    assert (k.tolist(), v.tolist(), sure) == ([3], [4], True)
    assert not keys_and_values([[3, 4]], [[3, 4]])[2]
    assert not keys_and_values([[]], [[3]])[2]
