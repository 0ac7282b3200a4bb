"""`flashinfer.mla`: latent attention over a paged cache of compressed KV, fa2 and fa3."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from fakes import attend as numbers
from fakes import cuda, recorder, releases
from fakes.flashinfer import rules, staging
from fakes.flashinfer.arrays import first, on_host, upload, words
from fakes.flashinfer.kernels import LN2, SENTINEL
from fakes.flashinfer.plans import Plan, check_compiled
from fakes.flashinfer.wrapper import (
    Wrapper,
    check_buffer,
    check_on_device,
    plan_in,
    poisoned,
    refuse_uncomputed,
    report_overwritten,
)
from fakes.modes import UndefinedRead, illegal_access
from fakes.recorder import Attended, Call, Span

__all__ = ["BatchMLAPagedAttentionWrapper"]


class BatchMLAPagedAttentionWrapper(Wrapper):
    """Multi-head latent attention: one latent key per token, which is its value, too.

    q_nope `[rows, num_heads, head_dim_ckv]`, q_pe `[rows, num_heads, head_dim_kpe]`, ckv_cache
    `[pages, page_size, head_dim_ckv]`, kpe_cache `[pages, page_size, head_dim_kpe]`; out like q_nope; LSE
    float32
    `[rows, num_heads]`, base 2 unless `return_lse_base_on_e`. Lengths come from `kv_len_arr` of the plan.
    """

    _name = "BatchMLAPagedAttentionWrapper"
    _replans = False

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: torch.Tensor | None = None,
        kv_indptr: torch.Tensor | None = None,
        kv_indices: torch.Tensor | None = None,
        kv_len_arr: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        if backend not in ("auto", "fa2", "fa3"):
            refuse_uncomputed(backend=backend)
        self._start(float_workspace_buffer, "NHD", "fa3" if backend == "auto" else backend, use_cuda_graph)
        self._qo_indptr_buf: Any = qo_indptr
        self._kv_indptr_buf: Any = kv_indptr
        self._kv_indices_buf: Any = kv_indices
        self._kv_len_arr_buf: Any = kv_len_arr
        self._record(
            "",
            "create",
            {
                "float_workspace_buffer": float_workspace_buffer,
                "use_cuda_graph": use_cuda_graph,
                "backend": backend,
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
            },
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        """Plan for one batch. Index arrays int32, `kv_len_arr` in tokens.

        Raises:
            RuntimeError: qo_indptr falls. KeyError: a dtype that no kernel was built for.
        """
        refuse_uncomputed(use_profiler=use_profiler)
        with cuda.paused():
            batch_size = qo_indptr.shape[0] - 1
        call = self._record(
            "plan",
            "plan",
            {
                "qo_indptr": qo_indptr,
                "kv_indptr": kv_indptr,
                "kv_indices": kv_indices,
                "kv_len_arr": kv_len_arr,
                "num_heads": num_heads,
                "head_dim_ckv": head_dim_ckv,
                "head_dim_kpe": head_dim_kpe,
                "page_size": page_size,
                "causal": causal,
                "sm_scale": sm_scale,
                "q_data_type": q_data_type,
                "kv_data_type": kv_data_type,
            },
        )
        with cuda.paused():
            record = rules.strict()
            if record is not None:
                self._check_arrays(
                    record, qo_indptr, kv_indptr, kv_indices, kv_len_arr, batch_size, page_size
                )
            check_compiled(q_data_type, kv_data_type)
        if self._use_cuda_graph:
            self._qo_indptr_buf.copy_(qo_indptr, non_blocking=True)
            self._kv_indptr_buf.copy_(kv_indptr, non_blocking=True)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices, non_blocking=True)
            self._kv_len_arr_buf.copy_(kv_len_arr, non_blocking=True)
        else:
            self._qo_indptr_buf = upload(qo_indptr, True, self.device)
            self._kv_indptr_buf = upload(kv_indptr, True, self.device)
            self._kv_indices_buf = upload(kv_indices, True, self.device)
            self._kv_len_arr_buf = upload(kv_len_arr, True, self.device)
        staging.read_back(qo_indptr=qo_indptr, kv_indptr=kv_indptr, kv_len_arr=kv_len_arr)
        with cuda.paused():
            qo = first(words(on_host(qo_indptr)), batch_size + 1, "qo_indptr")
            for i, (a, b) in enumerate(itertools.pairwise(qo)):
                if b < a:
                    raise RuntimeError(f"qo_indptr[{i + 1}]{b} - qo_indptr[{i}]{a} should be non-negative")
            plan = Plan(
                kernel="fa3" if self._backend == "fa3" else "fa2",
                num_qo_heads=num_heads,
                num_kv_heads=1,
                head_dim=head_dim_ckv,
                page_size=page_size,
                qo=qo,
                kv=first(words(on_host(kv_indptr)), batch_size + 1, "kv_indptr"),
                capped=False,
                windowed=False,
                kv_lens=first(words(on_host(kv_len_arr)), batch_size, "kv_len_arr"),
                q_dtype=q_data_type,
                kv_dtype=kv_data_type,
                qo_last=qo[-1],
            )
        self._keep_plan(plan, call)
        self._causal, self._page_size, self._sm_scale = causal, page_size, sm_scale

    def _check_arrays(
        self,
        record: recorder.Recorder,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        kv_len_arr: torch.Tensor,
        batch_size: int,
        page_size: int,
    ) -> None:
        planned = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}
        rules.strides(record, planned, {} if self._use_cuda_graph else {"kv_indices": kv_indices})
        rules.indptr(record, "qo_indptr", rules.array(record, "qo_indptr", qo_indptr), batch_size, "rows")
        starts = rules.array(record, "kv_indptr", kv_indptr)
        lens = rules.array(record, "kv_len_arr", kv_len_arr)
        ids = rules.array(record, "kv_indices", kv_indices)
        good = rules.indptr(record, "kv_indptr", starts, batch_size, "page ids")
        if starts is None or lens is None or ids is None or not good:
            return
        if lens.size != batch_size:
            record.find(
                "fi.kv-len",
                "arrays",
                "kv_len_arr",
                f"kv_len_arr has {lens.size} entries, must have one for each of {batch_size} requests",
            )
            return
        need = -(-lens // page_size)
        if (need > np.diff(starts)).any():
            i = int((need > np.diff(starts)).argmax())
            record.find(
                "fi.kv-len",
                "arrays",
                "kv_len_arr",
                f"kv_len_arr[{i}] is {lens[i]}, request {i} has {starts[i + 1] - starts[i]} pages of "
                f"{page_size}",
                i,
            )
        if starts[-1] > ids.size:
            record.find(
                "fi.indices-short",
                "arrays",
                "kv_indices",
                f"kv_indices has {ids.size} entries, kv_indptr[-1] is {starts[-1]}: what lies behind is read",
            )

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv_cache: torch.Tensor,
        kpe_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        profiler_buffer: torch.Tensor | None = None,
        kv_len: torch.Tensor | None = None,
        page_table: torch.Tensor | None = None,
        return_lse_base_on_e: bool = False,
    ) -> Any:
        """Attend by the latest plan. `kv_len` and `page_table` are read by the cutlass backend only."""
        with cuda.paused():
            plan = self._plan_info
            if plan is None:
                raise AttributeError(f"{self._name!r} object has no attribute '_page_size'")
            check_on_device(q_nope=q_nope, q_pe=q_pe, ckv_cache=ckv_cache, kpe_cache=kpe_cache)
            if out is None:
                out = poisoned(tuple(q_nope.shape), q_nope.dtype)
            else:
                check_buffer(out, tuple(q_nope.shape), q_nope.dtype, q_nope, "out")
            shape = tuple(q_nope.shape[:2])
            if return_lse and lse is None:
                lse = poisoned(shape, torch.float32)
            elif return_lse and lse is not None:
                check_buffer(lse, shape, torch.float32, q_nope, "lse")
            call = self._record(
                "run",
                "attend",
                {
                    "q_nope": q_nope,
                    "q_pe": q_pe,
                    "ckv_cache": ckv_cache,
                    "kpe_cache": kpe_cache,
                    "return_lse": return_lse,
                    "return_lse_base_on_e": return_lse_base_on_e,
                },
                plan,
            )
            self._check_order(plan, q_nope, 1, ckv_cache.shape[1])
        _kernel(
            plan,
            call,
            self._causal,
            float(self._sm_scale),
            return_lse_base_on_e,
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            self._kv_indices_buf,
            self._held_plan,
            out,
            lse if return_lse else None,
        )
        return (out, lse) if return_lse else out


@cuda.kernel
def _kernel(
    plan: Plan,
    call: Call | None,
    causal: bool,
    scale: float,
    natural: bool,
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indices: torch.Tensor,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    out = cuda.host(out)
    found = plan_in(int_workspace, plan)
    if found is None:
        report_overwritten()
        out.fill_(float("nan"))
        if lse is not None:
            cuda.host(lse).fill_(float("nan"))
        return
    plan = found
    if call is not None:
        call.plan = plan.call
    staging.ran(plan.staged, out, None if lse is None else cuda.host(lse))
    q_nope, q_pe, ckv, kpe = (cuda.host(t) for t in (q_nope, q_pe, ckv_cache, kpe_cache))
    read = _spans(plan, words(kv_indices), ckv.shape[0])
    rows = q_nope.shape[0]
    spans = tuple(span for span in read if span.q_end <= rows)
    if call is not None:
        call.attended = Attended(
            q_nope, ckv[:, :, None], ckv[:, :, None], "NHD", plan.page_size, spans, causal, -1, -1, 0.0, scale
        ).kept()
    slots = np.concatenate([span.slots for span in spans]) if spans else np.empty(0, np.int64)
    at = torch.from_numpy(slots)
    values = ckv.reshape(-1, ckv.shape[-1]).index_select(0, at)[:, None]
    keys = torch.cat((values, kpe.reshape(-1, kpe.shape[-1]).index_select(0, at)[:, None]), dim=-1)
    start, dense = 0, []
    for span in spans:
        dense.append(Span(span.q_start, span.q_end, np.arange(start, start + len(span.slots))))
        start += len(span.slots)
    exact, exact_lse = numbers.attend(
        torch.cat((q_nope, q_pe), dim=-1), keys, values, dense, layout="ragged", scale=scale, causal=causal
    )
    if not natural:
        exact_lse /= LN2
    if not releases.at_least("flashinfer", "0.7.2"):
        exact_lse[np.isneginf(exact_lse)] = SENTINEL * (LN2 if natural else 1.0)
    idle = numbers.uncovered(spans, rows)
    numbers.rounded(exact, out.dtype, out, idle, of=(q_nope, q_pe, ckv, kpe))
    if lse is not None:
        numbers.rounded(exact_lse, torch.float32, cuda.host(lse), idle, of=(q_nope, q_pe, ckv, kpe))


def _spans(plan: Plan, pages: np.ndarray, num_pages: int) -> list[Span]:
    """Request i's tokens, by the plan's lengths and offsets, in pages that are read when the kernel runs."""
    spans = []
    for i, length in enumerate(plan.kv_lens or []):
        tokens = np.arange(max(length, 0))
        entry = plan.kv[i] + tokens // plan.page_size
        if length > 0 and int(entry[-1]) >= pages.size:
            raise UndefinedRead(
                f"kv_indices[{pages.size}] is read for request {i}, the array has {pages.size} entries"
            )
        page = pages[entry].astype(np.int64)
        if length > 0 and (int(page.min()) < 0 or int(page.max()) >= num_pages):
            worst = int(page[(page < 0) | (page >= num_pages)][0])
            raise illegal_access(f"request {i} reads page {worst} of a pool of {num_pages} pages")
        spans.append(Span(plan.qo[i], plan.qo[i + 1], page * plan.page_size + tokens % plan.page_size))
    return spans
