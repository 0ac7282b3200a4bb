"""`"a,b"`: prefill by one backend, decode by another, each where its kernel library is best."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from backends.contract import Backend, Batch, Capabilities
from cases.wanted import Variant

T = TypeVar("T")


class HybridBackend:
    """Dispatches on `Batch.phase` alone. Both parts share the engine's pool and page table."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.parts = {"prefill": prefill, "decode": decode}

    def _part(self, batch: Batch) -> Any:
        return self.parts[batch.phase]

    def prepare_metadata(self, batch: Batch) -> None:
        part: Backend = self._part(batch)
        part.prepare_metadata(batch)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        part: Backend = self._part(batch)
        return part.forward(q, k, v, layer_id, batch)

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._part(batch).forward_return_lse(q, k, v, layer_id, batch)

    # Only decode batches are captured.

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        self.parts["decode"].init_capture_graph(max_seq_len, bs_list)

    def prepare_for_capture(self, batch: Batch) -> None:
        self.parts["decode"].prepare_for_capture(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        self.parts["decode"].prepare_for_replay(batch)


def meet(prefill: Capabilities, decode: Capabilities) -> Capabilities:
    """What both parts offer; each brings its own phase. Parts with LSEs of two bases offer none."""

    def both(flag: str) -> bool:
        return getattr(prefill, flag) and getattr(decode, flag)

    return Capabilities(
        phases=(prefill.phases & {"prefill"}) | (decode.phases & {"decode"}),
        library=prefill.library | decode.library,
        dtypes=prefill.dtypes & decode.dtypes,
        kv_dtypes=prefill.kv_dtypes & decode.kv_dtypes,
        page_sizes=_common(prefill.page_sizes, decode.page_sizes),
        layouts=prefill.layouts & decode.layouts,
        head_dims=_common(prefill.head_dims, decode.head_dims),
        group_sizes=_common(prefill.group_sizes, decode.group_sizes),
        non_causal=both("non_causal"),
        window=both("window"),
        layer_windows=both("layer_windows"),
        soft_cap=both("soft_cap"),
        custom_mask=both("custom_mask"),
        rows_without_keys=both("rows_without_keys"),
        batches_without_keys=both("batches_without_keys"),
        empty_requests=both("empty_requests"),
        strided=both("strided"),
        lse=prefill.lse if prefill.lse == decode.lse else None,
        empty_lse="sentinel" if "sentinel" in (prefill.empty_lse, decode.empty_lse) else "-inf",
        bit_equal=both("bit_equal"),
        variants=_common_variants(prefill.variants, decode.variants),
        reads_unowned_slots=prefill.reads_unowned_slots or decode.reads_unowned_slots,
        cuda_graph=decode.cuda_graph,
        host_reads=_larger(prefill.host_read_budget, decode.host_read_budget),
    )


def _larger(a: int | None, b: int | None) -> int | None:
    return None if a is None or b is None else max(a, b)


def _common_variants(a: tuple[Variant, ...], b: tuple[Variant, ...]) -> tuple[Variant, ...]:
    if not a or not b:
        return a or b
    return tuple(variant for variant in a if variant in b) or a + b


def _common(a: frozenset[T] | None, b: frozenset[T] | None) -> frozenset[T] | None:
    if a is None or b is None:
        return b if a is None else a
    return a & b
