"""Faults of buffers that have no room for the longest context or the largest batch."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.mutant import mutant


@mutant(
    "indices_one_short",
    base="fi",
    check="capacity",
    why="the buffer of page ids is one entry a request short of the context limit",
    issue="sglang#24587",
    tokens=1,
    alone=True,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class OneShort(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            super().init_capture_graph(max_seq_len - 1, bs_list)

    return OneShort


@mutant(
    "table_columns_rounded_down",
    base="fa",
    check="capacity",
    why="the page-table buffer has max_seq_len // page_size columns",
    issue="mini-sglang#68",
    tokens=1,
    alone=True,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class RoundsDown(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            whole = max_seq_len // self.page_size * self.page_size
            super().init_capture_graph(max(whole, self.page_size), bs_list)

    return RoundsDown


@mutant(
    "buffers_by_request_pool",
    base="fa",
    check="capacity",
    why="buffers hold as many requests as the engine runs, not as a padded batch has",
    issue="sglang#25124",
    tokens=1,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class SizedByPool(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            super().init_capture_graph(max_seq_len, [min(max(bs_list), self.engine.max_batch)])

    return SizedByPool


@mutant(
    "lengths_written_past_the_end",
    base="fa",
    check="capacity",
    why="the buffer of lengths is sized by the request pool, and written and read past its end as a kernel would",
    issue="sglang#25124",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class PastTheEnd(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            super().init_capture_graph(max_seq_len, bs_list)
            lengths = torch.ones(
                min(max(bs_list), self.engine.max_batch), dtype=torch.int32, device=self.device
            )
            self.captured = replace(self.captured, cache_seqlens=lengths)

        def _captured(self, batch: Any) -> Any:
            buffers = super()._captured(batch)
            past = self.captured.cache_seqlens.as_strided((len(batch.padded_reqs),), (1,))
            return replace(buffers, cache_seqlens=past)

        def prepare_for_capture(self, batch: Any) -> None:
            super().prepare_for_capture(batch)
            batch.attn_metadata.cache_seqlens.fill_(1)

    return PastTheEnd


@mutant(
    "last_column_cut",
    base="torch",
    check="capacity",
    why="the slots of a batch are cut one column before the context limit",
    issue="sglang#35985",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class CutsLastColumn(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            metadata, width = batch.attn_metadata, self.engine.max_seq_len - 1
            if metadata.page_table.shape[1] > width:
                cut = metadata.page_table[:, : max(width, 1)]
                lengths = metadata.cache_seqlens.clamp(max=cut.shape[1])
                batch.attn_metadata = replace(metadata, page_table=cut, cache_seqlens=lengths)

    return CutsLastColumn
