"""Faults of a kernel library about attention states: LSEs, merges, rows and requests without keys."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.mutant import mutant
from conformance.mutants.planting import answers, asks


@mutant(
    "merge_no_empty_guard",
    base="kernel:fa-merge",
    check="values",
    why="rows without keys are declared, and merging two empty states gives NaN",
    issue="flashinfer#4051, vllm#39148",
    tokens=1,
    declares={"rows_without_keys": True},
)
def _(cls: type[Any]) -> type[Any]:
    class Unguarded(cls):
        def attend(self, call: Any) -> Any:
            from backends.contract import Attention

            (out, lse), *others = call.states
            for other, other_lse in others:
                out, lse = self.merge_state_v2(out, lse, other, other_lse)
            return Attention(out, lse)

    return Unguarded


@mutant(
    "merge_plus_inf",
    base="kernel:fi-merge",
    check="values",
    why="an empty state comes with LSE +inf and takes all the weight",
    issue="FlashMLA#77, Dao#978",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any) -> Any:
        states = [(v, torch.where(lse.isneginf(), -lse, lse)) for v, lse in call.states]
        return replace(call, states=states)

    return asks(cls, change)


@mutant(
    "merge_in_base_e",
    base="kernel:fi-merge",
    check="values",
    why="base-2 LSEs are merged as natural ones",
    issue="sglang#40903, vllm#47079",
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    class Natural(cls):
        def attend(self, call: Any) -> Any:
            states = [(v, lse / math.log(2.0)) for v, lse in call.states]
            merged = super().attend(replace(call, states=states))
            return replace(merged, lse=None if merged.lse is None else merged.lse * math.log(2.0))

    return Natural


@mutant(
    "sentinel_5e4",
    base="kernel:fi-decode",
    check="lse",
    why="-inf is declared for rows without keys, and a finite sentinel comes",
    issue="flashinfer#4452",
    tokens=0,
    declares={"empty_lse": "-inf"},
)
def _(cls: type[Any]) -> type[Any]:
    class Undeclared(cls):
        pass

    return Undeclared


@mutant(
    "lse_plus_inf",
    base="kernel:fa-kvcache",
    check="lse",
    why="the LSE of a row without keys is +inf",
    issue="FlashMLA#77",
    tokens=0,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any, answer: Any) -> Any:
        return replace(answer, lse=torch.where(answer.lse.isneginf(), -answer.lse, answer.lse))

    return answers(cls, change)


@mutant(
    "lse_log2",
    base="kernel:fa-kvcache",
    check="lse",
    why="the LSE is in base 2 and declared natural",
    issue="sglang#40903",
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any, answer: Any) -> Any:
        return replace(answer, lse=answer.lse / math.log(2.0))

    return answers(cls, change)


@mutant(
    "lse_padded_offset",
    base="kernel:fa-varlen",
    check="lse",
    why="LSEs are written at the offsets of a padded batch into a packed buffer",
    issue="Dao#2542",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any, answer: Any) -> Any:
        longest = max(call.qo_lens)
        lse = torch.full_like(answer.lse, float("nan"))
        row = 0
        for i, n in enumerate(call.qo_lens):
            at = i * longest
            room = max(min(n, lse.shape[0] - at), 0)
            lse[at : at + room] = answer.lse[row : row + room]
            row += n
        return replace(answer, lse=lse)

    return answers(cls, change)


@mutant(
    "requires_len_ge_1",
    base="kernel:fa-kvcache",
    check="values",
    why="the kernel indexes the page table with -1 for a request without keys",
    issue="sglang#5875, vllm#35969",
    tokens=0,
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any) -> Any:
        if 0 in call.kv_lens:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return call

    return asks(cls, change)


@mutant(
    "skip_negative_len",
    base="kernel:fa-varlen",
    check="poison",
    why="rows that see no key are skipped; their output is never written",
    issue="flashinfer#1533",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any, answer: Any) -> Any:
        empty = answer.lse.isneginf().all(1)
        return replace(
            answer, out=torch.where(empty[:, None, None], float("nan"), answer.out).to(answer.out.dtype)
        )

    return answers(cls, change)
