"""`kernel:fa-varlen`: sgl_kernel's `flash_attn_varlen_func` (FlashAttention 3), K and V without pages."""

from __future__ import annotations

from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall, window_size
from backends.fa import FA_HEAD_DIMS
from backends.kernels.metadata import indptr


class FlashAttentionVarlen:
    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"sgl_kernel"}),
        layouts=frozenset({"NHD", "HND"}),  # the paged cache is not looked at
        head_dims=FA_HEAD_DIMS,
        non_causal=True,
        window=True,
        soft_cap=True,
        rows_without_keys=True,
        batches_without_keys=False,  # the kernel is not launched, and the LSE is +inf
        empty_requests=True,
        lse="e",
    )

    def __init__(self, engine: EngineContext) -> None:
        from sgl_kernel.flash_attn import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

        self.engine = engine
        self.flash_attn_varlen_func = flash_attn_varlen_func

    def attend(self, call: KernelCall) -> Attention:
        out, lse, *_ = self.flash_attn_varlen_func(
            q=call.q,
            k=call.k,
            v=call.v,
            cu_seqlens_q=indptr(call.qo_lens, call.q.device),
            cu_seqlens_k=indptr(call.kv_lens, call.q.device),
            max_seqlen_q=max(call.qo_lens),
            max_seqlen_k=max(call.kv_lens),
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=window_size(call.window, causal=call.causal),
            softcap=call.soft_cap or 0.0,
            return_softmax_lse=True,
        )
        return Attention(out, lse.transpose(0, 1))
