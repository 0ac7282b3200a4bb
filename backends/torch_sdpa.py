"""`torch`: the smallest backend, one `scaled_dot_product_attention` per request. The template for a new one.

It needs no kernel library and runs on the plain CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    is_captured: bool = False
    """Whether the tensors are the buffers that a CUDA graph reads: their values are then not to be read here."""

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of the last query of each of the first `bs` requests, int32 `[bs]`: what an LM head reads."""
        return self.cu_seqlens_q[1 : bs + 1] - 1


class TorchBackend:
    """Causal attention over the slots that the page table names, request by request."""

    capabilities: ClassVar[Capabilities] = Capabilities(cuda_graph=True)
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
        if metadata.is_captured:
            return self._decode(q, k_slots, v_slots, metadata)
        seqlens_q, seqlens_k = metadata.cu_seqlens_q.diff().tolist(), metadata.cache_seqlens.tolist()
        slots = torch.cat([row[:n] for row, n in zip(metadata.page_table, seqlens_k, strict=True)])
        # float32 `[1, heads, rows or keys, dim]`: with three dimensions torch takes a path of twice the cost.
        all_rows, all_k, all_v = (
            x.float().transpose(0, 1).unsqueeze(0)
            for x in (q, k_slots.index_select(0, slots), v_slots.index_select(0, slots))
        )
        own = zip(
            all_rows.split(seqlens_q, dim=2),
            all_k.split(seqlens_k, dim=2),
            all_v.split(seqlens_k, dim=2),
            strict=True,
        )
        out = torch.cat([self._attend(*request) for request in own], dim=2)
        return out.squeeze(0).transpose(0, 1).to(q.dtype).contiguous()

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One request: q `[1, num_qo_heads, qo_len, dim]` attends to k and v `[1, num_kv_heads, kv_len, dim]`."""
        qo_len, kv_len = q.shape[2], k.shape[2]
        visible = None  # one query is the last position, and sees all
        if qo_len > 1:  # the queries are the last positions: the diagonal ends in the bottom right corner
            visible = torch.ones(qo_len, kv_len, dtype=torch.bool, device=q.device).tril_(kv_len - qo_len)
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.engine.scale, enable_gqa=True
        )

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        largest = max(bs_list)
        as_int32 = {"dtype": torch.int32, "device": self.engine.device}
        self.captured = TorchMetadata(
            cu_seqlens_q=torch.arange(largest + 1, **as_int32),
            cache_seqlens=torch.ones(largest, **as_int32),
            page_table=torch.zeros(largest, max_seq_len, **as_int32),
            max_seqlen_q=1,
            is_captured=True,
        )

    def _captured(self, batch: Batch) -> TorchMetadata:
        """The buffers of a batch, as long as its graph reads them."""
        bs = len(batch.padded_reqs)
        return replace(
            self.captured,
            cu_seqlens_q=self.captured.cu_seqlens_q[: bs + 1],
            cache_seqlens=self.captured.cache_seqlens[:bs],
            page_table=self.captured.page_table[:bs],
        )

    def prepare_for_capture(self, batch: Batch) -> None:
        batch.attn_metadata = self._captured(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        buffers, metadata = self._captured(batch), batch.attn_metadata
        assert isinstance(metadata, TorchMetadata)
        buffers.cache_seqlens.copy_(metadata.cache_seqlens)
        buffers.page_table[:, : metadata.page_table.shape[1]].copy_(metadata.page_table)

    def _decode(
        self, q: torch.Tensor, k_slots: torch.Tensor, v_slots: torch.Tensor, metadata: TorchMetadata
    ) -> torch.Tensor:
        """One query per request over every column of the page table, masked: shapes that no length changes."""
        table = metadata.page_table
        own = torch.arange(table.shape[1], device=table.device) < metadata.cache_seqlens[:, None]
        # Slots of nobody may hold NaN, which a weight of 0 does not remove.
        k, v = (x[table].float().masked_fill_(~own[:, :, None, None], 0.0) for x in (k_slots, v_slots))
        out = torch.nn.functional.scaled_dot_product_attention(
            q.float().unsqueeze(2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=own[:, None, None, :],
            scale=self.engine.scale,
            enable_gqa=True,
        )
        return out.squeeze(2).to(q.dtype)
