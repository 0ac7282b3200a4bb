"""`torch`: the smallest backend, one `scaled_dot_product_attention` per request. The template for a new one.

It needs no kernel library and runs on the plain CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext
from backends.refusal import refuse_undeclared


@dataclass(frozen=True, kw_only=True)
class TorchMetadata:
    cu_seqlens_q: torch.Tensor
    """int32 `[bs + 1]`: request i has the query rows `cu_seqlens_q[i]` to `cu_seqlens_q[i + 1]`."""
    cache_seqlens: torch.Tensor
    """int32 `[bs]`: keys of each request, this batch's new ones included."""
    page_table: torch.Tensor
    """int32 `[bs, max_seqlen_k]`: the slot of each key; columns past a request's length mean nothing."""
    max_seqlen_q: int

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of the last query of each of the first `bs` requests, int32 `[bs]`: what an LM head reads."""
        return self.cu_seqlens_q[1 : bs + 1] - 1


class TorchBackend:
    """Causal attention over the slots that the page table names, request by request."""

    capabilities: ClassVar[Capabilities] = Capabilities()
    refuses: ClassVar[bool] = True

    def __init__(self, engine: EngineContext) -> None:
        refuse_undeclared(engine, self.capabilities)
        self.engine = engine
        self.kv_pool = engine.kv_pool
        self.page_table = engine.page_table

    def prepare_metadata(self, batch: Batch) -> None:
        reqs = batch.padded_reqs
        seqlens_q = [req.extend_len for req in reqs]
        seqlens_k = [req.device_len for req in reqs]
        rows = torch.tensor([req.table_idx for req in reqs], device=self.engine.device)
        as_int32 = {"dtype": torch.int32, "device": self.engine.device}
        batch.attn_metadata = TorchMetadata(
            cu_seqlens_q=torch.tensor([0, *accumulate(seqlens_q)], **as_int32),
            cache_seqlens=torch.tensor(seqlens_k, **as_int32),
            page_table=self.page_table[rows, : max(seqlens_k)],
            max_seqlen_q=max(seqlens_q),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchMetadata)
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)  # before reading: a new token attends to itself
        k_slots = self.kv_pool.k_cache(layer_id).flatten(0, 1)
        v_slots = self.kv_pool.v_cache(layer_id).flatten(0, 1)
        starts = metadata.cu_seqlens_q.tolist()
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        for i, kv_len in enumerate(metadata.cache_seqlens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            slots = metadata.page_table[i, :kv_len]
            out[rows] = self._attend(q[rows], k_slots[slots], v_slots[slots])
        return out

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend in float32: q `[qo_len, num_qo_heads, dim]` to k and v `[kv_len, num_kv_heads, dim]`."""
        qo_len, kv_len = q.shape[0], k.shape[0]
        # The queries are the last positions of the sequence: the diagonal ends in the bottom right corner.
        visible = torch.ones(qo_len, kv_len, dtype=torch.bool, device=q.device).tril_(kv_len - qo_len)
        # A batch of one: with three dimensions torch takes a path of twice the cost.
        q, k, v = (x.float().transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if qo_len == 1 else visible, scale=self.engine.scale, enable_gqa=True
        )
        return out.squeeze(0).transpose(0, 1)
