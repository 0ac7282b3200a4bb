"""`sgl_kernel.flash_attn`: FlashAttention 3 over a paged, dense or ragged KV, of sglang-kernel 0.4.6."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fakes import cuda, recorder
from fakes.recorder import Call
from fakes.sgl_kernel import checks
from fakes.sgl_kernel.arguments import Forward
from fakes.sgl_kernel.findings import ignored
from fakes.sgl_kernel.forward import forward
from fakes.sgl_kernel.scheduler import get_scheduler_metadata

__all__ = [
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
    "is_fa3_supported",
    "maybe_contiguous",
]


Results = torch.Tensor | tuple[torch.Tensor | None, ...]


def is_fa3_supported(device: Any = None) -> bool:
    """Whether this GPU runs FlashAttention 3: compute capability 8 or 9. Without a simulated GPU: yes."""
    return cuda.current() is None or torch.cuda.get_device_capability(device)[0] in (8, 9)


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """x, copied unless its last dimension is contiguous."""
    return x if x is None else _dense_last(x)


@cuda.kernel
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: torch.Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Results:
    """Attention of q over a KV cache that holds each request's keys; appends k and v to it first, if given.

    Args:
        q: `[total_q, num_qo_heads, head_dim]` with `cu_seqlens_q`, else
            `[batch, seqlen_q, num_qo_heads, head_dim]`.
        k_cache, v_cache: `[num_pages, page_size, num_kv_heads, dim]` with `page_table`, else
            `[batch, max_len, num_kv_heads, dim]`. Same dtype as q: fp16, bf16, float8_e4m3fn.
        cache_seqlens: int32 `[batch]`, tokens in the cache; an int stands for `q.shape[0]` times that int.
        page_table: int32 `[batch, max_pages]`, page *numbers*.
        cu_seqlens_q: int32 `[batch + 1]`, running sum of rows; needs `max_seqlen_q`.
        q_descale, k_descale, v_descale: float32 `[batch, num_kv_heads]`; ignored unless q is fp8.
        causal: aligned bottom right. window_size: keys visible left and right of the row's own; -1 for all.
        sinks: bf16 `[num_qo_heads]`, a score per head that brings no value.

    Returns:
        out, shaped as q with the head dim of v (bf16 for fp8); with `return_softmax_lse` a tuple of out, LSE
        (float32, natural log, `[num_qo_heads, total_q]` or `[batch, num_qo_heads, seqlen_q]`) and the two
        split buffers. A row that sees no key is (0, -inf).

    Raises:
        RuntimeError: what the library refuses, in its words.
        NotImplementedError: rotary embedding, `qv`, left padding or chunked attention: the fake has none.
    """
    given = dict(locals())
    call = _record("flash_attn_with_kvcache", given)
    if v_cache is None:
        raise ValueError("v_cache must be provided")
    assert v_cache.stride(-1) == 1, "v_cache must have contiguous last dimension"
    if k_cache is None and not only_qv:
        raise ValueError("k_cache can only be None when only_qv=True")
    if q is None and not only_qv:
        raise ValueError("q can only be None when only_qv=True")
    _leave_out(
        qv=qv, only_qv=only_qv or None, cache_leftpad=cache_leftpad, attention_chunk=attention_chunk or None
    )
    assert k_cache.stride(-1) == 1, "k_cache must have contiguous last dimension"
    if rotary_cos is not None and k is None:
        checks.refuse(
            "If rotary cos/sin are provided, new key / value to be appended to KV cache must also be provided"
        )
    _leave_out(rotary_cos=rotary_cos)
    _say_ignored(given)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32)
        cache_seqlens = cuda.adopt(cache_seqlens)
    results = forward(
        Forward(
            q=_dense_last(q),
            k=k_cache,
            v=v_cache,
            k_new=k if k is None else _dense_last(k),
            v_new=v if v is None else _dense_last(v),
            out=out,
            cu_seqlens_q=maybe_contiguous(cu_seqlens_q),
            cu_seqlens_k_new=maybe_contiguous(cu_seqlens_k_new),
            seqused_k=cache_seqlens,
            lens_name="cache_seqlens",
            max_seqlen_q=max_seqlen_q,
            page_table=maybe_contiguous(page_table),
            kv_batch_idx=maybe_contiguous(cache_batch_idx),
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window=(window_size[0], window_size[1]),
            soft_cap=softcap,
            scheduler_metadata=scheduler_metadata,
            num_splits=num_splits,
            sinks=sinks,
        ),
        call,
    )
    return results if return_softmax_lse else results[0]


@cuda.kernel
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    only_qv: bool = False,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
    sinks: torch.Tensor | None = None,
    score_mod: Callable[..., Any] | None = None,
    aux_tensors: Any = None,
    ver: int = 3,
    out: torch.Tensor | None = None,
) -> Results:
    """Attention of ragged q over ragged k and v, both without pages.

    Args:
        q: `[total_q, num_qo_heads, head_dim]`. k, v: `[total_k, num_kv_heads, dim]`, the dtype of q.
        cu_seqlens_q, cu_seqlens_k: int32 `[batch + 1]`, contiguous. max_seqlen_q, max_seqlen_k: required.
        seqused_q, seqused_k: int32 `[batch]`: how much of each request counts. The rest as in
            `flash_attn_with_kvcache`; `page_table` is ignored.

    Returns:
        out `[total_q, num_qo_heads, head_dim_v]`; with `return_softmax_lse` a tuple of out, LSE (float32,
        natural log, `[num_qo_heads, total_q]`) and the two split buffers. A row that sees no key is
        (0, -inf); without any key in the whole batch it is (0, +inf).

    Raises:
        ValueError: a maximum is missing. RuntimeError: what the library refuses, in its words.
        NotImplementedError: `qv` or chunked attention; or a GPU below compute capability 8.
    """
    given = dict(locals())
    if not is_fa3_supported():
        raise NotImplementedError("flash_attn at sgl-kernel is only supported on sm90 and above")
    call = _record("flash_attn_varlen_func", given)
    if max_seqlen_q is None or max_seqlen_k is None:
        raise ValueError("max_seqlen_q and max_seqlen_k are required for FA3")
    _leave_out(qv=qv, only_qv=only_qv or None, attention_chunk=attention_chunk or None)
    _say_ignored(given)
    ignored("page_table", "flash_attn_varlen_func takes no pages", page_table is not None)
    results = forward(
        Forward(
            q=q,
            k=k,
            v=v,
            out=out,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            lens_name="seqused_k",
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            scale=q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
            causal=causal,
            window=(window_size[0], window_size[1]),
            soft_cap=softcap,
            num_splits=num_splits,
            sinks=sinks,
        ),
        call,
    )
    return results if return_softmax_lse else results[0]


def _record(name: str, given: dict[str, Any]) -> Call | None:
    record = recorder.current()
    return None if record is None else record.call("sgl_kernel", name, "attend", 0, given)


def _leave_out(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(f"the fake of sgl_kernel does not compute {name}")


def _say_ignored(given: dict[str, Any]) -> None:
    """Strict: arguments that this release takes and never reads, where they ask for something."""
    ignored("score_mod", "this release does not pass it on", given["score_mod"] is not None)
    ignored("ver", "this release runs version 3 alone", given["ver"] != 3)
    if given["q"].dtype == torch.float8_e4m3fn:
        return
    for name in ("q_descale", "k_descale", "v_descale"):
        scale = given[name]
        if scale is not None:
            ignored(name, "only an fp8 q is descaled", bool((cuda.host(scale) != 1).any()))


def _dense_last(x: torch.Tensor) -> torch.Tensor:
    if x.stride(-1) == 1:
        return x
    return cuda.adopt(x.contiguous()) if cuda.on_device(x) else x.contiguous()
