"""Faults of an engine's metadata builder over FlashInfer and FlashAttention: index arrays, lengths, windows."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from conformance.mutants.mutant import mutant
from conformance.mutants.planting import fa_fields, fi_fields, prepares


def _pinned(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=True)


@mutant(
    "lastlen_0_when_multiple",
    base="fi-paged",
    check="metadata",
    why="last_page_len is kv_len % page_size, 0 for a multiple",
    issue="flashinfer#320",
    tokens=2,
)
def _(cls: type[Any]) -> type[Any]:
    def last(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        if self.page_size == 1:
            return metadata.last_page_len_cpu  # always 1; the fault needs a remainder
        return _pinned([r.device_len % self.page_size for r in batch.padded_reqs])

    return prepares(cls, "LastLenModulo", fi_fields(last_page_len_cpu=last))


@mutant(
    "lastlen_from_pages",
    base="fi-paged",
    check="metadata",
    why="last_page_len is computed from the page count instead of the length",
    issue="flashinfer#2079",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def last(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        counts = [-(-r.device_len // self.page_size) for r in batch.padded_reqs]
        return _pinned([(count - 1) % self.page_size + 1 for count in counts])

    return prepares(cls, "LastLenFromPages", fi_fields(last_page_len_cpu=last))


@mutant(
    "read_as_int32",
    base="fi-paged",
    check="metadata",
    why="last_page_len is int64; the kernel reads its words as int32 (tensor cores and prefill)",
    issue="flashinfer#1654",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def last(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.last_page_len_cpu.long()

    return prepares(cls, "LastLenInt64", fi_fields(last_page_len_cpu=last))


@mutant(
    "indptr_without_leading_zero",
    base="fi",
    check="metadata",
    why="qo_indptr of a prefill is the running sum without its leading 0",
    issue="seed 000",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def cu_q(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        if batch.is_decode:
            return metadata.cu_seqlens_q_cpu
        return _pinned(list(accumulate(r.extend_len for r in batch.padded_reqs)))

    return prepares(cls, "NoLeadingZero", fi_fields(cu_seqlens_q_cpu=cu_q))


@mutant(
    "indices_int64",
    base="fi",
    check="metadata",
    why="kv_indices are int64; tensor cores and prefill read their words as int32",
    issue="flashinfer#5105",
)
def _(cls: type[Any]) -> type[Any]:
    def indices(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.indices.long()

    return prepares(cls, "IndicesInt64", fi_fields(indices=indices))


@mutant(
    "qo_indptr_counts_keys",
    base="fi",
    check="metadata",
    why="qo_indptr of a prefill over a cached prefix reuses kv_indptr (the no-prefix fast path taken always)",
    issue="seed 000",
)
def _(cls: type[Any]) -> type[Any]:
    def cu_q(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        if batch.is_decode:
            return metadata.cu_seqlens_q_cpu
        return _pinned([0, *accumulate(r.device_len for r in batch.padded_reqs)])

    return prepares(cls, "FastPathAlways", fi_fields(cu_seqlens_q_cpu=cu_q))


@mutant(
    "seq_lens_off_by_one",
    base="fi",
    check="metadata",
    why="seq_lens says one token less than indptr; the kernel ignores it, the next release may not",
    issue="FACTS: seq_lens wrong beside a right indptr",
    modes=("strict",),
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    def seq_lens(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.seq_lens_cpu - 1

    return prepares(cls, "SeqLensShort", fi_fields(seq_lens_cpu=seq_lens))


@mutant(
    "len_excludes_new",
    base="fa",
    check="metadata",
    why="cache_seqlens counts the cached tokens only, not the new ones",
    issue="sglang#26512",
)
def _(cls: type[Any]) -> type[Any]:
    def lens(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return self._to_device([r.cached_len for r in batch.padded_reqs])

    return prepares(cls, "NewTokensLost", fa_fields(cache_seqlens=lens))


@mutant(
    "decode_qo_indptr_counts_keys",
    base="fa",
    check="metadata",
    why="cu_seqlens_q of a decode batch is cu_seqlens_k instead of 0, 1, 2, ...",
    issue="seed 000",
)
def _(cls: type[Any]) -> type[Any]:
    def cu_q(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.cu_seqlens_k if batch.is_decode else metadata.cu_seqlens_q

    return prepares(cls, "DecodeCountsKeys", fa_fields(cu_seqlens_q=cu_q))


@mutant(
    "max_seqlen_q_too_small",
    base="fa",
    check="metadata",
    why="max_seqlen_q is 1 whatever the batch: the kernel drops the causal mask",
    issue="FACTS: max_seqlen_q smaller than the longest",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    return prepares(cls, "MaxSeqlenOne", fa_fields(max_seqlen_q=lambda *_: 1))


@mutant(
    "verify_rows_unmasked",
    base="fi",
    check="metadata",
    why="a prefill is planned without causal=True: a new token sees those behind it",
    issue="flashinfer#3871",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class NotCausal(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            wrapper = run.wrapper
            plan = wrapper.plan
            wrapper.plan = lambda **kw: plan(**kw | ({"causal": False} if "causal" in kw else {}))
            try:
                super()._plan_once(metadata, run)
            finally:
                del wrapper.plan

    return NotCausal


@mutant(
    "window_of_first_layer",
    base="fa",
    check="metadata",
    why="every layer is given the window of the first: one that must see all keys sees a few, or the other way round",
    issue="NVIDIA/TensorRT-LLM#18443",
    tokens=2,
)
def _(cls: type[Any]) -> type[Any]:
    class FirstWindowForAll(cls):
        def __init__(self, engine: Any) -> None:
            super().__init__(replace(engine, windows=engine.windows[:1] * engine.num_layers))

    return FirstWindowForAll


@mutant(
    "window_off_by_one_more",
    base="fa",
    check="metadata",
    why="the window is passed as W instead of W - 1: one key too many on the left",
    issue="sglang#32087",
)
def _(cls: type[Any]) -> type[Any]:
    return _window(cls, 1)


@mutant(
    "window_off_by_one_less",
    base="fi",
    check="metadata",
    why="the window is passed as W - 2: the oldest visible key is dropped",
    issue="sglang#32087",
)
def _(cls: type[Any]) -> type[Any]:
    return _window(cls, -1)


def _window(cls: type[Any], by: int) -> type[Any]:

    class WrongWindow(cls):
        def __init__(self, engine: Any) -> None:
            windows = tuple(None if w is None else max(w + by, 1) for w in engine.windows)
            super().__init__(replace(engine, windows=windows))

    return WrongWindow


@mutant(
    "forward_drops_soft_cap",
    base="fa",
    check="values",
    why="forward does not hand over the soft cap, forward_return_lse does",
    issue="sglang#33915",
    tokens=6,  # judged as rounded
)
def _(cls: type[Any]) -> type[Any]:
    class Uncapped(cls):
        def forward(self, *given: Any) -> Any:
            kept, self.engine = self.engine, replace(self.engine, soft_cap=None)
            try:
                return super().forward(*given)
            finally:
                self.engine = kept

    return Uncapped
