"""Backends that are right and not built as ours are: none of their ways is a fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Batch
from backends.fi import FlashInferBackend
from backends.fi_base import FIMetadata, FIRun, FlashInferBase
from backends.registry import spec_of
from backends.torch_sdpa import TorchBackend
from cases.batches import decode, step
from cases.beyond import BEYOND
from cases.model import Case, Mask, Request, Step
from conformance.appending import AppendingBackend
from conformance.examine import examine
from conformance.question import Question
from conformance.session import Session
from conformance.trial import Asker
from fakes.cuda import DeviceUnavailable


class LogSumExpInGraph(TorchBackend):
    """No kernel library, but an LSE, eagerly and captured."""

    capabilities = replace(TorchBackend.capabilities, lse="e")

    def forward_return_lse(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer_id: int, batch: Batch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        metadata, heads = batch.attn_metadata, q.shape[1]
        out = self.forward(q, k, v, layer_id, batch)
        repeats = metadata.cu_seqlens_q.diff().long()
        table = metadata.page_table.repeat_interleave(repeats, dim=0, output_size=len(q))
        keys = self.kv_pool.k_cache(layer_id).flatten(0, 1)[table].float()
        keys = keys.repeat_interleave(heads // keys.shape[2], dim=2)
        column = torch.arange(table.shape[1], device=q.device)
        hidden = column > batch.positions[:, None]
        scores = torch.einsum("rhd,rkhd->rhk", q.float(), keys) * self.engine.scale
        return out, scores.masked_fill_(hidden[:, None], float("-inf")).logsumexp(-1)


class KeepsEqualPlans(FlashInferBackend):
    """A wrapper is planned anew where the arrays are others than those of its last plan."""

    capabilities = replace(FlashInferBackend.capabilities, cuda_graph=False)

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        metadata = batch.attn_metadata
        arrays = (metadata.cu_seqlens_q_cpu, metadata.cu_seqlens_k_cpu, metadata.indices.cpu())
        self.wanted = [array.tolist() for array in arrays]

    def _plan_once(self, metadata: FIMetadata, run: FIRun) -> None:
        held: dict[int, list[list[int]]] = self.__dict__.setdefault("held", {})
        if held.get(id(run.wrapper)) != self.wanted:
            super()._plan_once(metadata, run)
            held[id(run.wrapper)] = self.wanted


class OneWrapper(FlashInferBackend):
    """All windows on one wrapper, planned anew wherever the window changes from layer to layer."""

    capabilities = replace(FlashInferBackend.capabilities, cuda_graph=False)
    last: tuple[int, int | None] | None = None

    def _plan_once(self, metadata: FIMetadata, run: FIRun) -> None:
        wrapper = metadata.runs[0].wrapper
        run.wrapper = wrapper
        if self.last != (id(metadata), run.window):
            run.initialized = False
            super()._plan_once(metadata, run)
            self.last = (id(metadata), run.window)


class ScalesAround(FlashInferBackend):
    """fp8 KV: k_scale goes into sm_scale, v_scale onto the output."""

    capabilities = replace(FlashInferBackend.capabilities, kv_dtypes=frozenset({"float8_e4m3fn"}))

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        k_scale, self.v_scale = engine.kv_pool.scales
        self.plan_options["sm_scale"] = engine.scale * k_scale

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
        found = super()._run(q, k, v, layer_id, batch, return_lse=return_lse)
        return (found[0] * self.v_scale, found[1]) if return_lse else found * self.v_scale


class PreparesCompiled(FlashInferBackend):
    """Metadata of a traced function, which `torch.compile` guards."""

    def prepare_metadata(self, batch: Batch) -> None:
        super().prepare_metadata(batch)
        metadata = batch.attn_metadata
        lens = metadata.cu_seqlens_k_cpu.diff()
        metadata.cu_seqlens_k_cpu = _indptr(lens).pin_memory()


@torch.compile(backend="eager", dynamic=True)  # pyright: ignore[reportUnknownMemberType]
def _indptr(lens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


FP8 = Case(
    (decode(5, 3), step("mixed", [(3, 2), (0, 4)], 2)), kv_dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.25
)
EQUAL = Case((decode(4, 2), decode(4, 2), step("prefill", [(2, 2), (0, 3)], 5)), placement="sequential")
SAME = Case(
    (
        Step((Request(0, 3, 0), Request(0, 5, 1))),
        Step((Request(2, 1, 0), Request(4, 1, 1)), "decode", "decode"),
        Step((Request(2, 1, 0), Request(4, 1, 1)), "decode", "decode"),
    ),
    session=True,
)
WINDOWS = Case(
    (decode(9, 4), step("mixed", [(9, 2), (0, 6)], 2)), num_layers=3, mask=Mask(window=3, window_layers=(1,))
)

DESIGNS: dict[type[Any], tuple[Case, ...]] = {
    LogSumExpInGraph: tuple(replace(EQUAL, seed=seed) for seed in range(128, 136)),
    KeepsEqualPlans: (EQUAL, SAME),
    OneWrapper: (WINDOWS, BEYOND["window_in_some_layers_decode"][0]),
    ScalesAround: tuple(replace(FP8, seed=seed) for seed in range(4)),
    AppendingBackend: (EQUAL, SAME, WINDOWS, replace(EQUAL, layout="HND", strided=True)),
    PreparesCompiled: (EQUAL, BEYOND["decode_of_12_24_48_requests"][0]),
}


@pytest.fixture(scope="module")
def built_in() -> Iterator[dict[str, Asker]]:
    try:
        with Session(["torch", "fi"], device_sim="full") as session:
            yield {asker.spec.name: asker for asker in session.askers}
    except DeviceUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: design.__name__)
def test_it_passes(built_in: dict[str, Asker], design: type[Any]) -> None:
    base = built_in["fi" if issubclass(design, FlashInferBase) else "torch"]
    for case in DESIGNS[design]:
        verdict = examine(Question(case), replace(base, spec=spec_of(design)))
        assert verdict.unsupported is None
        assert not verdict.failed, verdict.findings


def test_a_plan_was_kept(built_in: dict[str, Asker]) -> None:
    first = replace(built_in["fi"], spec=spec_of(KeepsEqualPlans)).ask(SAME)
    assert [len([c for c in first.calls(step) if c.op == "plan"]) for step in range(3)] == [1, 1, 0]
