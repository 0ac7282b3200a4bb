"""What FlashInfer backends share: CSR metadata once per batch, one plan at the first layer, a run per layer.

A plan holds one window, so layers with different windows have wrappers of their own, each planned at its first layer.

Argument semantics: FlashInfer's docstrings of `BatchDecodeWithPagedKVCacheWrapper` and
`BatchPrefillWithPagedKVCacheWrapper`; lifecycle: mini-sglang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext, Req, window_left
from backends.fi_workspace import float_workspace
from backends.refusal import refuse_undeclared

TENSOR_CORE_GROUP = 4
"""Decode runs on tensor cores from this GQA group on; CUDA-core kernels exist for 1, 2 and 3 below it."""


@dataclass(kw_only=True)
class FIRun:
    """The layers of a batch that share a window, and with it a plan."""

    wrapper: Any
    """What they are planned on and run by."""
    window: int | None
    initialized: bool = False
    """Whether `wrapper` holds this batch's plan."""


@dataclass(kw_only=True)
class FIMetadata:
    """One batch as FlashInfer reads it. `_cpu` tensors are pinned; FlashInfer copies them at `plan`."""

    cu_seqlens_q_cpu: torch.Tensor
    """qo_indptr, int32 `[bs + 1]`, in query rows."""
    cu_seqlens_k_cpu: torch.Tensor
    """kv_indptr, int32 `[bs + 1]`, in pages of `page_size`."""
    indices: torch.Tensor
    """kv_indices, int32 `[kv_indptr[-1]]`, page ids, on the device."""
    last_page_len_cpu: torch.Tensor
    """int32 `[bs]`, 1 to `page_size`: tokens in each request's last page."""
    seq_lens_cpu: torch.Tensor
    """int32 `[bs]`, in tokens."""
    is_decode: bool
    runs: list[FIRun]
    """One for each window of the engine's layers."""

    def get_last_indices(self, bs: int) -> torch.Tensor:
        """Row of the last query of each of the first `bs` requests, int32 `[bs]`, on the device."""
        return (self.cu_seqlens_q_cpu[1 : bs + 1] - 1).to(self.indices.device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class FICaptured:
    """What captured kernels read: int32 buffers on the device, shared by the wrappers of all batch sizes."""

    indptr: torch.Tensor
    """`[max_bs + 1]`."""
    indices: torch.Tensor
    """`[max_bs * ceil(max_seq_len / page_size)]`."""
    last_page_len: torch.Tensor
    """`[max_bs]`."""


class FlashInferBase:
    """Plans and runs FlashInfer on pages of `page_size` slots. A subclass says how it sees the pool.

    Args:
        page_size: page size handed to FlashInfer, at most the engine's.

    Raises:
        Refused: what the subclass does not declare.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, engine: EngineContext, page_size: int) -> None:
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,  # pyright: ignore[reportAttributeAccessIssue]
            BatchPrefillWithPagedKVCacheWrapper,  # pyright: ignore[reportAttributeAccessIssue]
            CUDAGraphBatchDecodeWithPagedKVCacheWrapper,  # pyright: ignore[reportAttributeAccessIssue]
        )

        refuse_undeclared(engine, self.capabilities)
        self.engine = engine
        self.device = engine.device
        self.kv_pool = engine.kv_pool
        self.page_table = engine.page_table
        self.page_size = page_size
        self.float_workspace = float_workspace(engine)
        self.use_tensor_cores = engine.num_qo_heads // engine.num_kv_heads >= TENSOR_CORE_GROUP
        self.windows = list(dict.fromkeys(engine.windows))
        self.wrappers = {
            "prefill": [
                BatchPrefillWithPagedKVCacheWrapper(self.float_workspace, engine.layout, backend="fa2")
                for _ in self.windows
            ],
            "decode": [
                BatchDecodeWithPagedKVCacheWrapper(
                    self.float_workspace, engine.layout, use_tensor_cores=self.use_tensor_cores
                )
                for _ in self.windows
            ],
        }
        self.graph_wrapper_class = CUDAGraphBatchDecodeWithPagedKVCacheWrapper
        self.graph_wrappers: dict[int, list[Any]] = {}
        self.plan_options: dict[str, Any] = {
            "num_qo_heads": engine.num_qo_heads,
            "num_kv_heads": engine.num_kv_heads,
            "page_size": page_size,
            "pos_encoding_mode": "NONE",
            "logits_soft_cap": engine.soft_cap,
            "sm_scale": engine.scale,
            "q_data_type": engine.dtype,
            "kv_data_type": engine.kv_dtype,
            "non_blocking": True,
        }
        self.last_event = torch.cuda.Event()
        self.last_event.record()

    def paged_kv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer in pages of `self.page_size`."""
        raise NotImplementedError

    def prepare_metadata(self, batch: Batch) -> None:
        reqs = batch.padded_reqs
        seq_lens = [req.device_len for req in reqs]
        pages = [-(-n // self.page_size) for n in seq_lens]
        last = [n - (count - 1) * self.page_size for n, count in zip(seq_lens, pages, strict=True)]
        cu_seqlens_k, last_page_len, seq_lens_cpu = _pinned([0, *accumulate(pages)], last, seq_lens)
        batch.attn_metadata = FIMetadata(
            cu_seqlens_q_cpu=self._qo_indptr(reqs, cu_seqlens_k),
            cu_seqlens_k_cpu=cu_seqlens_k,
            indices=self._page_ids(reqs),
            last_page_len_cpu=last_page_len,
            seq_lens_cpu=seq_lens_cpu,
            is_decode=batch.is_decode,
            runs=self._runs(self.wrappers[batch.phase]),
        )

    def _runs(self, wrappers: list[Any]) -> list[FIRun]:
        return [FIRun(wrapper=w, window=window) for w, window in zip(wrappers, self.windows, strict=True)]

    def _qo_indptr(self, reqs: list[Req], kv_indptr: torch.Tensor) -> torch.Tensor:
        if all(req.extend_len == 1 for req in reqs):
            return torch.arange(len(reqs) + 1, dtype=torch.int32, pin_memory=True)
        if self.page_size == 1 and all(req.cached_len == 0 for req in reqs):
            return kv_indptr  # no prefix hit: as many queries as keys, and a page is a key
        return _pinned([0, *accumulate(req.extend_len for req in reqs)])[0]

    def _page_ids(self, reqs: list[Req]) -> torch.Tensor:
        # The page table holds token locations: every page_size-th starts a page.
        table, step = self.page_table, self.page_size
        starts = torch.cat([table[req.table_idx, : req.device_len : step] for req in reqs])
        return starts if step == 1 else starts // step

    def _plan_once(self, metadata: FIMetadata, run: FIRun) -> None:
        if run.initialized:
            return
        # plan() rewrites the pinned buffer that the previous plan's copy may still be reading.
        self.last_event.synchronize()
        if metadata.is_decode:
            run.wrapper.plan(
                indptr=metadata.cu_seqlens_k_cpu,
                indices=metadata.indices,
                last_page_len=metadata.last_page_len_cpu,
                head_dim=self.engine.head_dim_qk,
                seq_lens=metadata.seq_lens_cpu,
                window_left=window_left(run.window),
                **self.plan_options,
            )
        else:
            run.wrapper.plan(
                qo_indptr=metadata.cu_seqlens_q_cpu,
                paged_kv_indptr=metadata.cu_seqlens_k_cpu,
                paged_kv_indices=metadata.indices,
                paged_kv_last_page_len=metadata.last_page_len_cpu,
                head_dim_qk=self.engine.head_dim_qk,
                head_dim_vo=self.engine.head_dim_vo,
                seq_lens=metadata.seq_lens_cpu,
                causal=True,
                window_left=window_left(run.window),
                **self.plan_options,
            )
        self.last_event.record()
        run.initialized = True

    def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
        largest, as_int32 = max(bs_list), {"dtype": torch.int32, "device": self.device}
        self.captured = FICaptured(
            indptr=torch.zeros(largest + 1, **as_int32),
            indices=torch.zeros(largest * -(-max_seq_len // self.page_size), **as_int32),
            last_page_len=torch.ones(largest, **as_int32),
        )

    def prepare_for_capture(self, batch: Batch) -> None:
        bs = len(batch.padded_reqs)
        self.graph_wrappers[bs] = [
            self.graph_wrapper_class(
                self.float_workspace,
                self.captured.indptr[: bs + 1],
                self.captured.indices,
                self.captured.last_page_len[:bs],
                self.engine.layout,
                use_tensor_cores=self.use_tensor_cores,
            )
            for _ in self.windows
        ]
        self.prepare_metadata(batch)
        self.prepare_for_replay(batch)

    def prepare_for_replay(self, batch: Batch) -> None:
        metadata = batch.attn_metadata
        assert isinstance(metadata, FIMetadata)
        assert not any(run.initialized for run in metadata.runs)
        metadata.runs = self._runs(self.graph_wrappers[len(batch.padded_reqs)])
        for run in metadata.runs:
            self._plan_once(metadata, run)  # fills the buffers; the graph's kernels follow the new plan

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer_id: int,
        batch: Batch,
        *,
        return_lse: bool,
    ) -> Any:
        metadata = batch.attn_metadata
        assert isinstance(metadata, FIMetadata)
        run = metadata.runs[self.windows.index(self.engine.windows[layer_id])]
        self._plan_once(metadata, run)
        self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        return run.wrapper.run(q, self.paged_kv(layer_id), return_lse=return_lse)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        return self._run(q, k, v, layer_id, batch, return_lse=False)

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._run(q, k, v, layer_id, batch, return_lse=True)


def _pinned(*columns: list[int]) -> Sequence[torch.Tensor]:
    """Several int32 arrays in one piece of pinned memory."""
    staged = torch.tensor(list(chain(*columns)), dtype=torch.int32, pin_memory=True)
    return staged.split([len(column) for column in columns])
