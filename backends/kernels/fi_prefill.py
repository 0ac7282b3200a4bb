"""`kernel:fi-prefill`, `kernel:fi-prefill-fa3`: FlashInfer's `BatchPrefillWithPagedKVCacheWrapper`, fa2 and fa3."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall, window_left
from backends.fi import FI_HEAD_DIMS
from backends.fi_workspace import float_workspace
from backends.kernels.metadata import flat_mask, fp8_scales, indptr, paged_kv


class FlashInferPrefill:
    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"flashinfer"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        layouts=frozenset({"NHD", "HND"}),
        head_dims=FI_HEAD_DIMS,
        non_causal=True,
        window=True,
        soft_cap=True,
        custom_mask=True,
        rows_without_keys=True,
        empty_requests=True,
        lse="2",
        empty_lse="sentinel",
    )
    kernel: ClassVar[str] = "fa2"

    def __init__(self, engine: EngineContext) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper  # pyright: ignore[reportAttributeAccessIssue]

        self.engine = engine
        self.wrapper = BatchPrefillWithPagedKVCacheWrapper(
            float_workspace(engine),
            engine.layout,
            backend=self.kernel,
        )

    def attend(self, call: KernelCall) -> Attention:
        kv = paged_kv(call, self.engine.page_size)
        self.wrapper.plan(
            qo_indptr=indptr(call.qo_lens, call.q.device),
            paged_kv_indptr=kv.indptr,
            paged_kv_indices=kv.indices,
            paged_kv_last_page_len=kv.last_page_len,
            num_qo_heads=self.engine.num_qo_heads,
            num_kv_heads=self.engine.num_kv_heads,
            head_dim_qk=self.engine.head_dim_qk,
            head_dim_vo=self.engine.head_dim_vo,
            page_size=self.engine.page_size,
            custom_mask=flat_mask(call),
            causal=call.causal,
            sm_scale=call.scale,
            window_left=window_left(call.window),
            logits_soft_cap=call.soft_cap,
            q_data_type=call.q.dtype,
            kv_data_type=call.k_cache.dtype,
            seq_lens=kv.seq_lens,
        )
        out, lse = self.wrapper.run(call.q, (call.k_cache, call.v_cache), return_lse=True, **fp8_scales(call))
        return Attention(out, lse)


class FlashInferPrefillFA3(FlashInferPrefill):
    """For Hopper. It takes no custom mask and no fp8 cache beside a 16-bit q."""

    capabilities: ClassVar[Capabilities] = replace(
        FlashInferPrefill.capabilities, custom_mask=False, kv_dtypes=frozenset()
    )
    kernel: ClassVar[str] = "fa3"
