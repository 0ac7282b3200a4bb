"""`kernel:fi-decode`: FlashInfer's `BatchDecodeWithPagedKVCacheWrapper`, one query row per request."""

from __future__ import annotations

from typing import ClassVar

from backends.contract import Attention, Capabilities, EngineContext, KernelCall, window_left
from backends.fi import FI_HEAD_DIMS
from backends.fi_base import TENSOR_CORE_GROUP
from backends.fi_workspace import float_workspace
from backends.kernels.metadata import fp8_scales, paged_kv


class FlashInferDecode:
    """CUDA cores below a GQA group of 4, tensor cores from there on."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        level="kernel",
        phases=frozenset({"decode"}),
        library=frozenset({"flashinfer"}),
        kv_dtypes=frozenset({"float8_e4m3fn"}),
        layouts=frozenset({"NHD", "HND"}),
        head_dims=FI_HEAD_DIMS,
        non_causal=True,  # with one row per request both masks are the same
        window=True,
        soft_cap=True,
        rows_without_keys=True,
        lse="2",
        empty_lse="sentinel",
    )

    @staticmethod
    def on_tensor_cores(group_size: int) -> bool:
        """Which of the two decode kernels is asked."""
        return group_size >= TENSOR_CORE_GROUP

    def __init__(self, engine: EngineContext) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper  # pyright: ignore[reportAttributeAccessIssue]

        self.engine = engine
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            float_workspace(engine),
            engine.layout,
            use_tensor_cores=self.on_tensor_cores(engine.num_qo_heads // engine.num_kv_heads),
            backend="fa2",
        )

    def attend(self, call: KernelCall) -> Attention:
        kv = paged_kv(call, self.engine.page_size)
        self.wrapper.plan(
            indptr=kv.indptr,
            indices=kv.indices,
            last_page_len=kv.last_page_len,
            num_qo_heads=self.engine.num_qo_heads,
            num_kv_heads=self.engine.num_kv_heads,
            head_dim=self.engine.head_dim_qk,
            page_size=self.engine.page_size,
            window_left=window_left(call.window),
            logits_soft_cap=call.soft_cap,
            q_data_type=call.q.dtype,
            kv_data_type=call.k_cache.dtype,
            sm_scale=call.scale,
            seq_lens=kv.seq_lens,
        )
        out, lse = self.wrapper.run(call.q, (call.k_cache, call.v_cache), return_lse=True, **fp8_scales(call))
        return Attention(out, lse)


class FlashInferTensorCoreDecode(FlashInferDecode):
    """`kernel:fi-decode-tc`: tensor cores (the fa2 prefill kernel) for every GQA group."""

    @staticmethod
    def on_tensor_cores(group_size: int) -> bool:
        del group_size
        return True
