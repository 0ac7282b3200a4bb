"""Faults of order: plans that are missing, stale or repeated; keys read before they are stored; options that stick."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from typing import Any

import torch

from backends.contract import window_left
from conformance.mutants.mutant import mutant
from fakes.flashinfer.xqa import PAGE_SIZES, SEMAPHORE_BYTES


@mutant(
    "plan_once_per_layer",
    base="fi",
    check="lifecycle",
    why="plan is called again in every layer",
    issue="seed 000",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class PlansAgain(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            run.initialized = False
            super()._plan_once(metadata, run)

    return PlansAgain


@mutant(
    "plan_missing",
    base="fi",
    check="lifecycle",
    why="only the first batch that a wrapper sees is planned",
    issue="seed 003",
    requests=2,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    class PlansFirstBatchOnly(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            wrappers = self.__dict__.setdefault("planned", [])
            if any(run.wrapper is w for w in wrappers):
                return
            super()._plan_once(metadata, run)
            wrappers.append(run.wrapper)

    return PlansFirstBatchOnly


@mutant(
    "stale_plan",
    base="fi",
    check="lifecycle",
    why="a batch of the size of the last one runs on the last one's plan",
    issue="flashinfer#2236",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class ReplansOnOtherSize(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            key = (
                id(run.wrapper),
                metadata.cu_seqlens_q_cpu.shape[0],
                int(metadata.cu_seqlens_q_cpu[-1]),
            )
            if self.__dict__.get("last") == key:
                return
            self.last = key
            super()._plan_once(metadata, run)

    return ReplansOnOtherSize


@mutant(
    "stale_qo_indptr",
    base="fi",
    check="metadata",
    why="a prefill of as many requests as the last one keeps its qo_indptr: q has other rows than that says",
    issue="flashinfer#2236",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class KeepsQoIndptr(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            if batch.is_prefill:
                metadata, kept = batch.attn_metadata, self.__dict__.setdefault("kept", {})
                own = metadata.cu_seqlens_q_cpu
                metadata.cu_seqlens_q_cpu = kept.setdefault(own.shape[0], own)

    return KeepsQoIndptr


@mutant(
    "dtype_of_another_plan",
    base="fi",
    check="values",
    why="plan is told float16 whatever q holds",
    issue="seed 003",
    tokens=1,
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class AlwaysHalf(cls):
        def __init__(self, engine: Any) -> None:
            import torch

            super().__init__(engine)
            self.plan_options |= {"q_data_type": torch.float16}

    return AlwaysHalf


@mutant(
    "kv_stored_after_read",
    base="fa",
    check="lifecycle",
    why="K and V are stored after the kernel has read the pool",
    issue="seed 002",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    class StoresLast(cls):
        def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, **kw: Any) -> Any:
            pool = self.kv_pool
            self.kv_pool = _ReadOnly(pool)
            try:
                return super()._attend(q, k, v, layer_id, batch, **kw)
            finally:
                self.kv_pool = pool
                pool.store_kv(k, v, batch.out_loc, layer_id)

    return StoresLast


class _ReadOnly:
    def __init__(self, pool: Any) -> None:
        self.k_cache = pool.k_cache
        self.v_cache = pool.v_cache

    def store_kv(self, *_: Any) -> None:
        pass


@mutant(
    "read_before_write",
    base="torch",
    check="poison",
    why="the slots of new tokens are read before they are written",
    issue="sglang#26513",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    class StoresLast(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            pool = self.kv_pool
            self.kv_pool = _ReadOnly(pool)
            try:
                return super().forward(q, k, v, layer_id, batch)
            finally:
                self.kv_pool = pool
                pool.store_kv(k, v, batch.out_loc, layer_id)

    return StoresLast


@mutant(
    "metadata_of_the_first_batch",
    base="fa",
    check="metadata",
    why="the page table of the first batch is kept for every later batch of the same size",
    issue="sglang#26957",
    requests=4,
    tokens=9,
)
def _(cls: type[Any]) -> type[Any]:
    from dataclasses import replace

    class KeepsTable(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            metadata = batch.attn_metadata
            kept = self.__dict__.setdefault("tables", {})
            table = kept.setdefault(tuple(metadata.page_table.shape), metadata.page_table)
            batch.attn_metadata = replace(metadata, page_table=table)

    return KeepsTable


def decodes_by_xqa(cls: type[Any], first_byte: int) -> type[Any]:
    """A backend whose decode calls `trtllm_batch_decode_with_kv_cache` on a workspace that begins with this byte."""

    class DecodesByXQA(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            from flashinfer.decode import trtllm_batch_decode_with_kv_cache  # pyright: ignore[reportMissingImports]

            engine, size = self.engine, self.page_size
            if batch.phase != "decode" or size not in PAGE_SIZES or engine.soft_cap is not None:
                return super().forward(q, k, v, layer_id, batch)
            self.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
            rows = torch.tensor([req.table_idx for req in batch.padded_reqs], device=self.device)
            lens = torch.tensor(
                [req.device_len for req in batch.padded_reqs], dtype=torch.int32, device=self.device
            )
            self.float_workspace[:SEMAPHORE_BYTES] = first_byte
            return trtllm_batch_decode_with_kv_cache(
                q,
                self.paged_kv(layer_id),
                self.float_workspace,
                (self.page_table[rows, ::size] // size).to(torch.int32),
                lens,
                engine.max_seq_len,
                bmm1_scale=engine.scale,
                window_left=window_left(engine.windows[0]),
                kv_layout=engine.layout,
            )

    return DecodesByXQA


@mutant(
    "counter_not_zero",
    base="fi-paged",
    check="metadata",
    why="XQA decodes on the workspace that the wrappers leave garbage in; its first 8 MiB are counters",
    issue="vllm#25520",
    tokens=1,
    modes=("strict",),
    declares={"cuda_graph": False, "lse": None},
)
def _(cls: type[Any]) -> type[Any]:
    return decodes_by_xqa(cls, 1)
