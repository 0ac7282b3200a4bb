"""The edges beyond the mix: each shows the fault that it is there for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from backends.contract import Attention, Batch, KernelCall, Req
from backends.fa import FAMetadata, FlashAttentionBackend
from backends.fi import FlashInferBackend
from backends.kernels.fi_prefill import FlashInferPrefill
from backends.registry import spec_of
from cases.beyond import BEYOND
from cases.tensors import materialise
from conformance.altered import AlteredCalls, AlteredMetadata
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker


class Float16Lengths(AlteredMetadata):
    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        return replace(metadata, cache_seqlens=metadata.cache_seqlens.half().int())


class PagesOf32Halved(AlteredMetadata):
    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        return replace(metadata, page_table=metadata.page_table * 2) if self.page_size == 32 else metadata


class BufferFor16(AlteredMetadata):
    """Requests of a prefill batch from the 17th on have the 16th one's pages."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        if batch.is_decode or len(batch.padded_reqs) <= 16:
            return metadata
        table = metadata.page_table.clone()
        table[16:] = table[15]
        return replace(metadata, page_table=table)


class BufferFor128(AlteredMetadata):
    """Requests from the 129th on have one key."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = metadata.cache_seqlens.clone()
        lens[128:] = 1
        return replace(metadata, cache_seqlens=lens)


class ScratchOf512(FlashAttentionBackend):
    """K of a batch goes through a buffer of 512 rows."""

    def _attend(self, q: Any, k: Any, *rest: Any, **named: Any) -> Any:
        k = k.clone()
        k[512:] = 0
        return super()._attend(q, k, *rest, **named)


class SortedByLength(AlteredMetadata):
    """Requests on large pages in the order of their lengths, while q stays as it is: three or more."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = [req.device_len for req in batch.padded_reqs]
        if self.page_size < 64 or len(lens) < 3:
            return metadata
        order = sorted(range(len(lens)), key=lens.__getitem__)
        return replace(
            metadata,
            cache_seqlens=self._to_device([lens[i] for i in order]),
            cu_seqlens_k=self._to_device([0, *accumulate(lens[i] for i in order)]),
            page_table=metadata.page_table[self._to_device(order).long()],
        )


class PrefixOfTwo(AlteredMetadata):
    """The prefix that the first two requests share is taken for the others', too."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table, size = metadata.page_table, self.page_size
        if len(batch.padded_reqs) < 3:
            return metadata
        stored = min(req.cached_len for req in batch.padded_reqs[:2]) // size
        same = int((table[0, :stored] == table[1, :stored]).int().cumprod(0).sum())
        table = table.clone()
        table[:, :same] = table[0, :same]
        return replace(metadata, page_table=table)


class KeptByLengths(AlteredMetadata):
    """A decode batch with the rows and lengths of the one before has its metadata."""

    last: tuple[list[Req], FAMetadata] | None = None

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        def sized(reqs: list[Req]) -> list[tuple[int, int]]:
            return [(req.table_idx, req.device_len) for req in reqs]

        if self.last is not None and sized(self.last[0]) == sized(batch.padded_reqs):
            return self.last[1]
        self.last = batch.padded_reqs, metadata
        return metadata


class RowsOfOneTile(AlteredCalls):
    """Queries from row 128 on are those of row 127."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        rows = torch.arange(given["q"].shape[0]).clamp(max=127)
        return {"q": given["q"][rows.to(given["q"].device)]}


