"""Faults of history: what one batch leaves behind and a later one trips over."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

from conformance.mutants.mutant import mutant


def _rows_kept(cls: type[Any], key: str) -> type[Any]:
    """kv_indices are kept for each `key` of a request, and only what has been added since is looked up."""

    class KeepsRows(cls):
        def _page_ids(self, reqs: Any) -> Any:
            import torch

            kept = self.__dict__.setdefault("kept", {})
            for req in reqs:
                row = self.page_table[req.table_idx, : req.device_len]
                known = kept.get(getattr(req, key), row[:0])[: req.cached_len]
                kept[getattr(req, key)] = torch.cat([known, row[len(known) :]])
            return torch.cat([kept[getattr(req, key)] for req in reqs])

    return KeepsRows


@mutant(
    "row_kept_after_finish",
    base="fi",
    check="session",
    why="what was read of a page-table row is kept when the row is given to another request",
    issue="sglang#26957",
    requests=2,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    return _rows_kept(cls, "table_idx")


@mutant(
    "pages_kept_by_uid",
    base="fi",
    check="session",
    why="the pages of a request are kept by its uid when it leaves, and believed when it comes back",
    issue="sglang#26380",
    requests=3,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    return _rows_kept(cls, "uid")


@mutant(
    "length_counted_per_row",
    base="fa",
    check="session",
    why="lengths are counted up per page-table row, from 0 only where nothing was stored before",
    issue="sglang#26512",
    requests=2,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    class Counts(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            counts = self.__dict__.setdefault("counts", {})
            for req in batch.padded_reqs:
                stored = counts.get(req.table_idx, req.cached_len) if req.cached_len else 0
                counts[req.table_idx] = stored + req.extend_len
            lens = self._to_device([counts[req.table_idx] for req in batch.padded_reqs])
            batch.attn_metadata = replace(batch.attn_metadata, cache_seqlens=lens)

    return Counts


@mutant(
    "stored_where_the_last_batch_was",
    base="torch",
    check="session",
    why="K and V go to the out_loc of the last batch, if it had as many tokens",
    issue="sglang#26380",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class StoresLate(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            last = self.__dict__.get("next", batch.out_loc)
            self.slots = last if len(last) == len(batch.out_loc) else batch.out_loc
            self.next = batch.out_loc.clone()

        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            believed = copy(batch)
            believed.out_loc = self.slots
            return super().forward(q, k, v, layer_id, believed)

    return StoresLate


@mutant(
    "padding_keeps_out_loc",
    base="torch",
    check="session",
    why="decode batches are padded to an even size, and padding stores to the slots of an earlier batch",
    issue="sglang#1094",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class PadsWithOldSlots(cls):
        def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            import torch

            slots = self.__dict__.setdefault("slots", {})
            count = len(batch.out_loc)
            if batch.is_decode and count % 2 and count + 1 in slots:
                kv = [torch.cat([x, torch.zeros_like(x[:1])]) for x in (k, v)]
                self.kv_pool.store_kv(*kv, torch.cat([batch.out_loc, slots[count + 1][-1:]]), layer_id)
            if layer_id == self.engine.num_layers - 1:
                slots[count] = batch.out_loc.clone()
            return super().forward(q, k, v, layer_id, batch)

    return PadsWithOldSlots


@mutant(
    "waiting_forgotten",
    base="torch",
    check="session",
    why="who was not in the last batch is looked up in the row of who was",
    issue="sglang#26957",
    requests=3,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class Forgets(cls):
        def prepare_metadata(self, batch: Any) -> None:
            seen = self.__dict__.setdefault("seen", set())
            last = self.__dict__.get("last", {})
            believed = copy(batch)
            believed.padded_reqs = [
                req if req.uid in last or req.uid not in seen else replace(req, table_idx=min(last.values()))
                for req in batch.padded_reqs
            ]
            super().prepare_metadata(believed)
            batch.attn_metadata = believed.attn_metadata
            self.last = {req.uid: req.table_idx for req in batch.padded_reqs}
            seen.update(self.last)

    return Forgets
