"""Faults of an engine that stores its keys and values through FlashInfer's own kernel."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from typing import Any

import torch

from conformance.appending import AppendingBackend
from conformance.mutants.mutant import mutant

_DECLARED = {name: getattr(AppendingBackend.capabilities, name) for name in ("head_dims", "cuda_graph")}


def _places(name: str, change: Any) -> type[Any]:
    """An appending backend whose arrays are `change(backend, metadata, sound ones)` in part."""

    class Misplaces(AppendingBackend):
        def places(self, metadata: Any, num_tokens: int) -> dict[str, torch.Tensor]:
            sound = super().places(metadata, num_tokens)
            return sound | change(self, metadata, sound)

    Misplaces.__name__ = name
    return Misplaces


def _positions(name: str, lengths: Any) -> type[Any]:
    """One whose positions follow from other lengths: `lengths(seq_lens, new tokens of each request)`."""

    def change(backend: Any, metadata: Any, sound: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        indptr = metadata.cu_seqlens_q_cpu.to(backend.device)
        given = lengths(metadata.seq_lens_cpu.to(backend.device), indptr.diff())
        count = len(sound["positions"])
        return {"positions": backend.page.get_batch_indices_positions(indptr, given, count)[1]}

    return _places(name, change)


@mutant(
    "append_positions_from_zero",
    base="fi-paged",
    check="metadata",
    why="lengths handed to get_batch_indices_positions are those of the new tokens: each request is stored from 0 on",
    declares=_DECLARED,
    tokens=2,
)
def _(_: type[Any]) -> type[Any]:
    return _positions("PositionsFromZero", lambda _, new: new)


@mutant(
    "append_lengths_before",
    base="fi-paged",
    check="metadata",
    why="lengths are those before the new tokens, so that positions are too low by their number",
    declares=_DECLARED,
    tokens=2,
)
def _(_: type[Any]) -> type[Any]:
    return _positions("LengthsBefore", lambda seq_lens, new: seq_lens - new)


@mutant(
    "append_to_first_request",
    base="fi-paged",
    check="metadata",
    why="batch_indices is left at 0: every token goes to the first request",
    declares=_DECLARED,
    requests=2,
    tokens=3,
)
def _(_: type[Any]) -> type[Any]:
    return _places("ToFirstRequest", lambda _, __, sound: {"batch_indices": sound["batch_indices"] * 0})


@mutant(
    "append_by_token_ids",
    base="fi-paged",
    check="metadata",
    why="kv_indices of the append holds token locations where page ids belong",
    declares=_DECLARED,
    tokens=3,
)
def _(_: type[Any]) -> type[Any]:
    def change(backend: Any, _: Any, sound: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"kv_indices": sound["kv_indices"] * backend.page_size}

    return _places("ByTokenIds", change)
