"""`trtllm_batch_decode_with_kv_cache` as an H200 answers it: by XQA, from a dense table of page ids."""

from __future__ import annotations

import numpy as np
import torch

from fakes import attend as numbers
from fakes import cuda, recorder
from fakes.flashinfer.arrays import words
from fakes.flashinfer.rules import strict
from fakes.flashinfer.schedule import NUM_SM
from fakes.flashinfer.wrapper import LIBRARY, check_on_device, poisoned, refuse_uncomputed
from fakes.modes import UndefinedRead, illegal_access
from fakes.recorder import Attended, Call, Span

PAGE_SIZES = (16, 32, 64, 128)
SEMAPHORE_BYTES = 8 * 1024 * 1024
KEYS_PER_BLOCK = 64
"""Tokens that one block takes at a time: a longer request is shared by several blocks while there are any."""


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float | torch.Tensor = 1.0,
    bmm2_scale: float | torch.Tensor = 1.0,
    window_left: int = -1,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | str | None = None,
    o_sf_scale: float | None = None,
    o_sf_vec_size: int | None = None,
    sinks: list[torch.Tensor] | None = None,
    kv_layout: str = "HND",
    enable_pdl: bool | None = None,
    backend: str = "auto",
    q_len_per_req: int | None = 1,
    o_scale: float | None = 1.0,
    mask: torch.Tensor | None = None,
    max_q_len: int | None = None,
    cum_seq_lens_q: torch.Tensor | None = None,
    skip_softmax_threshold_scale_factor: float | None = None,
) -> torch.Tensor:
    """Decode one row per request.

    query `[batch, num_qo_heads, head_dim]`; block_tables int32 `[batch, max pages]`; seq_lens int32 `[batch]`;
    bmm1_scale multiplies q . k, bmm2_scale the output. The first 8 MiB of the workspace are semaphores: zero at first
    use, left zero by every call.

    Raises:
        ValueError: a page size that XQA was not built for, or arguments of trtllm-gen.
        KeyError: another backend.
    """
    if backend not in ("auto", "xqa"):
        if backend == "trtllm-gen":
            refuse_uncomputed(backend=backend)
        raise KeyError(f"Backend {backend} not supported")
    if out_dtype == "nvfp4":
        raise ValueError("xqa backend does not support nvfp4 output")
    if o_sf_scale is not None or o_sf_vec_size is not None:
        raise ValueError("xqa backend does not support o_sf_scale or o_sf_vec_size")
    if max_q_len is not None or cum_seq_lens_q is not None:
        raise ValueError("xqa backend does not support cum_seq_lens_q")
    refuse_uncomputed(
        sinks=sinks,
        mask=mask,
        q_len_per_req=None if q_len_per_req == 1 else q_len_per_req,
        o_scale=None if o_scale == 1.0 else o_scale,
        out_dtype=None if out_dtype in (None, query.dtype) else out_dtype,
    )
    with cuda.paused():
        if isinstance(kv_cache, tuple):
            k, v = kv_cache
        elif kv_cache.shape[1] == 1:
            k = v = kv_cache[:, 0]
        else:
            assert kv_cache.shape[1] == 2, (
                "When kv_cache is a single tensor, the second dimension must be 1 or 2"
            )
            k, v = kv_cache[:, 0], kv_cache[:, 1]
        page_size = k.shape[1] if kv_layout == "NHD" else k.shape[2]
        if page_size not in PAGE_SIZES:
            raise ValueError(f"Invalid page size {page_size}: only 16, 32, 64, 128 are supported")
        check_on_device(query=query, kv_cache=k, block_tables=block_tables, seq_lens=seq_lens)
        if out is None:
            out = poisoned(tuple(query.shape), query.dtype)
        record = recorder.current()
        call = None
        if record is not None:
            call = record.call(
                LIBRARY,
                "trtllm_batch_decode_with_kv_cache",
                "attend",
                0,
                {
                    "query": query,
                    "block_tables": block_tables,
                    "seq_lens": seq_lens,
                    "max_seq_len": max_seq_len,
                    "bmm1_scale": bmm1_scale,
                    "bmm2_scale": bmm2_scale,
                    "window_left": window_left,
                    "kv_layout": kv_layout,
                },
            )
    _kernel(
        call,
        kv_layout,
        page_size,
        max_seq_len,
        float(bmm1_scale),
        float(bmm2_scale),
        window_left,
        query,
        k,
        v,
        workspace_buffer,
        block_tables,
        seq_lens,
        out,
    )
    return out


@cuda.kernel
def _kernel(
    call: Call | None,
    layout: str,
    page_size: int,
    max_seq_len: int,
    scale: float,
    v_scale: float,
    window_left: int,
    query: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    workspace: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    out: torch.Tensor,
) -> None:
    query, k, v, out, tables = (cuda.host(t) for t in (query, k, v, out, block_tables))
    kv_heads = k.shape[1] if layout == "HND" else k.shape[2]
    batch = query.shape[0]
    record = strict()
    if record is not None:
        for name, tensor in (("block_tables", tables), ("seq_lens", cuda.host(seq_lens))):
            if tensor.dtype is not torch.int32:
                record.find("fi.int32", "arrays", name, f"{name} is {tensor.dtype}, must be torch.int32")
    lens = words(seq_lens)[:batch].tolist()
    flat, width = words(tables), tables.shape[1]
    spans: list[Span] = []
    for i, length in enumerate(lens):
        pages = -(-length // page_size)
        if pages > width and record is not None:
            record.find(
                "fi.table-short",
                "arrays",
                "block_tables",
                f"block_tables has {width} columns, request {i} of {length} tokens needs {pages}",
                i,
            )
        ids = flat[i * width : i * width + pages].astype(np.int64)
        if ids.size < pages:
            raise UndefinedRead(f"block_tables[{i}, {width}] is read past the end of the table")
        if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= k.shape[0]):
            raise illegal_access(f"request {i} reads a page outside of a pool of {k.shape[0]} pages")
        slots = (ids[:, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
        spans.append(Span(i, i + 1, slots))
    if call is not None:
        call.attended = Attended(
            query,
            k,
            v,
            layout,
            page_size,
            tuple(spans),
            False,
            window_left,
            -1,
            0.0,
            scale,
            None,
            1.0,
            v_scale,
        ).kept()
    exact, _ = numbers.attend(
        query, k, v, spans, layout=layout, scale=scale, window_left=window_left, v_scale=v_scale
    )
    semaphores = (
        cuda.host(workspace).view(torch.uint8).reshape(-1)[: min(SEMAPHORE_BYTES, 4 * batch * kv_heads)]
    )
    if semaphores.any():
        if record is not None:
            record.find(
                "fi.semaphores",
                "arrays",
                "workspace_buffer",
                "workspace_buffer does not begin with zeros: its first 8 MiB are semaphores and must be "
                "zero at first use",
            )
        blocks = min(max(1, NUM_SM // max(1, batch * kv_heads)), -(-max_seq_len // KEYS_PER_BLOCK))
        if blocks > 1:  # the last block of a request does not know itself: nobody merges the parts
            shared = np.array([length > KEYS_PER_BLOCK for length in lens])
            exact[shared] = np.nan
    semaphores.zero_()
    numbers.rounded(exact, out.dtype, out, of=(query, k, v))
