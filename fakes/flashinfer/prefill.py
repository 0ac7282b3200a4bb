"""`flashinfer.prefill`: batch prefill over a paged KV cache; ragged and single prefill lie beside it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fakes import cuda, recorder, releases
from fakes.flashinfer import masks, paged_run, rules
from fakes.flashinfer.arrays import lengths_by_pages, upload
from fakes.flashinfer.plans import Plan, check_builds, check_compiled, longest, make_prefill, read_host
from fakes.flashinfer.prefill_wrapper import PrefillWrapper
from fakes.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from fakes.flashinfer.single import single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from fakes.flashinfer.staging import read_back
from fakes.flashinfer.wrapper import (
    check_backend,
    check_buffer,
    check_dtypes,
    check_on_device,
    check_positions,
    dtype_of,
    later_lse,
    poisoned,
    refuse_uncomputed,
    resolve_backend,
    unpack_cache,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]

_KV_NAMES = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


class BatchPrefillWithPagedKVCacheWrapper(PrefillWrapper):
    """Several query rows per request over a paged KV cache, causal rows aligned bottom right.

    q `[qo_indptr[-1], num_qo_heads, head_dim_qk]`; caches as in decode; out `[rows, num_qo_heads,
    head_dim_vo]`; LSE float32 `[rows, num_qo_heads]`, base 2.
    """

    _name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        refuse_uncomputed(jit_args=jit_args)
        check_backend(backend)
        self._start(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        buffers = {
            "qo_indptr_buf": qo_indptr_buf,
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        self._fixed_batch_size = 0
        if use_cuda_graph:
            for name, buffer in buffers.items():
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in CUDA graph mode")
            assert qo_indptr_buf is not None
            assert paged_kv_indptr_buf is not None
            assert paged_kv_last_page_len_buf is not None
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(paged_kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError("The length of paged_kv_indptr_buf should be batch_size + 1.")
            if len(paged_kv_last_page_len_buf) != self._fixed_batch_size:
                raise ValueError("The length of paged_kv_last_page_len_buf should be batch_size.")
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buf
        self._paged_kv_indices_buf: Any = paged_kv_indices_buf
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buf
        self._custom_mask_buf: Any = custom_mask_buf
        self._mask_indptr_buf: Any = mask_indptr_buf
        self._max_total_num_rows: int | None = None
        self._block_tables: torch.Tensor | None = None
        self._record(
            "",
            "create",
            {
                "float_workspace_buffer": float_workspace_buffer,
                "kv_layout": kv_layout,
                "use_cuda_graph": use_cuda_graph,
                "backend": backend,
                "custom_mask_buf": custom_mask_buf,
                "mask_indptr_buf": mask_indptr_buf,
                **buffers,
            },
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
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
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan for one batch. A custom mask (bool, flat, request after request) replaces `causal`.

        Raises:
            ValueError, RuntimeError, KeyError: as the real library, see the contract.
        """
        check_positions(pos_encoding_mode)
        refuse_uncomputed(
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
            max_token_per_sequence=max_token_per_sequence,
            max_sequence_kv=max_sequence_kv,
        )
        q_dtype = dtype_of(q_data_type)
        kv_dtype = dtype_of(kv_data_type) if kv_data_type is not None else q_dtype
        o_dtype = dtype_of(o_data_type) if o_data_type is not None else q_dtype
        cap = logits_soft_cap or 0.0
        head_dim_vo = head_dim_vo or head_dim_qk
        with cuda.paused():
            batch_size, num_indices = qo_indptr.shape[0] - 1, paged_kv_indices.shape[0]
        call = self._record(
            "plan",
            "plan",
            {
                "qo_indptr": qo_indptr,
                "paged_kv_indptr": paged_kv_indptr,
                "paged_kv_indices": paged_kv_indices,
                "paged_kv_last_page_len": paged_kv_last_page_len,
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim_qk,
                "head_dim_vo": head_dim_vo,
                "page_size": page_size,
                "custom_mask": custom_mask,
                "packed_custom_mask": packed_custom_mask,
                "causal": causal,
                "sm_scale": sm_scale,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_dtype,
                "kv_data_type": kv_dtype,
                "o_data_type": o_dtype,
                "seq_lens": seq_lens,
                "seq_lens_q": seq_lens_q,
                "block_tables": block_tables,
            },
        )
        read_back(
            qo_indptr=qo_indptr,
            paged_kv_indptr=paged_kv_indptr,
            paged_kv_last_page_len=paged_kv_last_page_len if seq_lens is None else None,
            seq_lens=seq_lens,
        )
        with cuda.paused():
            host_qo = cuda.host(qo_indptr)
            record = rules.strict()
            if record is not None:
                rules.indptr(
                    record, "qo_indptr", rules.array(record, "qo_indptr", qo_indptr), batch_size, "rows"
                )
                rules.pages(
                    record,
                    _KV_NAMES,
                    paged_kv_indptr,
                    paged_kv_indices,
                    paged_kv_last_page_len,
                    paged_kv_last_page_len.shape[0],
                    page_size,
                    seq_lens,
                )
            mask = self._packed_mask(
                qo_indptr, paged_kv_indptr, paged_kv_last_page_len, page_size, custom_mask, packed_custom_mask
            )
            max_q_len = longest(host_qo[1:] - host_qo[:-1])
            total_rows = int(host_qo[-1])
            lengths = (
                lengths_by_pages(paged_kv_indptr, paged_kv_last_page_len, page_size)
                if seq_lens is None
                else cuda.host(seq_lens).reshape(-1)
            )
            if seq_lens is not None and releases.at_least("flashinfer", "0.7.2"):
                lengths = lengths.to(torch.int32)
            longest(lengths)
        self._check_graph(total_rows, batch_size, num_indices)
        self._fill_buffers(
            qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, mask, non_blocking
        )
        with cuda.paused():
            # before 0.7.4 the backend that "auto" found at the first plan stays
            wanted = self._requested_backend if releases.at_least("flashinfer", "0.7.4") else self._backend
            masked = self._custom_mask_buf is not None
            self._backend = resolve_backend(wanted, q_dtype, kv_dtype, masked, max_q_len)
            if record is not None:
                planned = {"qo_indptr": qo_indptr, "paged_kv_indptr": paged_kv_indptr}
                arrays = planned | {
                    "paged_kv_indices": paged_kv_indices,
                    "paged_kv_last_page_len": paged_kv_last_page_len,
                }
                loaded = rules.loaded(self._backend, self._use_cuda_graph, "paged_kv_indices", arrays)
                rules.strides(record, planned, loaded)
            check_compiled(q_dtype, kv_dtype, o_dtype)
            check_builds(self._backend, q_dtype, kv_dtype)
            plan = Plan(
                kernel=self._backend,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim_vo,
                page_size=page_size,
                qo=[],
                kv=[],
                capped=cap > 0,
                windowed=window_left >= 0,
                window_left=window_left,
                graph=self._use_cuda_graph,
                total_rows=self._max_total_num_rows or total_rows,
                fixed_split=fixed_split_size or -1,
                disable_split=disable_split_kv,
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
                qo_last=total_rows,
            )
            plan.qo, plan.kv = read_host(qo_indptr, paged_kv_indptr, batch_size)
            make_prefill(plan, self._float_workspace_buffer, lengths)
        self._keep_plan(plan, call)
        self._cached_q_data_type, self._cached_kv_data_type = q_dtype, kv_dtype
        self._cached_o_data_type = o_dtype
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch_size, num_qo_heads, num_kv_heads
        self._block_tables = block_tables
        self._causal, self._pos_encoding_mode = causal, pos_encoding_mode
        self._window_left, self._logits_soft_cap, self._sm_scale = window_left, cap, sm_scale
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._late: tuple[str, ...] = ()

    def _packed_mask(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        custom_mask: torch.Tensor | None,
        packed_mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        if custom_mask is None and packed_mask is None:
            return None
        masks.check_lengths(qo_indptr, kv_indptr)
        masks.check_devices(
            custom_mask, qo_indptr=qo_indptr, kv_indptr=kv_indptr, last_page_len=last_page_len
        )
        plain, last = cuda.host(kv_indptr), cuda.host(last_page_len)
        lens = (plain[1:] - plain[:-1] - 1) * page_size + last
        elements = masks.element_indptr(qo_indptr, lens)
        record = rules.strict()
        if packed_mask is not None:
            if record is not None and len(elements) > 2:
                record.find(
                    "fi.packed-mask-offset",
                    "arrays",
                    "packed_custom_mask",
                    "packed_custom_mask is read at byte offsets that count its elements: right for one "
                    "request only",
                )
            return cuda.host(packed_mask), torch.from_numpy(elements.astype("int32"))
        assert custom_mask is not None
        if record is not None:
            rules.mask_size(record, "custom_mask", cuda.host(custom_mask).numel(), int(elements[-1]))
        return masks.packed(custom_mask, elements)

    def _check_graph(self, total_rows: int, batch_size: int, num_indices: int) -> None:
        if not self._use_cuda_graph:
            return
        self._bound_rows(total_rows)
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                "The batch size should be fixed during the lifecycle of the wrapper in cuda graph mode, "
                f"the runtime batch size {batch_size} mismatches the batch size {self._fixed_batch_size}  set "
                "during initialization."
            )
        if num_indices > len(self._paged_kv_indices_buf):
            raise ValueError("The length of paged_kv_indices exceeds the allocated buffer size.")

    def _fill_buffers(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        mask: tuple[torch.Tensor, torch.Tensor] | None,
        non_blocking: bool,
    ) -> None:
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=non_blocking)
            self._paged_kv_indptr_buf.copy_(kv_indptr, non_blocking=non_blocking)
            self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
            self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking=non_blocking)
            if mask is not None:
                self._copy_mask(mask)
            return
        self._qo_indptr_buf = upload(qo_indptr, non_blocking, self.device)
        self._paged_kv_indptr_buf = upload(kv_indptr, non_blocking, self.device)
        self._paged_kv_indices_buf = upload(indices, non_blocking, self.device)
        self._paged_kv_last_page_len_buf = upload(last_page_len, non_blocking, self.device)
        self._custom_mask_buf = self._mask_indptr_buf = None
        if mask is not None:
            self._adopt_mask(mask)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """The older `run`. What it sets replaces the plan's values, too late for what is compiled in."""
        rope = (rope_scale, rope_theta)
        self._set_late(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    @later_lse
    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """Attend by the latest plan. Arguments that fa2 and fa3 do not read have no effect.

        Raises:
            AttributeError: no plan was made. ValueError: dtypes are not the planned ones.
        """
        with cuda.paused():
            k, v = unpack_cache(paged_kv_cache, self._kv_layout)
            check_dtypes(q, k, self._cached_q_data_type, self._cached_kv_data_type)
            plan = self._plan_info
            assert plan is not None
            if releases.at_least("flashinfer", "0.7.2") and q.shape[0] != plan.qo_last:
                raise ValueError(
                    f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({plan.qo_last}). For paged "
                    "prefill, q must have shape [total_tokens, num_heads, head_dim] where total_tokens = qo_indptr[-1]."
                )
            o_dtype = self._cached_o_data_type
            if out is not None and out.dtype != o_dtype:
                raise ValueError(
                    f"The dtype of out {out.dtype} does not match the o_data_type {o_dtype} specified in "
                    "plan function."
                )
            assert window_left is None or window_left == self._window_left
            shape = (*q.shape[:-1], v.shape[-1])
            fresh = out is None
            if out is None:
                out = poisoned(shape, o_dtype)
            else:
                check_buffer(out, shape, o_dtype, q, "out")
            if return_lse and lse is None:
                lse = poisoned(shape[:2], torch.float32)
            elif return_lse and lse is not None:
                check_buffer(lse, shape[:2], torch.float32, q, "lse")
            call = paged_run.record_run(
                self,
                q,
                paged_kv_cache,
                plan,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                window_left=window_left,
                return_lse=return_lse,
                sinks=sinks,
            )
            heads, page_size = (1, 2) if self._kv_layout == "HND" else (2, 1)
            self._check_order(plan, q, k.shape[heads], k.shape[page_size])
            masked = self._custom_mask_buf is not None
            if masked and plan.kernel == "fa3":
                raise RuntimeError(
                    "BatchPrefillWithPagedKVCacheSM90Run failed with error: operation not supported "
                    "(custom mask)"
                )
            causal = self._causal and not masked
            launch = paged_run.launch_of(self, plan, call, k, q_scale, k_scale, v_scale, causal=causal)
            record = recorder.current()
            launch.zeroed = fresh and not (record is not None and record.extended)
            check_on_device(q=q, paged_kv_cache=k)
        paged_run.paged_kernel(
            launch,
            q,
            k,
            v,
            self._qo_indptr_buf,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
            self._held_plan,
            out,
            lse if return_lse else None,
            self._custom_mask_buf,
            self._mask_indptr_buf,
        )
        return (out, lse) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope = (rope_scale, rope_theta)
        self._set_late(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
