"""`kernel:fa-kvcache`: sgl_kernel's `flash_attn_with_kvcache` (FlashAttention 3) over a paged cache."""

from __future__ import annotations

from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall, window_size
from backends.fa import FA_HEAD_DIMS
from backends.kernels.metadata import indptr, int32, page_table


class FlashAttentionKVCache:
    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"sgl_kernel"}),
        head_dims=FA_HEAD_DIMS,
        non_causal=True,
        window=True,
        soft_cap=True,
        rows_without_keys=True,
        empty_requests=True,
        lse="e",
        reads_unowned_slots=True,  # V behind the last key, in prefill with pages of 128 and more
    )

    def __init__(self, engine: EngineContext) -> None:
        from sgl_kernel.flash_attn import flash_attn_with_kvcache  # pyright: ignore[reportMissingImports]

        self.engine = engine
        self.flash_attn_with_kvcache = flash_attn_with_kvcache

    def attend(self, call: KernelCall) -> Attention:
        device = call.q.device
        out, lse, *_ = self.flash_attn_with_kvcache(
            q=call.q,
            k_cache=call.k_cache,
            v_cache=call.v_cache,
            page_table=page_table(call),
            cache_seqlens=int32(call.kv_lens, device),
            cu_seqlens_q=indptr(call.qo_lens, device),
            max_seqlen_q=max(call.qo_lens),
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=window_size(call.window, causal=call.causal),
            softcap=call.soft_cap or 0.0,
            return_softmax_lse=True,
        )
        return Attention(out, lse.transpose(0, 1))
