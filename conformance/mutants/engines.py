"""Faults of an engine's metadata builder over FlashInfer and FlashAttention: index arrays, page tables, lengths."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch

from conformance.mutants.mutant import mutant


def _changed(cls: type[Any], name: str, change: Any) -> type[Any]:
    """A subclass whose `prepare_metadata` is followed by `change(self, batch, metadata)`."""

    class Changed(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            changed = change(self, batch, batch.attn_metadata)
            if changed is not None:
                batch.attn_metadata = changed

    Changed.__name__ = name
    return Changed


def _fa(**fields: Any) -> Any:
    """Replace fields of `FAMetadata`; each value is a function of (backend, batch, metadata)."""
    from dataclasses import replace

    def change(self: Any, batch: Any, metadata: Any) -> Any:
        return replace(metadata, **{k: make(self, batch, metadata) for k, make in fields.items()})

    return change


def _fi(**fields: Any) -> Any:
    """Set fields of `FIMetadata`."""

    def change(self: Any, batch: Any, metadata: Any) -> None:
        for key, make in fields.items():
            setattr(metadata, key, make(self, batch, metadata))

    return change


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

    return _changed(cls, "LastLenModulo", _fi(last_page_len_cpu=last))


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

    return _changed(cls, "LastLenFromPages", _fi(last_page_len_cpu=last))


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

    return _changed(cls, "LastLenInt64", _fi(last_page_len_cpu=last))


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

    return _changed(cls, "NoLeadingZero", _fi(cu_seqlens_q_cpu=cu_q))


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

    return _changed(cls, "IndicesInt64", _fi(indices=indices))


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

    return _changed(cls, "FastPathAlways", _fi(cu_seqlens_q_cpu=cu_q))


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

    return _changed(cls, "SeqLensShort", _fi(seq_lens_cpu=seq_lens))


@mutant(
    "token_ids_as_page_ids",
    base="fa",
    check="metadata",
    why="the page table holds token locations where page numbers are expected",
    issue="sglang#32902",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.page_table * self.page_size

    return _changed(cls, "TokenIds", _fa(page_table=table))


@mutant(
    "translate_page_id_as_token",
    base="fa",
    check="metadata",
    why="page numbers are divided by the page size a second time",
    issue="sglang#38187",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.page_table // self.page_size

    return _changed(cls, "DividedTwice", _fa(page_table=table))


@mutant(
    "identity_page_table_only",
    base="fa",
    check="metadata",
    why="page-table row i is taken for request i, whatever its table_idx",
    issue="mutant bank",
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        rows = self.page_table[: len(batch.padded_reqs), : metadata.max_seqlen_k : self.page_size]
        return rows // self.page_size

    return _changed(cls, "RowsInOrder", _fa(page_table=table))


@mutant(
    "row_of_another_request",
    base="fi-paged",
    check="metadata",
    why="the last request's pages are taken from the row of the first",
    issue="seed 000",
    requests=2,
)
def _(cls: type[Any]) -> type[Any]:
    class AnotherRow(cls):
        def _page_ids(self, reqs: Any) -> torch.Tensor:
            from dataclasses import replace

            last = replace(reqs[-1], table_idx=reqs[0].table_idx)
            return super()._page_ids([*reqs[:-1], last])

    return AnotherRow


@mutant(
    "page_table_column_short",
    base="fa",
    check="metadata",
    why="the page table has floor(max_seqlen_k / page_size) columns",
    issue="mini-sglang#68",
    requests=2,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        columns = max(metadata.max_seqlen_k // self.page_size, 1)
        return metadata.page_table[:, :columns].contiguous()

    return _changed(cls, "ColumnShort", _fa(page_table=table))


@mutant(
    "prefix_not_counted",
    base="fa",
    check="metadata",
    why="cache_seqlens counts the new tokens only, not the cached prefix",
    issue="seed 000",
)
def _(cls: type[Any]) -> type[Any]:
    def lens(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return self._to_device([r.extend_len for r in batch.padded_reqs])

    return _changed(cls, "PrefixLost", _fa(cache_seqlens=lens))


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

    return _changed(cls, "NewTokensLost", _fa(cache_seqlens=lens))


@mutant(
    "shared_prefix_lost",
    base="fi-paged",
    check="metadata",
    why="pages that two requests share are taken from the end of the lender instead of its beginning",
    issue="mini-sglang#80",
    requests=2,
    tokens=5,
)
def _(cls: type[Any]) -> type[Any]:
    class SharedPrefixLost(cls):
        def _page_ids(self, reqs: Any) -> torch.Tensor:
            ids = super()._page_ids(reqs)
            counts = [-(-r.device_len // self.page_size) for r in reqs]
            parts = list(ids.split(counts))
            for i in range(1, len(parts)):
                if parts[0][0].item() == parts[i][0].item():
                    parts[i] = torch.cat([parts[0][-1:], parts[i][1:]])
            return torch.cat(parts)

    return SharedPrefixLost


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

    return _changed(cls, "DecodeCountsKeys", _fa(cu_seqlens_q=cu_q))


@mutant(
    "max_seqlen_q_too_small",
    base="fa",
    check="metadata",
    why="max_seqlen_q is 1 whatever the batch: the kernel drops the causal mask",
    issue="FACTS: max_seqlen_q smaller than the longest",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    return _changed(cls, "MaxSeqlenOne", _fa(max_seqlen_q=lambda *_: 1))


@mutant(
    "pool_of_another_layer",
    base="fa",
    check="metadata",
    why="every layer reads the pool of layer 0",
    issue="sglang#24617",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    class FirstPool:
        def __init__(self, pool: Any) -> None:
            self._pool = pool
            self.store_kv = pool.store_kv

        def k_cache(self, layer_id: int) -> torch.Tensor:
            return self._pool.k_cache(0)

        def v_cache(self, layer_id: int) -> torch.Tensor:
            return self._pool.v_cache(0)

    class LayerZero(cls):
        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.kv_pool = FirstPool(self.kv_pool)

    return LayerZero


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
        def _plan_once(self, metadata: Any) -> None:
            wrapper = metadata.wrapper
            plan = wrapper.plan
            wrapper.plan = lambda **kw: plan(**kw | ({"causal": False} if "causal" in kw else {}))
            try:
                super()._plan_once(metadata)
            finally:
                del wrapper.plan

    return NotCausal


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
    from dataclasses import replace

    class WrongWindow(cls):
        def __init__(self, engine: Any) -> None:
            windows = tuple(None if w is None else max(w + by, 1) for w in engine.windows)
            super().__init__(replace(engine, windows=windows))

    return WrongWindow
