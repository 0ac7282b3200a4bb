"""`flashinfer.decode.fast_decode_plan`: a re-plan that copies no array to the device.

Source: its body in flashinfer-python 0.6.6 and 0.7.2, where it plans for one row per request in the same way.
"""

from __future__ import annotations

from typing import Any

import torch

from fakes import cuda, releases
from fakes.flashinfer import rules
from fakes.flashinfer.arrays import lengths_by_pages, on_host
from fakes.flashinfer.staging import read_back


def fast_decode_plan(
    self: Any,
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
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan a decode wrapper again, by the host array `global_override_indptr_cpu` (int32 `[bs + 1]`) where given.

    In CUDA-graph mode nothing is written to the wrapper's buffers: the caller has done that. Elsewhere the arrays
    handed over become its buffers. Dtypes, window and soft cap stay those that the first `plan` compiled.

    Raises:
        ValueError: another batch size than the buffers', or more indices than they hold.
        RuntimeError: no plan was made before, or the planner refuses.
    """
    with cuda.paused():
        batch_size = last_page_len.shape[0]
    if self._use_cuda_graph:
        require_room(self, batch_size, indices.shape[0])
    else:
        self._paged_kv_indptr_buf = indptr
        self._paged_kv_indices_buf = indices
        self._paged_kv_last_page_len_buf = last_page_len
    host_indptr = global_override_indptr_cpu
    if host_indptr is None:
        read_back(indptr=indptr)
        with cuda.paused():
            host_indptr = on_host(indptr)
    with cuda.paused():
        _compare(
            self,
            indptr,
            indices,
            last_page_len,
            batch_size,
            page_size,
            host_indptr,
            global_override_indptr_cpu,
        )
        lengths = lengths_by_pages(host_indptr, cuda.host(last_page_len), page_size)
        rows = torch.arange(batch_size + 1, dtype=torch.int32)
    workspaces = (
        self._float_workspace_buffer,
        self._int_workspace_buffer,
        self._pin_memory_int_workspace_buffer,
    )
    heads = (num_qo_heads, num_kv_heads, page_size, self._use_cuda_graph)
    if self._use_tensor_cores:
        args = [*workspaces, rows, host_indptr, lengths, batch_size, batch_size, *heads, head_dim, head_dim]
        args += [False, window_left]
        if self._backend == "fa2":
            args += [-1 if fixed_split_size is None else fixed_split_size, disable_split_kv, 0]
            args += [0] if releases.at_least("flashinfer", "0.7.2") else []
            args += [True] if releases.at_least("flashinfer", "0.7.4") else []
        if not self._use_cuda_graph:
            with cuda.paused():
                self._qo_indptr_buf = cuda.adopt(rows.clone())
    else:
        empty = torch.empty(0)
        args = [*workspaces, host_indptr, batch_size, *heads, window_left, logits_soft_cap or 0.0]
        args += [head_dim, head_dim, empty, empty]
    try:
        self._plan_info = self._cached_module.plan(*args)
    except Exception as error:
        raise RuntimeError(f"Error in standard plan: {error}") from error
    self._pos_encoding_mode = pos_encoding_mode
    self._window_left, self._logits_soft_cap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale
    self._rope_scale, self._rope_theta = rope_scale, rope_theta
    self._late = ()


def require_room(wrapper: Any, batch_size: int, num_indices: int) -> None:
    """Hold a plan in CUDA-graph mode to the buffers that a decode wrapper was made with.

    Raises:
        ValueError: another batch size than the buffers', or more indices than they hold.
    """
    if batch_size != wrapper._fixed_batch_size:
        raise ValueError(
            f"The batch size should be fixed in cudagraph mode, the runtime batch size {batch_size}  mismatches "
            f"the batch size set during initialization {wrapper._fixed_batch_size}"
        )
    if num_indices > wrapper._paged_kv_indices_buf.shape[0]:
        raise ValueError("The size of indices should be less than or equal to the allocated buffer")


def _compare(
    wrapper: Any,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    batch_size: int,
    page_size: int,
    host_indptr: torch.Tensor,
    override: torch.Tensor | None,
) -> None:
    """Strict mode: the arrays, and whether the planner is given what the kernel will read."""
    record = rules.strict()
    if record is None:
        return
    names = ("indptr", "indices", "last_page_len")
    arrays = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    kernel = "cuda_core" if not wrapper._use_tensor_cores else wrapper._backend
    planned = {"indptr": indptr} if override is None else {"global_override_indptr_cpu": override}
    rules.strides(record, planned, rules.loaded(kernel, wrapper._use_cuda_graph, "indices", arrays))
    rules.pages(record, names, indptr, indices, last_page_len, batch_size, page_size, None)
    read = cuda.host(wrapper._paged_kv_indptr_buf)[: batch_size + 1]
    if read.dtype == host_indptr.dtype and not torch.equal(read, host_indptr[: batch_size + 1]):
        record.find(
            "fi.host-indptr",
            "arrays",
            "global_override_indptr_cpu",
            f"global_override_indptr_cpu is {host_indptr[: batch_size + 1].tolist()}, the kernel reads "
            f"{read.tolist()} from the wrapper's indptr buffer: work is cut for other lengths",
        )
