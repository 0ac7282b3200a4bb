"""Seeded attention problems for the tests and the bench: a batch, its cache, and what surrounds it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from cases.model import Mask

CAUSAL = Mask()
TENSORS = {"q", "k_cache", "v_cache"}


class Problem(NamedTuple):
    """Arguments of `paged_attention`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    mask: Mask
    scale: float
    custom: Sequence[torch.Tensor] | None
    k_scale: float
    v_scale: float

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.v_cache

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {name: value for name, value in self._asdict().items() if name not in TENSORS}


def make_problem(
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    *,
    mask: Mask = CAUSAL,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    kv_dtype: torch.dtype | None = None,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    spread: float = 1.0,
    seed: int = 0,
) -> Problem:
    """A problem with keys in scattered slots; every slot that it does not list holds NaN.

    Args:
        heads: (num_qo_heads, num_kv_heads). dims: (head_dim_qk, head_dim_vo).
        scale: None: head_dim_qk ** -0.5. spread: standard deviation of the elements of q.
    """
    random = torch.Generator().manual_seed(seed)
    num_keys = sum(kv_lens)
    num_slots = num_keys + num_keys // 4 + 3
    slots = torch.randperm(num_slots, generator=random)[:num_keys]
    caches: list[torch.Tensor] = []
    for dim in dims:
        cache = torch.full((num_slots, heads[1], dim), float("nan"), dtype=torch.float64)
        cache[slots] = torch.randn(num_keys, heads[1], dim, generator=random, dtype=torch.float64)
        caches.append(cache.to(kv_dtype or dtype))
    q = spread * torch.randn(sum(qo_lens), heads[0], dims[0], generator=random, dtype=torch.float64)
    custom = None
    if mask.custom is not None:
        custom = [torch.rand(shape, generator=random) < 0.6 for shape in zip(qo_lens, kv_lens, strict=True)]
    return Problem(
        q.to(dtype),
        caches[0],
        caches[1],
        slots,
        qo_lens,
        kv_lens,
        mask,
        scale if scale is not None else dims[0] ** -0.5,
        custom,
        k_scale,
        v_scale,
    )
