"""What FlashAttention 3's forward operator is given, and the sizes that it derives."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, kw_only=True)
class Forward:
    """Arguments of the operator. `lens_name` is what the caller's public signature calls `seqused_k`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    seqused_k: torch.Tensor | None
    lens_name: str
    scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float
    num_splits: int
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    cu_seqlens_k_new: torch.Tensor | None = None
    seqused_q: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    kv_batch_idx: torch.Tensor | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    scheduler_metadata: torch.Tensor | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True, frozen=True)
class Shape:
    """Sizes that the operator derives from its arguments."""

    batch: int
    batch_k: int
    seqlen_q: int
    """Rows of a request at most: what the caller says in varlen calls, right or not."""
    seqlen_k: int
    """Keys of a request at most."""
    heads: int
    heads_k: int
    dim: int
    dim_v: int
