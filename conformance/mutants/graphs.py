"""Faults of captured graphs: plans and buffers that a replay does not follow, padding that is not harmless."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance.mutants.mutant import mutant


@mutant(
    "replay_without_plan",
    base="fi",
    check="graphs",
    why="plan is left to forward, which a replay never enters",
    issue="NVIDIA/TensorRT-LLM#18443",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class LeavesThePlanToForward(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            batch.attn_metadata.runs = self._runs(self.graph_wrappers[len(batch.padded_reqs)])

    return LeavesThePlanToForward


@mutant(
    "graph_planned_once",
    base="fi-paged",
    check="graphs",
    why="a graph's wrapper is planned before its first replay alone",
    issue="NVIDIA/TensorRT-LLM#18443",
    requests=2,
    tokens=3,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class PlansFirstReplayOnly(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            bs, plans = len(batch.padded_reqs), self.__dict__.setdefault("plans", {})
            plans[bs] = plans.get(bs, 0) + 1
            if plans[bs] <= 2:  # at capture, and once more
                super().prepare_for_replay(batch)

    return PlansFirstReplayOnly


@mutant(
    "graph_plans_first_window_only",
    base="fi-paged",
    check="graphs",
    why="of two wrappers, one a window, a replay plans the first: layers of the other follow the plan of the capture",
    issue="NVIDIA/TensorRT-LLM#18443",
    tokens=2,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class PlansOneWrapper(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            metadata = batch.attn_metadata
            metadata.runs = self._runs(self.graph_wrappers[len(batch.padded_reqs)])
            self._plan_once(metadata, metadata.runs[0])

    return PlansOneWrapper


@mutant(
    "replan_moves_buffers",
    base="fi",
    check="graphs",
    why="run is captured on a wrapper of the plain mode, whose arrays stand elsewhere after each plan",
    issue="flashinfer#3904",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class CapturesPlainWrapper(cls):
        def prepare_for_capture(self, batch: Any) -> None:
            plain = type(self.wrappers["decode"][0])
            self.graph_wrapper_class = lambda workspace, indptr, indices, last, layout, **rest: plain(
                workspace, layout, **rest
            )
            super().prepare_for_capture(batch)

    return CapturesPlainWrapper


@mutant(
    "captured_buffers_replaced",
    base="fa",
    check="graphs",
    why="each replay puts new tensors in place of those that the graph reads",
    issue="flashinfer#3904",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class NewBuffers(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            c = self.captured
            self.captured = replace(c, cache_seqlens=c.cache_seqlens.clone(), page_table=c.page_table.clone())
            super().prepare_for_replay(batch)

    return NewBuffers


@mutant(
    "stale_pad_rows",
    base="fa",
    check="graphs",
    why="a replay fills the rows of its requests alone: those that pad keep a request that has finished",
    issue="sglang#1469",
    requests=3,
    tokens=3,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class FillsRealRows(cls):
        def prepare_for_capture(self, batch: Any) -> None:
            super().prepare_for_capture(batch)
            dummy = self.page_table[batch.padded_reqs[0].table_idx, :1] // self.page_size
            batch.attn_metadata.page_table[:, :1].copy_(dummy)

        def prepare_for_replay(self, batch: Any) -> None:
            n, metadata, buffers = len(batch.reqs), batch.attn_metadata, self._captured(batch)
            columns = metadata.page_table.shape[1]
            buffers.cache_seqlens[:n].copy_(metadata.cache_seqlens[:n])
            buffers.page_table[:n, :columns].copy_(metadata.page_table[:n])

    return FillsRealRows


@mutant(
    "pad_rows_nan",
    base="fa",
    check="graphs",
    why="rows that pad get no query: their output is never written",
    issue="sglang#1469",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class NoQueryInPadding(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            super().prepare_for_replay(batch)
            rows = torch.arange(len(batch.padded_reqs) + 1, dtype=torch.int32, device=self.device)
            self._captured(batch).cu_seqlens_q.copy_(rows.clamp(max=len(batch.reqs)))

    return NoQueryInPadding


@mutant(
    "pad_rows_keep_out_loc",
    base="fi",
    check="graphs",
    why="a replay writes the out_loc of its requests alone: rows that pad store where a finished one stood",
    issue="mini-sglang",
    requests=3,
    tokens=3,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class KeepsOutLoc(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            super().init_capture_graph(max_seq_len, bs_list)
            self.out_loc = torch.zeros(max(bs_list), dtype=torch.int32, device=self.device)

        def prepare_for_capture(self, batch: Any) -> None:
            super().prepare_for_capture(batch)
            batch.attn_metadata.out_loc = self.out_loc[: len(batch.padded_reqs)]

        def prepare_for_replay(self, batch: Any) -> None:
            super().prepare_for_replay(batch)
            self.out_loc[: len(batch.reqs)].copy_(batch.out_loc[: len(batch.reqs)])

        def _run(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any, **options: Any) -> Any:
            kept = getattr(batch.attn_metadata, "out_loc", batch.out_loc)
            return super()._run(q, k, v, layer_id, replace(batch, out_loc=kept), **options)

    return KeepsOutLoc


@mutant(
    "stale_scheduler_metadata",
    base="fa",
    check="graphs",
    why="FlashAttention's schedule is made at capture and not again for the lengths of a replay",
    issue="vllm#20301",
    tokens=2,
    alone=True,
    modes=("strict",),  # what the schedule is for shows in speed, and in no number of the fake's
    device="full",
    declares={"dtypes": frozenset({"float16", "bfloat16"})},
)
def _(cls: type[Any]) -> type[Any]:
    return _scheduled(cls, splits=(1, 1))


@mutant(
    "splits_capture_lt_run",
    base="fa",
    check="graphs",
    why="FlashAttention is captured with room for 2 splits, and a replay's schedule is made for 8",
    issue="vllm#20301",
    tokens=1,
    alone=True,
    modes=("strict",),  # the fake has no memory outside of its results to spoil
    device="full",
    declares={"dtypes": frozenset({"float16", "bfloat16"})},
)
def _(cls: type[Any]) -> type[Any]:
    class MoreSplitsAtReplay(_scheduled(cls, splits=(2, 8))):
        def prepare_for_replay(self, batch: Any) -> None:
            super().prepare_for_replay(batch)
            captured = self.schedules[len(batch.padded_reqs)]
            captured.copy_(self.schedule_for(self._captured(batch), self.splits[1]))

    return MoreSplitsAtReplay


def _scheduled(cls: type[Any], splits: tuple[int, int]) -> type[Any]:
    """`fa` with a schedule that is made at capture; `splits` of what is captured, and of a replay."""

    class SchedulesAtCapture(cls):
        def __init__(self, engine: Any) -> None:
            from sgl_kernel.flash_attn import get_scheduler_metadata  # pyright: ignore[reportMissingImports]

            super().__init__(engine)
            self.splits, self.schedule_of = splits, get_scheduler_metadata
            self.schedules: dict[int, Any] = {}
            self.schedule: Any = None
            attend = self.flash_attn_with_kvcache
            self.flash_attn_with_kvcache = lambda **given: attend(
                **given, scheduler_metadata=self.schedule, num_splits=splits[0]
            )

        def schedule_for(self, metadata: Any, num_splits: int) -> Any:
            e, window = self.engine, self.engine.windows[0]
            return self.schedule_of(
                metadata.cache_seqlens.shape[0],
                1,
                metadata.max_seqlen_k,
                e.num_qo_heads,
                e.num_kv_heads,
                e.head_dim_qk,
                metadata.cache_seqlens,
                e.dtype,
                headdim_v=e.head_dim_vo,
                page_size=self.page_size,
                causal=True,
                window_size=(-1 if window is None else window - 1, 0),
                num_splits=num_splits,
            )

        def prepare_metadata(self, batch: Any) -> None:
            super().prepare_metadata(batch)
            self.schedule = None

        def prepare_for_capture(self, batch: Any) -> None:
            super().prepare_for_capture(batch)
            self.schedule = self.schedule_for(batch.attn_metadata, splits[0])
            self.schedules[len(batch.padded_reqs)] = self.schedule

    return SchedulesAtCapture


@mutant(
    "host_read_in_capture",
    base="torch",
    check="graphs",
    why="forward reads the longest length of the batch on the host, also while a graph records it",
    issue="mini-sglang",
    tokens=1,
    alone=True,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class CutsTheTable(cls):
        def _decode(self, q: Any, k_slots: Any, v_slots: Any, metadata: Any) -> Any:
            longest = int(metadata.cache_seqlens.max())
            cut = replace(metadata, page_table=metadata.page_table[:, :longest])
            return super()._decode(q, k_slots, v_slots, cut)

    return CutsTheTable


@mutant(
    "graph_wrapper_left_in_place",
    base="fi",
    check="graphs",
    why="a replay leaves the graph's wrapper where the next eager batch looks for its own",
    issue="mini-sglang",
    requests=2,
    tokens=2,
    alone=True,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class LeavesWrapper(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            super().prepare_for_replay(batch)
            self.wrappers = self.wrappers | {"decode": [run.wrapper for run in batch.attn_metadata.runs]}

    return LeavesWrapper


@mutant(
    "capture_shorter_than_replay",
    base="fi",
    check="graphs",
    why="the buffers are made for the one token of the dummies that are captured",
    issue="NVIDIA/TensorRT-LLM#15556",
    tokens=2,
    device="full",
    raises=True,
)
def _(cls: type[Any]) -> type[Any]:
    class SizedByCapture(cls):
        def init_capture_graph(self, max_seq_len: int, bs_list: list[int]) -> None:
            super().init_capture_graph(1, bs_list)

    return SizedByCapture


@mutant(
    "graph_keeps_lse_of_warm_up",
    base="fa",
    check="graphs",
    why="the LSE is copied to its buffer when a graph warms up, and no more while it records or replays",
    issue="vllm#47079",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class CopiesLseOnce(cls):
        def forward_return_lse(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
            out, lse = super().forward_return_lse(q, k, v, layer_id, batch)
            buffers = self.__dict__.setdefault("lse_buffers", {})
            buffer = buffers.setdefault((layer_id, len(q)), torch.empty_like(lse))
            if not torch.cuda.is_current_stream_capturing():
                buffer.copy_(lse)
            return out, buffer

    return CopiesLseOnce


@mutant(
    "replay_counts_positions",
    base="fi",
    check="graphs",
    why="a replay counts the positions up for the step after it, in the tensor that it was given",
    issue="mini-sglang",
    tokens=1,
    alone=True,
    device="full",
)
def _(cls: type[Any]) -> type[Any]:
    class CountsOn(cls):
        def prepare_for_replay(self, batch: Any) -> None:
            super().prepare_for_replay(batch)
            batch.positions.add_(1)

    return CountsOn
