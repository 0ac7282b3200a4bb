"""A pool, a page table and dense attention: just enough engine for the tests of this folder."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backends.contract import Batch, EngineContext, Req
from cases.model import Kind, Layout, Phase


class SmallPool:
    """Paged K and V of every layer, filled with NaN: a slot that is read unwritten shows."""

    def __init__(self, shape: tuple[int, ...], page_size: int, layout: Layout, like: torch.Tensor) -> None:
        """`shape` is that of K alone, layers first; dtype and device are those of `like`."""
        self.scales = (1.0, 1.0)
        self.kv = torch.full((2, *shape), float("nan"), dtype=like.dtype, device=like.device)
        self.page_size = page_size
        self.layout = layout

    def k_cache(self, layer_id: int) -> torch.Tensor:
        return self.kv[0, layer_id]

    def v_cache(self, layer_id: int) -> torch.Tensor:
        return self.kv[1, layer_id]

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor, layer_id: int) -> None:
        pages, offsets = out_loc.long() // self.page_size, out_loc.long() % self.page_size
        for cache, new in ((self.k_cache(layer_id), k), (self.v_cache(layer_id), v)):
            by_slot = cache if self.layout == "NHD" else cache.transpose(1, 2)
            by_slot[pages, offsets] = new

    def stored(self) -> None:
        """Nothing keeps a record here."""


def small_engine(
    page_table: torch.Tensor,
    *,
    page_size: int = 1,
    num_pages: int = 64,
    num_qo_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    num_layers: int = 2,
    layout: Layout = "NHD",
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    soft_cap: float | None = None,
) -> EngineContext:
    """An engine around a `page_table` (int32 `[rows, max_seq_len]`), all of it on that table's device."""
    device = page_table.device
    within = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
    pool = SmallPool(
        (num_layers, num_pages, *within, head_dim),
        page_size,
        layout,
        torch.empty(0, dtype=dtype, device=device),
    )
    return EngineContext(
        num_qo_heads=num_qo_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim,
        num_layers=num_layers,
        page_size=page_size,
        num_pages=num_pages,
        layout=layout,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        scale=head_dim**-0.5,
        windows=(window,) * num_layers,
        soft_cap=soft_cap,
        max_seq_len=page_table.shape[1],
        max_batch=page_table.shape[0],
        kv_pool=pool,
        page_table=page_table,
    )


def make_batch(engine: EngineContext, lengths: Sequence[tuple[int, int]], phase: Phase = "prefill") -> Batch:
    """A batch of requests (cached_len, device_len), request i on row i of the page table."""
    reqs = [Req(table_idx=i, cached_len=c, device_len=n, uid=i) for i, (c, n) in enumerate(lengths)]
    kind: Kind = "decode" if phase == "decode" else "prefill"
    return Batch(
        reqs=reqs,
        padded_reqs=list(reqs),
        phase=phase,
        kind=kind,
        positions=torch.cat([torch.arange(c, n, dtype=torch.int32) for c, n in lengths]).to(engine.device),
        out_loc=torch.cat([engine.page_table[r.table_idx, r.cached_len : r.device_len] for r in reqs]),
    )


class Sequences:
    """Random q, k, v of whole sequences: cached parts get stored, new parts are what `forward` takes."""

    def __init__(self, engine: EngineContext, lengths: Sequence[tuple[int, int]], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.engine, self.lengths = engine, lengths
        shapes = (engine.num_qo_heads, engine.num_kv_heads, engine.num_kv_heads)
        self.qkv = [
            [
                torch.randn(n, heads, engine.head_dim_qk, generator=generator).to(engine.dtype)
                for heads in shapes
            ]
            for _, n in lengths
        ]

    def store_cached(self) -> None:
        for layer in range(self.engine.num_layers):
            for row, (cached, _) in enumerate(self.lengths):
                _, k, v = (x[:cached].to(self.engine.device) for x in self.qkv[row])
                slots = self.engine.page_table[row, :cached]
                self.engine.kv_pool.store_kv(k, v, slots, layer)

    def new(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v of the new tokens, request after request, on the engine's device."""
        new = [[x[c:] for x in qkv] for (c, _), qkv in zip(self.lengths, self.qkv, strict=True)]
        q, k, v = (torch.cat(part).to(self.engine.device) for part in zip(*new, strict=True))
        return q, k, v

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense float64 answer of the new tokens: out, and LSE in natural log."""
        dense = [self._dense(*(x.double() for x in qkv)) for qkv in self.qkv]
        out, lse = (
            torch.cat([whole[i][cached:] for whole, (cached, _) in zip(dense, self.lengths, strict=True)])
            for i in range(2)
        )
        return out, lse

    def _dense(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = self.engine.num_qo_heads // self.engine.num_kv_heads
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.engine.scale
        cap, window = self.engine.soft_cap, self.engine.windows[0]
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        back = torch.arange(len(q))[:, None] - torch.arange(len(q))  # how far the key lies behind the query
        hidden = (back < 0) | (back >= (len(q) if window is None else window))
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1).T
