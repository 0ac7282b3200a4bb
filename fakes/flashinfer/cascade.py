"""`flashinfer.cascade`: attention states and their merging, and the multi-level wrapper built from them."""

from __future__ import annotations

from typing import Any

import torch

from fakes.flashinfer.merge import merge_state, merge_state_in_place, merge_states
from fakes.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

__all__ = ["MultiLevelCascadeAttentionWrapper", "merge_state", "merge_state_in_place", "merge_states"]


class MultiLevelCascadeAttentionWrapper:
    """Attention over KV that is shared level by level: one paged prefill per level, their states merged.

    Level 0 is shared by most requests; causal masking applies to the last level only.
    """

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        self._use_cuda_graph = use_cuda_graph
        self._num_levels = num_levels
        self._kv_layout = kv_layout
        levels: list[tuple[Any, ...]] = [(None,) * 4] * num_levels
        if use_cuda_graph:
            levels = list(
                zip(
                    qo_indptr_buf_arr or (),
                    paged_kv_indptr_buf_arr or (),
                    paged_kv_indices_buf_arr or (),
                    paged_kv_last_page_len_buf_arr or (),
                    strict=True,
                )
            )
        self._batch_prefill_wrappers = [
            BatchPrefillWithPagedKVCacheWrapper(float_workspace_buffer, kv_layout, use_cuda_graph, *buffers)
            for buffers in levels
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        for wrapper, buffer in zip(self._batch_prefill_wrappers, int_workspace_buffers, strict=True):
            wrapper.reset_workspace_buffer(float_workspace_buffer, buffer)

    def plan(
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
    ) -> None:
        """One plan per level. Each list has one array per level, as paged prefill takes them.

        Raises:
            ValueError: lists of different lengths, and what paged prefill raises.
        """
        arrays = zip(
            self._batch_prefill_wrappers,
            qo_indptr_arr,
            paged_kv_indptr_arr,
            paged_kv_indices_arr,
            paged_kv_last_page_len,
            strict=True,
        )
        for level, (wrapper, qo_indptr, kv_indptr, indices, last_page_len) in enumerate(arrays):
            wrapper.plan(
                qo_indptr,
                kv_indptr,
                indices,
                last_page_len,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal and level == self._num_levels - 1,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )

    begin_forward = plan

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        """Q `[rows, num_qo_heads, head_dim]`, a cache as paged prefill takes it; out like q."""
        *shared, own = self._batch_prefill_wrappers
        out, lse = own.run(q, paged_kv_cache, return_lse=True)
        for wrapper in shared:
            level_out, level_lse = wrapper.run(q, paged_kv_cache, return_lse=True)
            merge_state_in_place(out, lse, level_out, level_lse)
        return out

    forward = run
