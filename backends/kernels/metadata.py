"""Index arrays of one kernel call, made from its plain host lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch

from backends.contract import KernelCall


def int32(values: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def indptr(lens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int32 `[len(lens) + 1]`: 0, then the running sum."""
    return int32([0, *accumulate(lens)], device)


@dataclass(frozen=True)
class PagedKV:
    """FlashInfer's CSR page metadata: int32, on the device."""

    indptr: torch.Tensor
    """`[bs + 1]`, in pages."""
    indices: torch.Tensor
    """`[indptr[-1]]`, page ids."""
    last_page_len: torch.Tensor
    """`[bs]`, 1 to page_size. A request without pages has page_size, which makes its mask segment empty."""
    seq_lens: torch.Tensor
    """`[bs]`, in tokens."""


def paged_kv(call: KernelCall, page_size: int) -> PagedKV:
    device = call.q.device
    counts = [len(pages) for pages in call.pages]
    last = [n - (count - 1) * page_size for n, count in zip(call.kv_lens, counts, strict=True)]
    return PagedKV(
        indptr=indptr(counts, device),
        indices=int32(list(chain.from_iterable(call.pages)), device),
        last_page_len=int32(last, device),
        seq_lens=int32(call.kv_lens, device),
    )


def page_table(call: KernelCall) -> torch.Tensor:
    """FlashAttention's page table: int32 `[bs, max pages]`, rows filled up with page 0, which is not read."""
    width = max(1, *(len(pages) for pages in call.pages))
    return int32([pages + [0] * (width - len(pages)) for pages in call.pages], call.q.device)


def flat_mask(call: KernelCall) -> torch.Tensor | None:
    """FlashInfer's custom mask: bool `[sum(qo_len * kv_len)]`, each request row by row."""
    if call.custom_mask is None:
        return None
    return torch.cat([mask.flatten() for mask in call.custom_mask])


def fp8_scales(call: KernelCall) -> dict[str, float]:
    """Keyword arguments of FlashInfer's `run` that dequantise an fp8 cache."""
    if call.k_cache.dtype == call.q.dtype:
        return {}
    return {"k_scale": call.k_scale, "v_scale": call.v_scale}
