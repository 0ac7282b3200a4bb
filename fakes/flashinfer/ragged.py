"""Batch prefill over ragged K and V (`flashinfer.prefill.BatchPrefillWithRaggedKVCacheWrapper`)."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from fakes import cuda, releases
from fakes.flashinfer import masks, paged_run, rules, spans
from fakes.flashinfer.arrays import upload, words
from fakes.flashinfer.kernels import Launch, execute
from fakes.flashinfer.plans import Plan, check_compiled, make_prefill, read_host
from fakes.flashinfer.prefill_wrapper import PrefillWrapper
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
)
from fakes.modes import illegal_access


class BatchPrefillWithRaggedKVCacheWrapper(PrefillWrapper):
    """Several query rows per request over K and V without pages.

    q `[qo_indptr[-1], num_qo_heads, head_dim_qk]`, k `[kv_indptr[-1], num_kv_heads, head_dim_qk]`, v with
    `head_dim_vo` (HND: heads first); out `[rows, num_qo_heads, head_dim_vo]`; LSE float32, base 2.
    """

    _name = "BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        kv_indptr_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        refuse_uncomputed(jit_args=jit_args)
        check_backend(backend)
        self._start(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        if use_cuda_graph:
            if not torch.is_tensor(qo_indptr_buf):
                raise ValueError("qo_indptr_buf should be a torch.Tensor in cuda graph mode")
            if not torch.is_tensor(kv_indptr_buf):
                raise ValueError("kv_indptr_buf should be a torch.Tensor in cuda graph mode")
            self._fixed_batch_size = len(qo_indptr_buf) - 1
            if len(kv_indptr_buf) != self._fixed_batch_size + 1:
                raise ValueError(
                    f"The length of kv_indptr_buf ({len(kv_indptr_buf)}) should be the same as qo_indptr_buf "
                    f"({self._fixed_batch_size})."
                )
        self._qo_indptr_buf: Any = qo_indptr_buf
        self._kv_indptr_buf: Any = kv_indptr_buf
        self._custom_mask_buf: Any = custom_mask_buf
        self._mask_indptr_buf: Any = mask_indptr_buf
        self._max_total_num_rows: int | None = None
        self._record(
            "",
            "create",
            {
                "float_workspace_buffer": float_workspace_buffer,
                "kv_layout": kv_layout,
                "use_cuda_graph": use_cuda_graph,
                "backend": backend,
                "qo_indptr_buf": qo_indptr_buf,
                "kv_indptr_buf": kv_indptr_buf,
                "custom_mask_buf": custom_mask_buf,
                "mask_indptr_buf": mask_indptr_buf,
            },
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: torch.Tensor | None = None,
        o_indptr: torch.Tensor | None = None,
    ) -> None:
        """Plan for one batch; `seq_lens`, `v_indptr`, `o_indptr` and the maxima are read by cuDNN only.

        Raises:
            ValueError, RuntimeError, KeyError: as the real library, see the contract.
        """
        check_positions(pos_encoding_mode)
        refuse_uncomputed(
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr,
            max_item_len_ptr=max_item_len_ptr,
        )
        q_dtype = dtype_of(q_data_type)
        kv_dtype = dtype_of(kv_data_type) if kv_data_type is not None else q_dtype
        o_dtype = dtype_of(o_data_type) if o_data_type is not None else q_dtype
        if o_dtype != q_dtype:
            refuse_uncomputed(o_data_type=o_dtype)
        cap = logits_soft_cap or 0.0
        with cuda.paused():
            batch_size, kv_entries = qo_indptr.shape[0] - 1, kv_indptr.shape[0]
        call = self._record(
            "plan",
            "plan",
            {
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim_qk": head_dim_qk,
                "head_dim_vo": head_dim_vo,
                "custom_mask": custom_mask,
                "packed_custom_mask": packed_custom_mask,
                "causal": causal,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "sm_scale": sm_scale,
                "q_data_type": q_dtype,
                "kv_data_type": kv_dtype,
                "o_data_type": o_dtype,
                "seq_lens": seq_lens,
            },
        )
        if kv_entries != batch_size + 1:
            raise ValueError("The kv_indptr length should be equal to mask_indptr length.")
        read_back(qo_indptr=qo_indptr, kv_indptr=kv_indptr)
        with cuda.paused():
            host_qo, host_kv = cuda.host(qo_indptr), cuda.host(kv_indptr)
            record = rules.strict()
            if record is not None:
                for name, tensor, unit in (
                    ("qo_indptr", qo_indptr, "rows"),
                    ("kv_indptr", kv_indptr, "tokens"),
                ):
                    rules.indptr(record, name, rules.array(record, name, tensor), batch_size, unit)
            mask = None
            if custom_mask is not None or packed_custom_mask is not None:
                masks.check_devices(custom_mask, qo_indptr=qo_indptr, kv_indptr=kv_indptr)
                elements = masks.element_indptr(qo_indptr, host_kv[1:] - host_kv[:-1])
                if packed_custom_mask is not None:
                    mask = (cuda.host(packed_custom_mask), torch.from_numpy(elements.astype(np.int32)))
                elif custom_mask is not None:
                    if record is not None:
                        rules.mask_size(
                            record, "custom_mask", cuda.host(custom_mask).numel(), int(elements[-1])
                        )
                    mask = masks.packed(custom_mask, elements)
            elif record is not None and self._custom_mask_buf is not None and not self._use_cuda_graph:
                rules.order(
                    record,
                    "fi.sticky-mask",
                    "custom_mask",
                    "the custom mask of an earlier plan stays in force: a ragged plan without one does "
                    "not remove it",
                )
            total_rows = int(host_qo[-1])
            lengths = host_kv[1:] - host_kv[:-1]
        self._fill_buffers(qo_indptr, kv_indptr, mask, batch_size, total_rows, non_blocking)
        with cuda.paused():
            wanted = self._requested_backend if releases.at_least("flashinfer", "0.7.2") else self._backend
            masked = self._custom_mask_buf is not None
            self._backend = resolve_backend(wanted, q_dtype, kv_dtype, masked)
            if record is not None:
                planned = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr}
                rules.strides(record, planned, rules.loaded(self._backend, self._use_cuda_graph, "", planned))
            check_compiled(q_dtype, kv_dtype, o_dtype)
            plan = Plan(
                kernel=self._backend,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim_vo or head_dim_qk,
                page_size=1,
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
            plan.qo, plan.kv = read_host(qo_indptr, kv_indptr, batch_size)
            make_prefill(plan, self._float_workspace_buffer, lengths)
        self._keep_plan(plan, call)
        self._cached_q_data_type, self._cached_kv_data_type = q_dtype, kv_dtype
        self._cached_o_data_type = o_dtype
        self._causal, self._pos_encoding_mode = causal, pos_encoding_mode
        self._window_left, self._logits_soft_cap, self._sm_scale = window_left, cap, sm_scale
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._late: tuple[str, ...] = ()

    def _fill_buffers(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        mask: tuple[torch.Tensor, torch.Tensor] | None,
        batch_size: int,
        total_rows: int,
        non_blocking: bool,
    ) -> None:
        if not self._use_cuda_graph:
            self._qo_indptr_buf = upload(qo_indptr, non_blocking, self.device)
            self._kv_indptr_buf = upload(kv_indptr, non_blocking, self.device)
            if mask is not None:
                self._adopt_mask(mask)
            return
        self._bound_rows(total_rows)
        if batch_size != self._fixed_batch_size:
            raise ValueError(
                f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch_size}  "
                f"mismatches the batch size set during initialization {self._fixed_batch_size}."
            )
        self._qo_indptr_buf.copy_(qo_indptr, non_blocking=non_blocking)
        self._kv_indptr_buf.copy_(kv_indptr, non_blocking=non_blocking)
        if mask is not None:
            self._copy_mask(mask)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """The older `run`. What it sets replaces the plan's values, too late for what is compiled in."""
        rope = (rope_scale, rope_theta)
        self._set_late(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope)
        return self.run(q, k, v)

    @later_lse
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
    ) -> Any:
        """Attend by the latest plan. Scales are not read by fa2 and fa3, but for fp8 K and V from 0.7.2 on.

        Raises:
            AttributeError: no plan was made. ValueError: dtypes are not the planned ones.
        """
        with cuda.paused():
            check_dtypes(q, k, self._cached_q_data_type, self._cached_kv_data_type)
            plan = self._plan_info
            assert plan is not None
            if releases.at_least("flashinfer", "0.7.2") and q.shape[0] != plan.qo_last:
                raise ValueError(
                    f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({plan.qo_last}). For ragged "
                    "prefill, q must have shape [total_tokens, num_heads, head_dim] where total_tokens = qo_indptr[-1]."
                )
            shape = (*q.shape[:-1], v.shape[-1])
            if out is None:
                out = poisoned(shape, q.dtype)
            else:
                check_buffer(out, shape, self._cached_o_data_type, q, "out")
            if return_lse and lse is None:
                lse = poisoned(shape[:2], torch.float32)
            elif return_lse and lse is not None:
                check_buffer(lse, shape[:2], torch.float32, q, "lse")
            call = paged_run.record_run(
                self,
                q,
                None,
                plan,
                k=k,
                v=v,
                q_scale=q_scale,
                k_scale=k_scale,
                v_scale=v_scale,
                return_lse=return_lse,
            )
            self._check_order(plan, q, k.shape[1 if self._kv_layout == "NHD" else 0], 1)
            record = rules.strict()
            scaled = k.element_size() == 1 and releases.at_least("flashinfer", "0.7.2")
            if record is not None and not scaled:
                for name, scale in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale)):
                    if scale not in (None, 1.0):
                        record.find(
                            "fi.ignored",
                            "arrays",
                            name,
                            f"{name} is {scale}, ragged prefill does not read it",
                        )
            masked = self._custom_mask_buf is not None
            if masked and plan.kernel == "fa3":
                raise RuntimeError(
                    "BatchPrefillWithRaggedKVCacheSM90Run failed with error: operation not supported "
                    "(custom mask)"
                )
            launch = paged_run.launch_of(
                self,
                plan,
                call,
                k,
                None,
                k_scale if scaled else None,
                v_scale if scaled else None,
                causal=self._causal and not masked,
                layout="ragged",
            )
            tokens_first = self._kv_layout == "NHD"
            check_on_device(q=q, k=k, v=v)
        _ragged_kernel(
            launch,
            tokens_first,
            q,
            k,
            v,
            self._qo_indptr_buf,
            self._kv_indptr_buf,
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
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rope = (rope_scale, rope_theta)
        self._set_late(causal, pos_encoding_mode, window_left, logits_soft_cap, sm_scale, rope)
        return self.run(q, k, v, return_lse=True)


@cuda.kernel
def _ragged_kernel(
    launch: Launch,
    tokens_first: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    mask: torch.Tensor | None,
    mask_indptr: torch.Tensor | None,
) -> None:
    out, lse = cuda.host(out), None if lse is None else cuda.host(lse)
    found = paged_run.with_plan(launch, int_workspace, out, lse)
    if found is None:
        return
    launch, plan = found, found.plan
    k, v = cuda.host(k), cuda.host(v)
    if not tokens_first:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    read = spans.ragged(plan, qo_indptr, kv_indptr, k.shape[0], launch.first_window)
    missing = max((int(span.slots[-1]) + 1 for span in read if len(span.slots)), default=0) - k.shape[0]
    if missing > 0:  # fa3 alone
        if not k.shape[0]:
            raise illegal_access("k has no rows, so its address is null")
        k, v = (torch.cat((t, t.new_zeros(missing, *t.shape[1:]))) for t in (k, v))
    custom = None
    if mask is not None and mask_indptr is not None:
        custom = masks.unpacked(cuda.host(mask), words(mask_indptr), read)
    execute(launch, read, cuda.host(q), k, v, out, lse, custom)
