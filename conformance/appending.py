"""`fi-paged` as engines write it that store through FlashInfer's own kernel, for tests and mutants."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext
from backends.fi_base import FIMetadata
from backends.fi_paged import FlashInferPagedBackend


class AppendingBackend(FlashInferPagedBackend):
    """Stores with `append_paged_kv_cache`, at places that `get_batch_indices_positions` gives. Not in graphs."""

    capabilities: ClassVar[Capabilities] = replace(
        FlashInferPagedBackend.capabilities,
        head_dims=frozenset({(64, 64), (128, 128), (256, 256)}),
        cuda_graph=False,
    )

    def __init__(self, engine: EngineContext) -> None:
        super().__init__(engine)
        self.page: Any = import_module("flashinfer.page")
        self.kv_pool: Any = _Appends(self)
        self.given: dict[str, torch.Tensor] = {}
        """Where the batch's tokens go, as the kernel takes it."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        metadata = batch.attn_metadata
        assert isinstance(metadata, FIMetadata)
        self.given = self.places(metadata, len(batch.positions))

    def places(self, metadata: FIMetadata, num_tokens: int) -> dict[str, torch.Tensor]:
        """The arrays that `append_paged_kv_cache` takes beside keys, values and caches."""

        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.to(self.device, non_blocking=True)

        indptr, last_page_len = moved(metadata.cu_seqlens_k_cpu), moved(metadata.last_page_len_cpu)
        seq_lens = self.page.get_seq_lens(indptr, last_page_len, self.page_size)
        requests, positions = self.page.get_batch_indices_positions(
            moved(metadata.cu_seqlens_q_cpu), seq_lens, num_tokens
        )
        return {
            "batch_indices": requests,
            "positions": positions,
            "kv_indices": metadata.indices,
            "kv_indptr": indptr,
            "kv_last_page_len": last_page_len,
        }

    def cache(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a layer's tokens are stored to."""
        return self.paged_kv(layer_id)


class _Appends:
    """The engine's pool, stored to by FlashInfer."""

    def __init__(self, backend: AppendingBackend) -> None:
        self.backend, self.pool = backend, backend.engine.kv_pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def store_kv(self, k: torch.Tensor, v: torch.Tensor, _: torch.Tensor, layer_id: int) -> None:
        backend = self.backend
        backend.page.append_paged_kv_cache(
            k,
            v,
            paged_kv_cache=backend.cache(layer_id),
            kv_layout=backend.engine.layout,
            **backend.given,
        )
