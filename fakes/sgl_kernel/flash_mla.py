"""`sgl_kernel.flash_mla`: FlashMLA's dense decode over a paged latent cache, of sglang-kernel 0.4.6."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fakes import attend, cuda, recorder
from fakes.recorder import Attended, Span
from fakes.sgl_kernel import mla_checks
from fakes.sgl_kernel.pages import paged_slots

_ROUNDS_TO = {torch.float8_e4m3fn: torch.bfloat16}


@dataclass
class FlashMLASchedMeta:
    """A schedule that the first call fills in and later calls of the same shapes reuse."""

    @dataclass
    class Config:
        """Shapes and settings of the first call."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


@cuda.kernel
def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[torch.Tensor | FlashMLASchedMeta, torch.Tensor | None]:
    """The schedule of a batch, once per batch.

    Args:
        cache_seqlens: int32 `[batch]`. None: an empty `FlashMLASchedMeta` for the first call to fill in.
        num_q_tokens_per_head_k: rows of a request times query heads per KV head.

    Returns:
        tile_scheduler_metadata int32 `[parts, 8]`, whose content is the fake's own, and num_splits int32
        `[batch + 1]`.
    """
    given = dict(locals())
    record = recorder.current()
    if record is not None:
        record.call("sgl_kernel", "get_mla_metadata", "plan", 0, given)
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    assert num_q_tokens_per_head_k is not None
    assert num_heads_k is not None
    if topk is not None:
        raise NotImplementedError("the fake of sgl_kernel does not compute topk")
    return mla_checks.schedule(cache_seqlens, num_q_tokens_per_head_k, num_heads_k)


@cuda.kernel
def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor | FlashMLASchedMeta,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
    is_fp8_kvcache: bool = False,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q over a latent cache whose first `head_dim_v` columns are the values too.

    Args:
        q: `[batch, seqlen_q, num_qo_heads, 576]`, fp16, bf16 or fp8.
        k_cache: `[num_pages, 64, num_kv_heads, 576]`, the dtype of q.
        block_table: int32 `[batch, max_pages]`, page numbers; columns behind a request's pages are not read.
        cache_seqlens: int32 `[batch]`. head_dim_v: 512.
        tile_scheduler_metadata, num_splits: from `get_mla_metadata`.
        causal: aligned bottom right; no effect with one row a request.
        descale_q, descale_k: float32 `[1]`, required for fp8.

    Returns:
        out `[batch, seqlen_q, num_qo_heads, 512]` (bf16 for fp8), LSE float32 natural log
        `[batch, num_qo_heads, seqlen_q]`. A row that sees no key is (0, *+inf*).

    Raises:
        AssertionError, RuntimeError: what the library refuses.
        NotImplementedError: sparse attention and the packed fp8 cache, which the fake leaves out.
    """
    given = dict(locals())
    record = recorder.current()
    call = None
    if record is not None:
        call = record.call("sgl_kernel", "flash_mla_with_kvcache", "attend", 0, given)
    for name, value in (("indices", indices is not None), ("is_fp8_kvcache", is_fp8_kvcache)):
        if value:
            raise NotImplementedError(f"the fake of sgl_kernel does not compute {name}")
    schedule = tile_scheduler_metadata
    if isinstance(schedule, FlashMLASchedMeta):
        _enter(schedule, q, k_cache, causal, num_splits)
    else:
        assert num_splits is not None
    assert block_table is not None
    assert cache_seqlens is not None
    for unused in (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length):
        assert unused is None
    assert (descale_q is None) == (descale_k is None), (
        "descale_q and descale_k should be both None or both not None"
    )
    mla_checks.check(q, k_cache, block_table, cache_seqlens, head_dim_v, descale_q, descale_k)
    batch, seqlen_q, heads, dim = q.shape
    heads_k = k_cache.shape[2]
    rows = seqlen_q * heads // heads_k
    if isinstance(schedule, FlashMLASchedMeta):
        if schedule.tile_scheduler_metadata is None:
            made = mla_checks.schedule(cache_seqlens, rows, heads_k)
            schedule.tile_scheduler_metadata, schedule.num_splits = made
        schedule = schedule.tile_scheduler_metadata
    else:
        mla_checks.check_schedule(schedule, num_splits, batch, rows, heads_k)
    lens = cuda.host(cache_seqlens).numpy().astype(np.int64)
    mla_checks.check_planned(schedule, lens)
    reading = paged_slots(
        block_table,
        np.maximum(lens, 0),
        mla_checks.PAGE_SIZE,
        k_cache.shape[0],
        rule="mla",
        name="block_table",
        lens_name="cache_seqlens",
    )
    spans = tuple(Span(i * seqlen_q, (i + 1) * seqlen_q, slots) for i, slots in enumerate(reading.slots))
    causal = causal and seqlen_q > 1
    flat_q = cuda.host(q).reshape(batch * seqlen_q, heads, dim)
    cache = cuda.host(k_cache)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    if call is not None:
        call.attended = Attended(
            flat_q,
            cache,
            cache[..., :head_dim_v],
            "NHD",
            mla_checks.PAGE_SIZE,
            spans,
            causal,
            -1,
            -1,
            0.0,
            scale,
        ).kept()
    nothing = np.empty(0, dtype=np.int64)
    readable = [Span(s.q_start, s.q_end, nothing) if i in reading.lost else s for i, s in enumerate(spans)]
    k_scale = 1.0 if descale_k is None else float(cuda.host(descale_k))
    q_scale = 1.0 if descale_q is None else float(cuda.host(descale_q))
    exact, exact_lse = attend.attend(
        flat_q,
        cache,
        cache[..., :head_dim_v],
        readable,
        layout="NHD",
        scale=scale * q_scale,
        causal=causal,
        k_scale=k_scale,
        v_scale=k_scale,
    )
    exact_lse[np.isneginf(exact_lse)] = np.inf
    for index in reading.lost:
        exact[spans[index].q_start : spans[index].q_end] = np.nan
        exact_lse[spans[index].q_start : spans[index].q_end] = np.nan
    exact = np.ascontiguousarray(exact.reshape(batch, seqlen_q, heads, head_dim_v))
    by_head = np.ascontiguousarray(exact_lse.reshape(batch, seqlen_q, heads).transpose(0, 2, 1))
    out = attend.rounded(exact, _ROUNDS_TO.get(q.dtype, q.dtype), of=(q, k_cache))
    return out, attend.rounded(by_head, torch.float32, of=(q, k_cache))


def _enter(
    schedule: FlashMLASchedMeta, q: torch.Tensor, k_cache: torch.Tensor, causal: bool, num_splits: object
) -> None:
    assert num_splits is None, "num_splits must be None with FlashMLASchedMeta"
    config = FlashMLASchedMeta.Config(
        q.shape[0],
        q.shape[1],
        q.shape[2],
        k_cache.shape[1],
        k_cache.shape[2],
        causal,
        False,
        None,
        None,
        None,
    )
    if not schedule.have_initialized:
        schedule.have_initialized = True
        schedule.config = config
    assert schedule.config == config, (
        " Input arguments are inconsistent with FlashMLASchedMeta. Reuse a scheduler only for matching "
        "tensor shapes and sparse settings."
    )
