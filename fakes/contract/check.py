"""The contract's own arithmetic and data: plain torch float64 over dense lists, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_left: int = -1,
    soft_cap: float = 0.0,
    scale: float | None = None,
    mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One request: out `[n, heads, dv]` and natural-log LSE `[n, heads]`.

    q `[n, heads, d]`, k and v `[m, kv heads, d]`. Causal is aligned bottom right; `window_left` keys before
    the row's own are seen; a row without keys is (0, -inf).
    """
    q64, k64, v64 = (t.detach().cpu().to(torch.float64) for t in (q, k, v))
    group = q64.shape[1] // max(1, k64.shape[1])
    k64, v64 = k64.repeat_interleave(group, dim=1), v64.repeat_interleave(group, dim=1)
    scores = torch.einsum("nhd,mhd->nhm", q64, k64) * (scale if scale is not None else q.shape[-1] ** -0.5)
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    own = torch.arange(q64.shape[0])[:, None] + k64.shape[0] - q64.shape[0]
    key = torch.arange(k64.shape[0])[None, :]
    seen = torch.ones(q64.shape[0], k64.shape[0], dtype=torch.bool)
    if causal:
        seen &= key <= own
    if window_left >= 0:
        seen &= key >= own - window_left
    if mask is not None:
        seen = mask.cpu()
    scores = scores.masked_fill(~seen[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isfinite(), lse, 0.0)[..., None])
    return torch.einsum("nhm,mhd->nhd", weights, v64), lse


@dataclass(frozen=True)
class Requests:
    """Ragged requests in a paged cache. All on the CPU; `.to(device)` moves what the library is given.

    k_cache, v_cache `[pages, page_size, kv heads, dim]`; `pages[i]` request i's page ids; k, v its dense
    keys.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    pages: list[list[int]]
    k: list[torch.Tensor]
    v: list[torch.Tensor]
    qo_lens: list[int]
    kv_lens: list[int]
    page_size: int

    def rows(self, request: int) -> slice:
        start = sum(self.qo_lens[:request])
        return slice(start, start + self.qo_lens[request])

    def expected(self, **mask: object) -> tuple[torch.Tensor, torch.Tensor]:
        """`dense` of every request, concatenated. Keywords go to `dense`."""
        parts = [
            dense(self.q[self.rows(i)], self.k[i], self.v[i], **mask)  # pyright: ignore[reportArgumentType]
            for i in range(len(self.qo_lens))
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


def requests(
    kv_lens: Sequence[int],
    qo_lens: Sequence[int] | None = None,
    *,
    heads: tuple[int, int] = (8, 2),
    dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page_size: int = 16,
    poison: float | None = None,
    seed: int = 0,
) -> Requests:
    """Random requests on scattered pages; slots that nobody owns hold `poison` (None: random values)."""
    random = torch.Generator().manual_seed(seed)
    counts = [-(-n // page_size) for n in kv_lens]
    total = sum(counts) + 3
    order = torch.randperm(total, generator=random).tolist()
    shape = (total, page_size, heads[1], dim)
    stored = kv_dtype or dtype
    k_cache, v_cache = (torch.randn(shape, generator=random).to(stored) for _ in range(2))
    pages = [order[sum(counts[:i]) : sum(counts[: i + 1])] for i in range(len(counts))]
    keys = [k_cache[p].flatten(0, 1)[:n].clone() for p, n in zip(pages, kv_lens, strict=True)]
    values = [v_cache[p].flatten(0, 1)[:n].clone() for p, n in zip(pages, kv_lens, strict=True)]
    if poison is not None:
        k_cache, v_cache = torch.full_like(k_cache, poison), torch.full_like(v_cache, poison)
        for p, n, key, val in zip(pages, kv_lens, keys, values, strict=True):
            for cache, dense_rows in ((k_cache, key), (v_cache, val)):
                for j, page in enumerate(p):
                    part = dense_rows[j * page_size : min(n, (j + 1) * page_size)]
                    cache[page, : len(part)] = part
    lens = list(qo_lens) if qo_lens is not None else [1] * len(kv_lens)
    q = torch.randn((sum(lens), heads[0], dim), generator=random).to(dtype)
    return Requests(q, k_cache, v_cache, pages, keys, values, lens, list(kv_lens), page_size)
