"""`fi-paged`: FlashInfer over the engine's own pages: page ids, page counts, length of the last page."""

from __future__ import annotations

from typing import ClassVar

import torch

from backends.contract import Capabilities, EngineContext
from backends.fi import FI_HEAD_DIMS
from backends.fi_base import FlashInferBase


class FlashInferPagedBackend(FlashInferBase):
    capabilities: ClassVar[Capabilities] = Capabilities(
        library=frozenset({"flashinfer"}),
        layouts=frozenset({"NHD", "HND"}),
        head_dims=FI_HEAD_DIMS,
        window=True,
        layer_windows=True,
        soft_cap=True,
        lse="2",
        cuda_graph=True,
    )
    refuses: ClassVar[bool] = True

    def __init__(self, engine: EngineContext) -> None:
        super().__init__(engine, page_size=engine.page_size)

    def paged_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_pool.k_cache(layer_id), self.kv_pool.v_cache(layer_id)
