"""The edges of features that meet: each shows a fault that only such a batch has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from backends.contract import Attention, Batch, KernelCall, window_size
from backends.fa import FAMetadata
from backends.kernels.fi_decode import FlashInferDecode
from backends.kernels.fi_prefill import FlashInferPrefill
from backends.registry import spec_of
from cases.beyond_features import BEYOND_FEATURES
from conformance.altered import AlteredCalls, AlteredMetadata
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker


def _longest(batch: Batch) -> int:
    return max(req.device_len for req in batch.padded_reqs)


class NoCapOnLong(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"softcap": 0.0} if _longest(batch) > 512 else {}


class WindowUpTo128(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"window_size": (min(given["window_size"][0], 127), 0)}


class ManyForgetWindows(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"window_size": (-1, 0)} if len(batch.padded_reqs) > 16 else {}


class ManyForgetCaps(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"softcap": 0.0} if len(batch.padded_reqs) > 16 else {}


class WindowsTakeTurns(AlteredCalls):
    """Layers of even and of odd number have the windows of the first two."""

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return {"window_size": window_size(self.engine.windows[layer_id % 2], causal=True)}


class FourLayers(AlteredCalls):
    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        pool = self.engine.kv_pool
        return {"k_cache": pool.k_cache(layer_id % 4), "v_cache": pool.v_cache(layer_id % 4)}


class _Heads(AlteredCalls):
    """Heads from `count` on are the first ones once more."""

    name: ClassVar[str]
    count: ClassVar[int]

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        tensor = given[self.name]
        heads = torch.arange(tensor.shape[-2], device=tensor.device) % self.count
        return {self.name: tensor.index_select(tensor.dim() - 2, heads)}


class FourKVHeads(_Heads):
    name, count = "k_cache", 4


class ThirtyTwoHeads(_Heads):
    name, count = "q", 32


class SixteenRowsOfOneHead(_Heads):
    """Of one KV head."""

    name, count = "q", 16


class FirstHeadOfLargePages(_Heads):
    name, count = "v_cache", 1

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        return super().altered(given, layer_id, batch) if self.page_size >= 64 else {}


class TableOf4096(AlteredMetadata):
    """Tokens; a prefill batch's."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        if batch.is_prefill:
            table[:, 4096 // self.page_size :] = table[:, :1]
        return replace(metadata, page_table=table)


class Int16PrefillLengths(AlteredMetadata):
    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = metadata.cache_seqlens
        return (
            replace(metadata, cache_seqlens=lens.short().int().clamp(min=1)) if batch.is_prefill else metadata
        )


class EightDrafts(AlteredMetadata):
    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        drafted = batch.kind in ("verify", "draft_extend")
        return replace(metadata, max_seqlen_q=min(metadata.max_seqlen_q, 8)) if drafted else metadata


class Int16Pages(AlteredMetadata):
    """Where a page holds more than one token."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table
        return replace(metadata, page_table=table.short().int()) if self.page_size > 1 else metadata


class SharersFollow(AlteredMetadata):
    """Who shares a first page is taken to stand behind its lender: the page goes to as many neighbours."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        count = int((table[:, 0] == table[0, 0]).sum())
        table[:count, 0] = table[0, 0]
        return replace(metadata, page_table=table)


class PrefixTooLong(AlteredMetadata):
    """Eight and more requests with 256 and more tokens in common share a page more than they do."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        table = metadata.page_table.clone()
        stored = min(req.cached_len for req in batch.padded_reqs) // self.page_size
        same = int((table[:, :stored] == table[:1, :stored]).all(0).int().cumprod(0).sum())
        if len(table) >= 8 and 256 <= same * self.page_size < stored * self.page_size:
            table[:, same] = table[0, same]
        return replace(metadata, page_table=table)


class RowsOfUniform(AlteredMetadata):
    """A decode batch of three and more equal lengths of whole pages has rows one after the other."""

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        lens = {req.device_len for req in batch.padded_reqs}
        if len(batch.padded_reqs) < 3 or len(lens) > 1 or self.page_size == 1 or max(lens) % self.page_size:
            return metadata
        first = batch.padded_reqs[0].table_idx
        rows = (first + torch.arange(len(batch.padded_reqs))) % len(self.page_table)
        table = self.page_table[rows.to(self.device), : max(lens) : self.page_size] // self.page_size
        return replace(metadata, page_table=table)


class OneScale(FlashInferDecode):
    """Equal scales are taken for one, which k has."""

    def attend(self, call: KernelCall) -> Attention:
        return super().attend(replace(call, v_scale=1.0) if call.k_scale == call.v_scale else call)


class ScalesInBFloat16(FlashInferDecode):
    def attend(self, call: KernelCall) -> Attention:
        k, v = (float(torch.tensor(scale).bfloat16()) for scale in (call.k_scale, call.v_scale))
        return super().attend(replace(call, k_scale=k, v_scale=v))


class _LongLoses(FlashInferDecode):
    """What a decode of more than 512 keys loses."""

    lost: ClassVar[dict[str, Any]]

    def attend(self, call: KernelCall) -> Attention:
        return super().attend(replace(call, **self.lost) if max(call.kv_lens) > 512 else call)


class LongLosesWindow(_LongLoses):
    lost: ClassVar[dict[str, Any]] = {"window": None}


class LongLosesCap(_LongLoses):
    lost: ClassVar[dict[str, Any]] = {"soft_cap": None}


class _Damages(FlashInferPrefill):
    """Head 0 of the last row is wrong where the kernel's fault would be."""

    def attend(self, call: KernelCall) -> Attention:
        found = super().attend(call)
        if self.at_fault(call):
            found.out[-1, 0] += 1.0
        return found

    def at_fault(self, call: KernelCall) -> bool:
        raise NotImplementedError


class PackedRows(_Damages):
    def at_fault(self, call: KernelCall) -> bool:
        return max(call.qo_lens) * call.q.shape[1] // call.k.shape[1] > 1024


class WholeTilesAhead(_Damages):
    def at_fault(self, call: KernelCall) -> bool:
        pairs = zip(call.qo_lens, call.kv_lens, strict=True)
        return call.causal and all(qo > 1 and kv > qo and (kv - qo) % 64 == 0 for qo, kv in pairs)


class UInt8Work(_Damages):
    def at_fault(self, call: KernelCall) -> bool:
        return len(call.qo_lens) * call.q.shape[1] > 255


FAULTS: dict[type[Any], tuple[str, ...]] = {
    NoCapOnLong: ("long_decode_soft_cap", "long_hit_soft_cap"),
    WindowUpTo128: ("long_decode_window_of_513", "long_hit_window_of_200"),
    ManyForgetWindows: ("twenty_decodes_layer_windows",),
    ManyForgetCaps: ("twenty_prompts_soft_cap",),
    WindowsTakeTurns: tuple(
        f"windows_in_{layers}_{phase}"
        for layers in ("five_of_six_layers", "the_first_two_layers")
        for phase in ("decode", "prefill")
    ),
    FourLayers: ("windows_in_five_of_six_layers_decode", "windows_in_five_of_six_layers_prefill"),
    FourKVHeads: ("eight_kv_heads_decode", "eight_kv_heads_prefill"),
    ThirtyTwoHeads: ("forty_query_heads_decode", "forty_query_heads_prefill"),
    SixteenRowsOfOneHead: ("group_of_20_decode", "group_of_20_prefill"),
    FirstHeadOfLargePages: ("two_kv_heads_on_pages_of_64_decode", "two_kv_heads_on_pages_of_128_prefill"),
    TableOf4096: ("hit_of_4200",),
    Int16PrefillLengths: ("hit_of_33000",),
    EightDrafts: ("verify_16_drafts", "draft_extend_of_9"),
    Int16Pages: ("pages_of_2_above_int16",),
    SharersFollow: ("pairs_interleaved_decode", "pairs_interleaved_prefill"),
    PrefixTooLong: ("nine_share_256_tokens",),
    RowsOfUniform: ("equal_whole_pages",),
    OneScale: ("kernel_equal_scales",),
    ScalesInBFloat16: ("kernel_scales_of_no_power_of_two",),
    LongLosesWindow: ("kernel_long_window_decode",),
    LongLosesCap: ("kernel_long_cap_decode",),
    PackedRows: ("kernel_wide_group_prefill",),
    WholeTilesAhead: ("kernel_keys_a_multiple_of_64_ahead",),
    UInt8Work: ("kernel_forty_decodes_of_eight_kv_heads",),
}


@pytest.fixture(scope="module")
def correct() -> Iterator[Asker]:
    with Session(["fa", "kernel:fi-prefill"]) as session:
        yield session.askers[0]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_edge_shows_its_fault(correct: Asker, fault: type[Any]) -> None:
    asker = replace(correct, spec=spec_of(fault))
    for name in FAULTS[fault]:
        verdict = examine(Question(BEYOND_FEATURES[name][0]), asker, {"metadata", "values"})
        assert verdict.unsupported is None, name
        assert verdict.failed, name
        assert Outcome.RAISED not in verdict.outcomes.values(), verdict.findings