class WindowInTiles(AlteredCalls):
    """Windows of more than 64 keys end at a tile."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        window = given["window_size"][0] + 1
        return {"window_size": (window // 64 * 64 - 1, 0)} if window > 64 else {}


class ScaleOfValues(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"softmax_scale": self.engine.head_dim_vo**-0.5}


class HalfOfTheHead(AlteredCalls):
    """Of heads of 80, 96 and 256 half of q is read."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        q = given["q"].clone()
        if q.shape[2] in (80, 96, 256):
            q[:, :, q.shape[2] // 2 :] = 0
        return {"q": q}


class TwoLayers(AlteredCalls):
    """Caches of two layers, used in turn."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        pool = self.engine.kv_pool
        return {"k_cache": pool.k_cache(layer_id % 2), "v_cache": pool.v_cache(layer_id % 2)}


class WholeSixteens(AlteredMetadata):
    """Batches of whole sixteens lose a key of the last request."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        count = len(batch.padded_reqs)
        lens = metadata.cache_seqlens.clone()
        lens[-1] -= int(count % 16 == 0 and batch.reqs[-1].device_len > 1)
        return replace(metadata, cache_seqlens=lens)


class BufferFor64(AlteredMetadata):
    """Requests of a prefill batch from the 65th on have the 64th one's pages."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        if batch.is_prefill:
            table[64:] = table[63:64]
        return replace(metadata, page_table=table)


class ColumnsOfOneBlock(AlteredMetadata):
    """Of a page table 1,024 columns are copied."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        table[:, 1024:] = table[:, :1]
        return replace(metadata, page_table=table)


class UInt16Lengths(AlteredMetadata):
    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        return replace(metadata, cache_seqlens=metadata.cache_seqlens % 2**16)


class OneLender(AlteredMetadata):
    """Who shares the third request's first page is given the first one's."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        if len(table) > 3:
            table[3, 0] = torch.where(table[3, 0] == table[2, 0], table[0, 0], table[3, 0])
        return replace(metadata, page_table=table)


class KeptByShortUid(AlteredMetadata):
    """Lengths are kept by the low 16 bits of a uid."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = {req.uid % 2**16: req.device_len for req in reversed(batch.padded_reqs)}
        kept = [lens[req.uid % 2**16] for req in batch.padded_reqs]
        return replace(metadata, cache_seqlens=self._to_device(kept))


class HeadsByShift(AlteredCalls):
    """Groups are rounded up to a power of two: heads of three and of six to a KV head read the wrong one."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        qo, kv = given["q"].shape[1], given["k_cache"].shape[2]
        rounded = 1 << (qo // kv - 1).bit_length()
        order = [(head // rounded) % kv * (qo // kv) + head % (qo // kv) for head in range(qo)]
        return {"q": given["q"][:, order]} if rounded != qo // kv else {}


class Int16Pages(FlashInferBackend):
    def _page_ids(self, reqs: Any) -> torch.Tensor:
        return super()._page_ids(reqs).to(torch.int16).int()


class ScalesBesideKeys(FlashInferPrefill):
    """v_scale is handed on beside a k_scale alone."""

    def attend(self, call: KernelCall) -> Attention:
        return super().attend(call if call.k_scale != 1.0 else replace(call, v_scale=1.0))


class ScalesBesideValues(FlashInferPrefill):
    def attend(self, call: KernelCall) -> Attention:
        return super().attend(call if call.v_scale != 1.0 else replace(call, k_scale=1.0))


class Int16KernelPages(FlashInferPrefill):
    def attend(self, call: KernelCall) -> Attention:
        pages = [[(page + 2**15) % 2**16 - 2**15 for page in own] for own in call.pages]
        return super().attend(replace(call, pages=pages))


FAULTS: dict[type[Any], tuple[str, ...]] = {
    PagesOf32Halved: ("pages_of_32_decode", "pages_of_32_prefill"),
    HalfOfTheHead: tuple(
        f"head_dims_{n}_{n}_{phase}" for n in (80, 96, 256) for phase in ("decode", "prefill")
    ),
    ScaleOfValues: ("head_dims_192_128_decode", "head_dims_192_128_prefill"),
    RowsOfOneTile: ("prompt_of_200", "prompts_over_row_tiles"),
    WindowInTiles: ("window_of_100_decode", "window_of_100_prefill"),
    SortedByLength: ("three_on_pages_of_64", "four_prompts_on_pages_of_128"),
    BufferFor16: ("thirty_three_prompts",),
    TwoLayers: ("three_layers_decode", "three_layers_prefill"),
    ScalesBesideKeys: ("kernel_v_scale_alone",),
    ScalesBesideValues: ("kernel_k_scale_alone",),
    Float16Lengths: ("decode_of_2049", "hit_of_2048"),
    Int16Pages: ("page_ids_above_int16_decode", "page_ids_above_int16_prefill"),
    Int16KernelPages: ("kernel_page_ids_above_int16",),
    PrefixOfTwo: ("two_of_four_share_page_1", "two_of_four_share_page_16", "two_of_three_share_prefill"),
    KeptByLengths: ("row_and_lengths_of_one_who_left",),
    BufferFor128: ("decode_of_257_requests", "prompts_of_130_requests"),
    ScratchOf512: ("prompt_of_520",),
    WholeSixteens: ("decode_of_16_32_48_requests",),
    BufferFor64: ("prompts_of_16_and_65_requests",),
    ColumnsOfOneBlock: ("decode_of_1100", "hit_of_1100"),
    UInt16Lengths: ("decode_of_65601",),
    OneLender: ("two_pairs_share_decode", "two_pairs_share_prefill"),
    KeptByShortUid: ("uids_above_int16",),
    HeadsByShift: ("three_kv_heads_decode", "three_kv_heads_prefill", "group_of_six"),
}


@pytest.fixture(scope="module")
def correct() -> Iterator[Asker]:
    with Session(["fa", "fi", "kernel:fi-prefill"]) as session:
        yield session.askers[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_edge_shows_its_fault(correct: Asker, fault: type[Any]) -> None:
    asker = replace(correct, spec=spec_of(fault))
    for name in FAULTS[fault]:
        verdict = examine(Question(BEYOND[name][0]), asker, {"metadata", "values"})
        assert verdict.failed, name
        assert Outcome.RAISED not in verdict.outcomes.values(), name


def test_no_pool_of_an_edge_is_large() -> None:
    for name, (case, _) in BEYOND.items():
        pool = materialise(case).pool_shape(case.heads.head_dim_qk)
        assert 2 * 2 * torch.Size(pool).numel() < 50e6, name
