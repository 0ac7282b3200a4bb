"""`fa` with a fault between it and its kernels, for tests of what the harness sees."""

from __future__ import annotations

from typing import Any

import torch

from backends.contract import Batch
from backends.fa import FAMetadata, FlashAttentionBackend


class AlteredMetadata(FlashAttentionBackend):
    """Its metadata are altered once they are made."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        metadata = batch.attn_metadata
        assert isinstance(metadata, FAMetadata)
        batch.attn_metadata = self.altered(metadata, batch)

    def altered(self, metadata: FAMetadata, batch: Batch) -> FAMetadata:
        """What stands in place of `metadata`."""
        raise NotImplementedError


class AlteredCalls(FlashAttentionBackend):
    """Its kernel calls are altered, batch by batch and layer by layer."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        call: Any = self.flash_attn_with_kvcache

        def altered(**given: Any) -> Any:
            return call(**(given | self.altered(given, *self.at)))

        self.flash_attn_with_kvcache: Any = altered

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch, **named: Any
    ) -> Any:
        self.at = layer_id, batch
        return super()._attend(q, k, v, layer_id, batch, **named)

    def altered(self, given: dict[str, Any], layer_id: int, batch: Batch) -> dict[str, Any]:
        """Arguments in place of some of `given`."""
        raise NotImplementedError
