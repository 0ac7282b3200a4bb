"""Faults of page tables and page ids: rows, columns, translations and prefixes of another request, page or layer."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.mutant import mutant
from conformance.mutants.planting import fa_fields, prepares


@mutant(
    "token_ids_as_page_ids",
    base="fa",
    check="metadata",
    why="the page table holds token locations where page numbers are expected",
    issue="sglang#32902",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.page_table * self.page_size

    return prepares(cls, "TokenIds", fa_fields(page_table=table))


@mutant(
    "translate_page_id_as_token",
    base="fa",
    check="metadata",
    why="page numbers are divided by the page size a second time",
    issue="sglang#38187",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return metadata.page_table // self.page_size

    return prepares(cls, "DividedTwice", fa_fields(page_table=table))


@mutant(
    "identity_page_table_only",
    base="fa",
    check="metadata",
    why="page-table row i is taken for request i, whatever its table_idx",
    issue="mutant bank",
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        rows = self.page_table[: len(batch.padded_reqs), : metadata.max_seqlen_k : self.page_size]
        return rows // self.page_size

    return prepares(cls, "RowsInOrder", fa_fields(page_table=table))


@mutant(
    "row_of_another_request",
    base="fi-paged",
    check="metadata",
    why="the last request's pages are taken from the row of the first",
    issue="seed 000",
    requests=2,
)
def _(cls: type[Any]) -> type[Any]:
    class AnotherRow(cls):
        def _page_ids(self, reqs: Any) -> torch.Tensor:

            last = replace(reqs[-1], table_idx=reqs[0].table_idx)
            return super()._page_ids([*reqs[:-1], last])

    return AnotherRow


@mutant(
    "page_table_column_short",
    base="fa",
    check="metadata",
    why="the page table has floor(max_seqlen_k / page_size) columns",
    issue="mini-sglang#68",
    requests=2,
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    def table(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        columns = max(metadata.max_seqlen_k // self.page_size, 1)
        return metadata.page_table[:, :columns].contiguous()

    return prepares(cls, "ColumnShort", fa_fields(page_table=table))


@mutant(
    "prefix_not_counted",
    base="fa",
    check="metadata",
    why="cache_seqlens counts the new tokens only, not the cached prefix",
    issue="seed 000",
)
def _(cls: type[Any]) -> type[Any]:
    def lens(self: Any, batch: Any, metadata: Any) -> torch.Tensor:
        return self._to_device([r.extend_len for r in batch.padded_reqs])

    return prepares(cls, "PrefixLost", fa_fields(cache_seqlens=lens))


@mutant(
    "shared_prefix_lost",
    base="fi-paged",
    check="metadata",
    why="pages that two requests share are taken from the end of the lender instead of its beginning",
    issue="mini-sglang#80",
    requests=2,
    tokens=5,
)
def _(cls: type[Any]) -> type[Any]:
    class SharedPrefixLost(cls):
        def _page_ids(self, reqs: Any) -> torch.Tensor:
            ids = super()._page_ids(reqs)
            counts = [-(-r.device_len // self.page_size) for r in reqs]
            parts = list(ids.split(counts))
            for i in range(1, len(parts)):
                if parts[0][0].item() == parts[i][0].item():
                    parts[i] = torch.cat([parts[0][-1:], parts[i][1:]])
            return torch.cat(parts)

    return SharedPrefixLost


@mutant(
    "pool_of_another_layer",
    base="fa",
    check="metadata",
    why="every layer reads the pool of layer 0",
    issue="sglang#24617",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    class FirstPool:
        def __init__(self, pool: Any) -> None:
            self._pool = pool
            self.store_kv = pool.store_kv

        def k_cache(self, layer_id: int) -> torch.Tensor:
            return self._pool.k_cache(0)

        def v_cache(self, layer_id: int) -> torch.Tensor:
            return self._pool.v_cache(0)

    class LayerZero(cls):
        def __init__(self, engine: Any) -> None:
            super().__init__(engine)
            self.kv_pool = FirstPool(self.kv_pool)

    return LayerZero
