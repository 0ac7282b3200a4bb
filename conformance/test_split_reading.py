"""Backends that read a layer's keys in two calls: new tokens ragged, the cached prefix by page, merged."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, ClassVar

import torch

from backends.contract import Batch, Capabilities, EngineContext
from cases.model import Case, Request, Step
from conformance.examine import examine
from conformance.outcome import Outcome
from conformance.question import Question
from conformance.session import Session

PREFIX_HIT = Case((Step((Request(cached_len=6, extend_len=3), Request(uid=1, extend_len=5))),), page_size=4)


class Split:
    """Prefill as SGLang's FlashInfer backend does it. `drop`: tokens of each prefix that are not read."""

    capabilities: ClassVar[Capabilities] = Capabilities(library=frozenset({"flashinfer"}))
    drop = 0

    def __init__(self, engine: EngineContext) -> None:
        import flashinfer  # pyright: ignore[reportMissingImports]

        self.fi: Any = flashinfer
        self.engine = engine
        workspace = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
        self.ragged = self.fi.BatchPrefillWithRaggedKVCacheWrapper(workspace, backend="fa2")
        self.paged = self.fi.BatchPrefillWithPagedKVCacheWrapper(workspace, backend="fa2")

    def prepare_metadata(self, batch: Batch) -> None:
        qo_indptr = torch.tensor([0, *accumulate(r.extend_len for r in batch.reqs)], dtype=torch.int32)
        prefix = [max(r.cached_len - self.drop, 0) for r in batch.reqs]
        kv_indptr = torch.tensor([0, *accumulate(prefix)], dtype=torch.int32)
        table = self.engine.page_table
        indices = torch.cat([table[r.table_idx, :n] for r, n in zip(batch.reqs, prefix, strict=True)])
        heads = (self.engine.num_qo_heads, self.engine.num_kv_heads, self.engine.head_dim_qk)
        self.ragged.plan(qo_indptr, qo_indptr, *heads, causal=True, q_data_type=self.engine.dtype)
        last = torch.ones(len(prefix), dtype=torch.int32)
        self.paged.plan(qo_indptr, kv_indptr, indices, last, *heads, 1, q_data_type=self.engine.dtype)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        new, new_lse = self.ragged.run(q, k, v, return_lse=True)
        pool = self.engine.kv_pool
        caches = tuple(c.flatten(0, 1).unsqueeze(1) for c in (pool.k_cache(layer_id), pool.v_cache(layer_id)))
        old, old_lse = self.paged.run(q, caches, return_lse=True)
        pool.store_kv(k, v, batch.out_loc, layer_id)
        return self.fi.merge_state(new, new_lse, old, old_lse)[0]


class Dropped(Split):
    drop = 1


class BreaksOff(Split):
    """The second of two calls is refused: for its q, not for its arrays."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        self.ragged.run(q, k, v)
        return super().forward(q.to("cpu"), k, v, layer_id, batch)


class NewTokensAlone(Split):
    """Leaves the prefix out."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> torch.Tensor:
        self.engine.kv_pool.store_kv(k, v, batch.out_loc, layer_id)
        return self.ragged.run(q, k, v)


def test_new_tokens_and_prefix_together_are_the_whole() -> None:
    with Session([Split], device_sim="light") as session:
        verdict = examine(Question(PREFIX_HIT), session.askers[0])
    assert not verdict.findings
    assert verdict.outcomes["metadata"] is Outcome.PASSED


def test_what_the_two_leave_out_is_named_and_no_array_of_either_is() -> None:
    with Session([Dropped], device_sim="light") as session:
        verdict = examine(Question(PREFIX_HIT), session.askers[0])
    found = [f for f in verdict.findings if f.check == "metadata"]
    assert found
    assert all(f.field is None for f in found)
    assert "does not read the key at position 5" in found[0].message


def test_a_prefix_that_no_call_reads_is_said_so() -> None:
    with Session([NewTokensAlone], device_sim="light") as session:
        verdict = examine(Question(PREFIX_HIT), session.askers[0])
    found = {f.message for f in verdict.findings if f.field == "kv_indptr"}
    assert found == {
        "kv_indptr counts the new tokens alone, and no other call reads what request 0 has cached"
    }


def test_no_array_of_a_part_is_blamed_where_it_is_refused() -> None:
    with Session([BreaksOff], device_sim="light") as session:
        verdict = examine(Question(PREFIX_HIT), session.askers[0])
    assert verdict.failed == {"values"}
    assert "forward raised" in verdict.findings[0].message
