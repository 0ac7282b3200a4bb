"""The schedule of a FlashAttention 3 batch, made once and handed to every layer."""

from __future__ import annotations

import torch

from fakes import cuda, recorder
from fakes.sgl_kernel import checks
from fakes.sgl_kernel.masking import visible


@cuda.kernel
def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads: int,
    num_heads_k: int,
    headdim: int,
    cache_seqlens: torch.Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    seqused_q: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> torch.Tensor:
    """The schedule of a batch, to be computed once and handed to every layer's `scheduler_metadata`.

    Returns:
        int32 `[metadata_size]`; the size depends on the batch and on whether the mask is causal, local or
        neither. Its content is the fake's own: the lengths that it was made for, so that strict mode can
        tell a stale one.

    Raises:
        RuntimeError: a dtype or head count that the library refuses.
    """
    given = dict(locals())
    record = recorder.current()
    if record is not None:
        record.call("sgl_kernel", "get_scheduler_metadata", "plan", 0, given)
    if qkv_dtype not in (torch.float16, torch.bfloat16, torch.float8_e4m3fn):
        checks.refuse("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if num_heads % num_heads_k:
        checks.refuse("Number of heads in key/value must divide number of heads in query")
    if attention_chunk or leftpad_k is not None:
        raise NotImplementedError("the fake of sgl_kernel does not compute attention_chunk or leftpad_k")
    mask = visible(
        causal,
        (window_size[0], window_size[1]),
        seqlen_q=max_seqlen_q,
        seqlen_k=max_seqlen_k,
        head_dim=headdim,
        paged=page_size is not None,
    )
    metadata = torch.zeros(checks.metadata_size(batch_size, mask), dtype=torch.int32)
    rounded = -(-batch_size // 4) * 4
    metadata[:rounded] = max(num_splits, 1)
    metadata[rounded : rounded + batch_size] = cuda.host(cache_seqlens).to(torch.int32)
    return metadata
