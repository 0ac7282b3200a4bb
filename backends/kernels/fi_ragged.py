"""`kernel:fi-ragged`, `kernel:fi-ragged-fa3`: FlashInfer's `BatchPrefillWithRaggedKVCacheWrapper`: no pages."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall, window_left
from backends.fi import FI_HEAD_DIMS
from backends.fi_workspace import float_workspace
from backends.kernels.metadata import flat_mask, indptr


class FlashInferRagged:
    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        library=frozenset({"flashinfer"}),
        layouts=frozenset({"NHD", "HND"}),  # the paged cache is not looked at
        head_dims=FI_HEAD_DIMS | {(192, 128)},
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
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper  # pyright: ignore[reportAttributeAccessIssue]

        self.engine = engine
        workspace = float_workspace(engine)
        # A ragged plan without a mask keeps that of the plan before: masked calls get a wrapper of their own.
        self.masked_wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.kernel)
        self.plain_wrapper = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=self.kernel)

    def attend(self, call: KernelCall) -> Attention:
        wrapper = self.plain_wrapper if call.custom_mask is None else self.masked_wrapper
        wrapper.plan(
            qo_indptr=indptr(call.qo_lens, call.q.device),
            kv_indptr=indptr(call.kv_lens, call.q.device),
            num_qo_heads=self.engine.num_qo_heads,
            num_kv_heads=self.engine.num_kv_heads,
            head_dim_qk=self.engine.head_dim_qk,
            head_dim_vo=self.engine.head_dim_vo,
            custom_mask=flat_mask(call),
            causal=call.causal,
            window_left=window_left(call.window),
            logits_soft_cap=call.soft_cap,
            sm_scale=call.scale,
            q_data_type=call.q.dtype,
            kv_data_type=call.k.dtype,
        )
        out, lse = wrapper.run(call.q, call.k, call.v, return_lse=True)
        return Attention(out, lse)


class FlashInferRaggedFA3(FlashInferRagged):
    """For Hopper. It takes no custom mask."""

    capabilities: ClassVar[Capabilities] = replace(FlashInferRagged.capabilities, custom_mask=False)
    kernel: ClassVar[str] = "fa3"
