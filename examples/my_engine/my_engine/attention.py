"""The engine's attention backend: FlashAttention 3 of sgl_kernel over the engine's paged KV pool.

Written for CUDA. Nothing in it knows that its tests run on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from conformance import Batch, Capabilities, EngineContext


@dataclass(frozen=True)
class Metadata:
    """One batch as the kernel reads it; int32, on the device."""

    cu_seqlens_q: torch.Tensor
    """`[bs + 1]`: request i has the query rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`."""
    cache_seqlens: torch.Tensor
    """`[bs]`: keys of each request, this batch's new ones included."""
    page_table: torch.Tensor
    """`[bs, max_pages]`: page numbers."""
    max_seqlen_q: int


class MyBackend:
    capabilities = Capabilities(
        library=frozenset({"sgl_kernel"}),
        head_dims=frozenset({(64, 64), (128, 128)}),
        lse="e",
        reads_unowned_slots=True,
    )

    def __init__(self, engine: EngineContext) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache

        self.flash_attn = flash_attn_with_kvcache
        self.engine = engine

    def prepare_metadata(self, batch: Batch) -> None:
        reqs = batch.padded_reqs
        lists = [[r.table_idx for r in reqs], [r.extend_len for r in reqs], [r.device_len for r in reqs]]
        staged = torch.tensor(lists, dtype=torch.int32, pin_memory=True)  # one copy for all three
        rows, qo_lens, kv_lens = staged.to(self.engine.device, non_blocking=True).unbind()
        page_size = self.engine.page_size
        # The engine's table holds token locations: every page_size-th one begins a page.
        first_slots = self.engine.page_table[:, : max(lists[2]) : page_size].index_select(0, rows)
        batch.attn_metadata = Metadata(
            cu_seqlens_q=torch.nn.functional.pad(qo_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            cache_seqlens=kv_lens,
            page_table=first_slots // page_size,
            max_seqlen_q=max(lists[1]),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self.forward_return_lse(q, k, v, layer_id, batch)[0]

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata: Metadata = batch.attn_metadata
        pool = self.engine.kv_pool
        pool.store_kv(k, v, batch.out_loc, layer_id)  # first: a new token attends to itself
        out, lse, *_ = self.flash_attn(
            q,
            pool.k_cache(layer_id),
            pool.v_cache(layer_id),
            page_table=metadata.page_table,
            cache_seqlens=metadata.cache_seqlens,
            cu_seqlens_q=metadata.cu_seqlens_q,
            max_seqlen_q=metadata.max_seqlen_q,
            softmax_scale=self.engine.scale,
            causal=True,
            return_softmax_lse=True,
        )
        return out, lse.T  # the kernel's LSE is [num_qo_heads, num_tokens]
