"""Faults of asynchrony: memory that is used while a copy is in flight, and a host that waits for the device."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.mutant import mutant


@mutant(
    "reuse_staging",
    base="fi",
    check="lifecycle",
    why="the pinned staging buffer is rewritten by plan without a wait for the copy of the plan before",
    issue="mini-sglang#103",
    requests=2,
    tokens=2,
    alone=True,
    modes=("strict",),  # the harness reads results before the next plan spoils them
)
def _(cls: type[Any]) -> type[Any]:
    class NeverWaits(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            self.last_event = torch.cuda.Event()
            super()._plan_once(metadata, run)

    return NeverWaits


@mutant(
    "event_before_plan",
    base="fi",
    check="lifecycle",
    why="the event that the next plan waits for is recorded before plan, not after it",
    issue="mini-sglang#103",
    requests=2,
    tokens=2,
    alone=True,
    modes=("strict",),
)
def _(cls: type[Any]) -> type[Any]:
    class RecordsTooEarly(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            if run.initialized:
                return
            early = torch.cuda.Event()
            early.record()
            super()._plan_once(metadata, run)
            self.last_event = early

    return RecordsTooEarly


@mutant(
    "event_on_another_stream",
    base="fi-paged",
    check="lifecycle",
    why="the event is recorded on a side stream that never waits for the one that plan copies on",
    issue="mini-sglang#103",
    requests=2,
    tokens=2,
    alone=True,
    modes=("strict",),
)
def _(cls: type[Any]) -> type[Any]:
    class RecordsElsewhere(cls):
        def _plan_once(self, metadata: Any, run: Any) -> None:
            super()._plan_once(metadata, run)
            self.last_event.record(torch.cuda.Stream())

    return RecordsElsewhere


@mutant(
    "longest_length_read_back",
    base="fa",
    check="host_reads",
    why="every layer of a prefill batch reads the longest length back from the device",
    issue="seed 002",
    tokens=1,
    alone=True,
)
def _(cls: type[Any]) -> type[Any]:
    class ReadsBack(cls):
        def _attend(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, **kw: Any) -> Any:
            metadata = batch.attn_metadata
            if batch.is_prefill:  # decode batches are captured, which refuses it
                batch.attn_metadata = replace(metadata, max_seqlen_k=int(metadata.cache_seqlens.max()))
            return super()._attend(q, k, v, layer_id, batch, **kw)

    return ReadsBack


@mutant(
    "pinned_lengths_kept",
    base="fa",
    check="lifecycle",
    why="lengths of every batch go through one pinned buffer, which is rewritten while it is being copied",
    issue="vllm#23737",
    requests=2,
    tokens=2,
    alone=True,
    modes=("strict",),
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class KeepsPinned(cls):
        def _to_device(self, values: list[int]) -> Any:
            kept = self.__dict__.setdefault("pinned", {})
            if len(values) not in kept:
                kept[len(values)] = torch.empty(len(values), dtype=torch.int32, pin_memory=True)
            kept[len(values)].copy_(torch.tensor(values, dtype=torch.int32))
            return kept[len(values)].to(self.device, non_blocking=True)

    return KeepsPinned


@mutant(
    "lengths_read_early",
    base="fa",
    check="lifecycle",
    why="lengths are fetched with a non-blocking copy and used before it has arrived",
    tokens=1,
    alone=True,
    modes=("strict",),
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class ReadsEarly(cls):
        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            metadata = batch.attn_metadata
            lens = metadata.cache_seqlens.to("cpu", non_blocking=True)
            batch.attn_metadata = replace(metadata, max_seqlen_k=int(lens.max()))

    return ReadsEarly


@mutant(
    "replay_without_wait",
    base="fi",
    check="graphs",
    why="before a replay, plan rewrites the staging buffer without a wait for the copy of the plan before",
    issue="mini-sglang#103",
    requests=2,
    tokens=2,
    alone=True,
    modes=("strict",),
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class NeverWaits(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            self.last_event = torch.cuda.Event()
            super().prepare_for_replay(batch)

    return NeverWaits
