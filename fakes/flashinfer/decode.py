"""`flashinfer.decode`: batch decode over a paged KV cache, on CUDA cores or on tensor cores (as fa2)."""

from __future__ import annotations

import functools
from typing import Any

import torch

from fakes import cuda, releases
from fakes.flashinfer import paged_run, rules
from fakes.flashinfer.arrays import lengths_by_pages, upload
from fakes.flashinfer.fast_plan import fast_decode_plan, require_room
from fakes.flashinfer.plans import (
    Plan,
    check_compiled,
    check_group,
    longest,
    make_decode,
    make_prefill,
    read_decode_indptr,
    read_host,
)
from fakes.flashinfer.single import single_decode_with_kv_cache
from fakes.flashinfer.staging import read_back
from fakes.flashinfer.wrapper import (
    Until,
    Wrapper,
    check_backend,
    check_buffer,
    check_dtypes,
    check_on_device,
    check_positions,
    dtype_of,
    poisoned,
    refuse_uncomputed,
    unpack_cache,
)
from fakes.flashinfer.xqa import trtllm_batch_decode_with_kv_cache

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
]

_PLAN_NAMES = ("indptr", "indices", "last_page_len")


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query row per request over a paged KV cache.

    q `[batch_size, num_qo_heads, head_dim]`; caches NHD `[pages, page_size, num_kv_heads, head_dim]` or HND, a tuple or
    one tensor with K and V stacked in dimension 1; out like q; LSE float32 `[batch_size, num_qo_heads]`, base 2.
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse_uncomputed(jit_args=jit_args)
        check_backend(backend)
        self._start(float_workspace_buffer, kv_layout, backend, use_cuda_graph)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        self._fixed_batch_size = 0
        if use_cuda_graph:
            for name, buffer in buffers.items():
                if not torch.is_tensor(buffer):
                    raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
            assert paged_kv_last_page_len_buffer is not None
            assert paged_kv_indptr_buffer is not None
            self._fixed_batch_size = len(paged_kv_last_page_len_buffer)
            if len(paged_kv_indptr_buffer) != self._fixed_batch_size + 1:
                raise ValueError("The size of paged_kv_indptr_buffer should be batch_size + 1")
        self._paged_kv_indptr_buf: Any = paged_kv_indptr_buffer
        self._paged_kv_indices_buf: Any = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf: Any = paged_kv_last_page_len_buffer
        self._qo_indptr_buf: Any = None
        self._use_tensor_cores = use_tensor_cores
        if use_tensor_cores and use_cuda_graph:
            with cuda.paused():
                self._qo_indptr_buf = cuda.adopt(torch.arange(self._fixed_batch_size + 1, dtype=torch.int32))
        self._record(
            "",
            "create",
            {
                "float_workspace_buffer": float_workspace_buffer,
                "kv_layout": kv_layout,
                "use_cuda_graph": use_cuda_graph,
                "use_tensor_cores": use_tensor_cores,
                "backend": backend,
                **buffers,
            },
        )

    @property
    def use_tensor_cores(self) -> bool:
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """Plan for the lengths of one batch. Index arrays int32, on the host or the device.

        Raises:
            ValueError, RuntimeError, KeyError: as the real library, see the contract.
        """
        check_positions(pos_encoding_mode)
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        q_dtype = dtype_of(q_data_type)  # pyright: ignore[reportArgumentType] - None is a TypeError, as there
        kv_dtype = dtype_of(kv_data_type) if kv_data_type is not None else q_dtype
        o_dtype = dtype_of(o_data_type) if o_data_type is not None else q_dtype
        with cuda.paused():
            batch_size = last_page_len.shape[0]
        call = self._record(
            "plan",
            "plan",
            {
                "indptr": indptr,
                "indices": indices,
                "last_page_len": last_page_len,
                "num_qo_heads": num_qo_heads,
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "page_size": page_size,
                "window_left": window_left,
                "logits_soft_cap": logits_soft_cap,
                "q_data_type": q_dtype,
                "kv_data_type": kv_dtype,
                "o_data_type": o_dtype,
                "sm_scale": sm_scale,
                "seq_lens": seq_lens,
                "block_tables": block_tables,
            },
        )
        self._fill_buffers(indptr, indices, last_page_len, batch_size, non_blocking)
        read_back(indptr=indptr, last_page_len=last_page_len, seq_lens=seq_lens)
        with cuda.paused():
            record = rules.strict()
            if record is not None:
                rules.pages(
                    record, _PLAN_NAMES, indptr, indices, last_page_len, batch_size, page_size, seq_lens
                )
            if fixed_split_size is not None and not self._use_tensor_cores:
                raise ValueError("fixed_split_size is only supported by tensor core decode for now.")
            lengths = (
                lengths_by_pages(indptr, last_page_len, page_size)
                if seq_lens is None
                else cuda.host(seq_lens).reshape(-1)
            )
            kernel = "cuda_core"
            if self._use_tensor_cores:
                longest(lengths)
                kernel = self._tensor_core_backend(q_dtype)
            if record is not None:
                arrays = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
                loaded = rules.loaded(kernel, self._use_cuda_graph, "indices", arrays)
                rules.strides(record, {"indptr": indptr}, loaded)
            check_compiled(q_dtype, kv_dtype, o_dtype)
            if kernel == "cuda_core" and indptr.dtype is not torch.int32:
                raise RuntimeError(
                    f"Ninja build failed: batch decode has no variant with {indptr.dtype} indices "
                    "(paged_kv_indptr)"
                )
            cap = logits_soft_cap or 0.0
            plan = Plan(
                kernel=kernel,
                num_qo_heads=num_qo_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                page_size=page_size,
                qo=list(range(batch_size + 1)),
                kv=[],
                capped=cap > 0,
                windowed=window_left != -1,
                window_left=window_left,
                graph=self._use_cuda_graph,
                total_rows=batch_size,
                fixed_split=fixed_split_size or -1,
                disable_split=disable_split_kv,
                q_dtype=q_dtype,
                kv_dtype=kv_dtype,
                qo_last=batch_size,
            )
            if kernel == "cuda_core":
                plan.kv = read_decode_indptr(indptr, batch_size)
                make_decode(plan, self._float_workspace_buffer)
            else:
                rows = torch.arange(batch_size + 1, dtype=torch.int32)
                plan.qo, plan.kv = read_host(rows, indptr, batch_size)
                make_prefill(plan, self._float_workspace_buffer, lengths)
        self._keep_plan(plan, call)
        self._cached_q_data_type, self._cached_kv_data_type = q_dtype, kv_dtype
        self._cached_o_data_type = o_dtype
        self._batch_size, self._num_qo_heads, self._num_kv_heads = batch_size, num_qo_heads, num_kv_heads
        self._block_tables = block_tables
        self._pos_encoding_mode = pos_encoding_mode
        self._window_left, self._logits_soft_cap, self._sm_scale = window_left, cap, sm_scale
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        self._late: tuple[str, ...] = ()

    def _tensor_core_backend(self, q_dtype: torch.dtype) -> Any:
        if q_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise NotImplementedError(f"the fake of flashinfer does not compute q_data_type={q_dtype}")
        if self._backend == "auto":
            self._backend = "fa2"
        return self._backend

    def _fill_buffers(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        batch_size: int,
        non_blocking: bool,
    ) -> None:
        if not self._use_cuda_graph:
            self._paged_kv_indptr_buf = upload(indptr, non_blocking, self.device)
            self._paged_kv_indices_buf = upload(indices, non_blocking, self.device)
            self._paged_kv_last_page_len_buf = upload(last_page_len, non_blocking, self.device)
            with cuda.paused():
                self._qo_indptr_buf = cuda.adopt(torch.arange(batch_size + 1, dtype=torch.int32))
            return
        require_room(self, batch_size, indices.shape[0])
        self._paged_kv_indptr_buf.copy_(indptr, non_blocking=non_blocking)
        self._paged_kv_last_page_len_buf.copy_(last_page_len, non_blocking=non_blocking)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices, non_blocking=non_blocking)

    begin_forward = plan

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> torch.Tensor:
        """The older `run`. What it sets replaces the plan's values, too late for what is compiled in."""
        check_positions(pos_encoding_mode)
        self._late = paged_run.set_late(self, window_left, logits_soft_cap, sm_scale)
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = 1,
        skip_softmax_threshold_scale_factor: float | None = None,
    ) -> Any:
        """Attend by the latest plan. Arguments that fa2, fa3 and CUDA cores do not read have no effect.

        Raises:
            AttributeError: no plan was made. ValueError: dtypes are not the planned ones.
        """
        with cuda.paused():
            k, v = unpack_cache(paged_kv_cache, self._kv_layout)
            check_dtypes(q, k, self._cached_q_data_type, self._cached_kv_data_type)
            plan = self._plan_info
            assert plan is not None
            self._check_rows(q.shape[0], plan)
            assert window_left is None or window_left == self._window_left
            shape = (*q.shape[:-1], v.shape[-1])
            if out is None:
                out = poisoned(shape, self._cached_o_data_type)
            else:
                check_buffer(out, tuple(q.shape), self._cached_o_data_type, q, "out")
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
            launch = paged_run.launch_of(self, plan, call, k, q_scale, k_scale, v_scale, causal=False)
            if plan.kernel == "cuda_core":
                self._check_cuda_core()
                check_group(q.shape[1], k.shape[heads])
            check_on_device(q=q, paged_kv_cache=k)
        paged_run.paged_kernel(
            launch,
            q,
            k,
            v,
            self._qo_indptr_buf if plan.kernel != "cuda_core" else None,
            self._paged_kv_indptr_buf,
            self._paged_kv_indices_buf,
            self._paged_kv_last_page_len_buf,
            self._held_plan,
            out,
            lse if return_lse else None,
        )
        return (out, lse) if return_lse else out

    def _check_rows(self, rows: int, plan: Plan) -> None:
        if not releases.at_least("flashinfer", "0.7.2"):
            return
        per_request = rows // max(1, self._paged_kv_last_page_len_buf.shape[0])
        if plan.kernel == "cuda_core" and per_request > 1:
            raise ValueError(
                f"q implies q_len_per_req={per_request}, but the non-tensor-core decode kernel only supports "
                "q_len_per_req=1."
            )
        if plan.kernel != "cuda_core" and per_request != 1:
            raise ValueError(
                f"q implies q_len_per_req={per_request} but plan() used 1; re-plan with the matching "
                "q_len_per_req."
            )

    def _check_cuda_core(self) -> None:
        for name in ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"):
            if getattr(self, f"_{name}_buf").dtype is not torch.int32:
                raise RuntimeError(f"Inconsistency of Tensor type: {name}")

    def forward_return_lse(
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_positions(pos_encoding_mode)
        self._late = paged_run.set_late(self, window_left, logits_soft_cap, sm_scale)
        self._rope_scale, self._rope_theta = rope_scale, rope_theta
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _end_forward(self) -> None:
        """Has no effect."""

    _end_forward.__name__ = "end_forward"
    end_forward = Until("0.7.2", _end_forward)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with `use_cuda_graph=True` and its buffers first."""

    _name = "CUDAGraphBatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )
