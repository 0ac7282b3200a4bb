"""`fi`: FlashInfer over the KV pool seen as pages of one slot: a page-table row is kv_indices."""

from __future__ import annotations

from typing import ClassVar

import torch

from backends.contract import Capabilities, EngineContext
from backends.fi_base import FlashInferBase

FI_HEAD_DIMS = frozenset({(64, 64), (128, 128), (256, 256)})
"""(head_dim_qk, head_dim_vo) that both the decode and the paged prefill kernel are built for."""


class FlashInferBackend(FlashInferBase):
    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"flashinfer"}),
        head_dims=FI_HEAD_DIMS,
        window=True,
        layer_windows=True,
        soft_cap=True,
        lse="2",
        cuda_graph=True,
    )
    refuses: ClassVar[bool] = True

    def __init__(self, engine: EngineContext) -> None:
        super().__init__(engine, page_size=1)
        self._layers = [
            (_slots(self.kv_pool.k_cache(layer)), _slots(self.kv_pool.v_cache(layer)))
            for layer in range(engine.num_layers)
        ]

    def paged_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._layers[layer_id]


def _slots(cache: torch.Tensor) -> torch.Tensor:
    """`[num_pages, page_size, heads, dim]` as `[num_slots, 1, heads, dim]`, without a copy."""
    num_pages, page_size, heads, dim = cache.shape
    return cache.view(num_pages * page_size, 1, heads, dim)
