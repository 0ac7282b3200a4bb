"""`fa`: FlashAttention 3 of sgl_kernel over the paged pool, with a table of page numbers.

Argument semantics: the docstring of `sgl_kernel.flash_attn.flash_attn_with_kvcache`; metadata: mini-sglang.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext, window_size
from backends.refusal import refuse_undeclared

FA_HEAD_DIMS = frozenset({(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)})
"""(head_dim_qk, head_dim_vo) that FlashAttention 3 is built for (72 and others are padded inside)."""


@dataclass(frozen=True, kw_only=True)
class FAMetadata:
    """One batch as FlashAttention reads it, all on the device."""

    cu_seqlens_q: torch.Tensor
    """int32 `[bs + 1]`, in query rows."""
    cu_seqlens_k: torch.Tensor
    """int32 `[bs + 1]`, in tokens."""
    cache_seqlens: torch.Tensor
    """int32 `[bs]`: keys of each request, this batch's new ones included."""
    page_table: torch.Tensor
    """int32 `[bs, ceil(max_seqlen_k / page_size)]`: page *numbers*."""
    max_seqlen_q: int
    max_seqlen_k: int

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of the last query of each of the first `bs` requests, int32 `[bs]`."""
        return self.cu_seqlens_q[1 : bs + 1] - 1


class FlashAttentionBackend:
    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"sgl_kernel"}),
        head_dims=FA_HEAD_DIMS,
        window=True,
        layer_windows=True,
        soft_cap=True,
        lse="e",
        reads_unowned_slots=True,  # V behind the last key, in prefill with pages of 128 and more
        cuda_graph=True,
    )
    refuses: ClassVar[bool] = True

    def __init__(self, engine: EngineContext) -> None:
        refuse_undeclared(engine, self.capabilities)
        from sgl_kernel.flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        self.flash_attn_with_kvcache = flash_attn_with_kvcache
        self.engine = engine
        self.device = engine.device
        self.kv_pool = engine.kv_pool
        self.page_table = engine.page_table
        self.page_size = engine.page_size

    def prepare_metadata(self, batch: Batch) -> None:
        reqs = batch.padded_reqs
        seqlens_q = [req.extend_len for req in reqs]
        seqlens_k = [req.device_len for req in reqs]
        columns = [seqlens_k, [0, *accumulate(seqlens_k)], [req.table_idx for req in reqs]]
        one_row_each = max(seqlens_q) == 1
        no_prefix_hit = all(req.cached_len == 0 for req in reqs)  # as many queries as keys
        if not (one_row_each or no_prefix_hit):
            columns.append([0, *accumulate(seqlens_q)])
        staged = self._to_device(list(chain(*columns)))  # one copy for all of them
        cache_seqlens, cu_seqlens_k, rows, *own = staged.split([len(column) for column in columns])
        if one_row_each:
            cu_seqlens_q = torch.arange(len(reqs) + 1, dtype=torch.int32, device=self.device)
        else:
            cu_seqlens_q = cu_seqlens_k if no_prefix_hit else own[0]
        # The engine's table holds token locations: every page_size-th starts a page.
        page_table = self.page_table[rows, : max(seqlens_k) : self.page_size]
        if self.page_size > 1:
            page_table = page_table // self.page_size
        batch.attn_metadata = FAMetadata(
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            cache_seqlens=cache_seqlens,
            page_table=page_table,
            max_seqlen_q=max(seqlens_q),
            max_seqlen_k=max(seqlens_k),
        )

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        largest, as_int32 = max(bs_list), {"dtype": torch.int32, "device": self.device}
        self.captured = FAMetadata(
            cu_seqlens_q=torch.arange(largest + 1, **as_int32),  # decode: one row per request, in every batch
            cu_seqlens_k=torch.arange(largest + 1, **as_int32),
            cache_seqlens=torch.ones(largest, **as_int32),
            page_table=torch.zeros(largest, -(-max_seq_len // self.page_size), **as_int32),
            max_seqlen_q=1,
            max_seqlen_k=max_seq_len,
        )

    def _captured(self, batch: Batch) -> FAMetadata:
        """The buffers of a batch, as long as its graph reads them."""
        bs = len(batch.padded_reqs)
        return replace(
            self.captured,
            cu_seqlens_q=self.captured.cu_seqlens_q[: bs + 1],
            cu_seqlens_k=self.captured.cu_seqlens_k[: bs + 1],
            cache_seqlens=self.captured.cache_seqlens[:bs],
            page_table=self.captured.page_table[:bs],
        )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._captured(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        buffers, metadata = self._captured(batch), batch.attn_metadata
        assert isinstance(metadata, FAMetadata)
        buffers.cu_seqlens_k.copy_(metadata.cu_seqlens_k)
        buffers.cache_seqlens.copy_(metadata.cache_seqlens)
        buffers.page_table[:, : metadata.page_table.shape[1]].copy_(metadata.page_table)

    def _to_device(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=True).to(self.device, non_blocking=True)

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
        metadata = batch.attn_metadata
        assert isinstance(metadata, FAMetadata)
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        return self.flash_attn_with_kvcache(
            q=q,
            k_cache=self.kv_pool.k_cache(layer_id),
            v_cache=self.kv_pool.v_cache(layer_id),
            page_table=metadata.page_table,
            cache_seqlens=metadata.cache_seqlens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            cu_seqlens_k_new=metadata.cu_seqlens_k,
            max_seqlen_q=metadata.max_seqlen_q,
            softmax_scale=self.engine.scale,
            causal=True,
            window_size=window_size(self.engine.windows[layer_id], causal=True),
            softcap=self.engine.soft_cap or 0.0,
            return_softmax_lse=return_softmax_lse,
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self._attend(q, k, v, layer_id, batch, return_softmax_lse=False)

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self._attend(q, k, v, layer_id, batch, return_softmax_lse=True)
        return out, lse.transpose(0, 1)
