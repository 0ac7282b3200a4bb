"""The graph runner, and what a case through graphs leaves behind, on the full simulated device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from backends.contract import EngineContext
from backends.fa import FlashAttentionBackend
from backends.fi import FlashInferBackend
from cases.edges import EDGES
from cases.model import Case, Phase, Request, Step
from conformance.checks import graphs
from conformance.checks.capacity import overruns
from conformance.decode import OUTSIDE, ReadSpan
from conformance.graphs_run import captured_sizes, graph_execution, replayed_steps, with_room
from conformance.padding import foreign
from conformance.question import Question
from conformance.selection import cases_for
from conformance.session import Session
from conformance.support import unsupported
from conformance.sweep import draw
from conformance.trial import Asker, Trial
from fakes.cuda import DeviceUnavailable
from fakes.recorder import Span

NAMES = ["torch", "fi", "fi-paged", "fa", "fa,fi"]
ONE_BUFFER = f"{__name__}:OneBuffer"
PLANS_NEW_LENGTHS = f"{__name__}:PlansNewLengths"


@pytest.fixture(scope="module")
def askers() -> Iterator[dict[str, Asker]]:
    try:
        with Session([*NAMES, ONE_BUFFER, PLANS_NEW_LENGTHS], device_sim="full") as session:
            yield {asker.spec.name: asker for asker in session.askers}
    except DeviceUnavailable as error:
        pytest.skip(str(error))


def decode(*kv_lens: int, first: int = 0) -> Step:
    return Step(tuple(Request(n - 1, 1, first + i) for i, n in enumerate(kv_lens)), "decode", "decode")


THREE_STEPS = Case(
    (decode(4, 9, 2), Step((Request(0, 5, 7),)), decode(6, first=7)),
    page_size=4,
    placement="scattered",
    dtype="float16",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_correct_backend_replays_right(askers: dict[str, Asker], name: str) -> None:
    trial = Trial(Question(THREE_STEPS), askers[name])
    done = trial.graphs
    assert done is not None
    assert done.sizes == [8]
    assert [(at.step, at.size) for at in done.replays] == [(0, 8), (2, 8)]
    assert [len(run.layers) for run in done.steps.steps] == [2, 2, 2], "the prefill ran eagerly between them"
    for at in done.replays:
        count = len(THREE_STEPS.steps[at.step].requests)
        for layer, padding in zip(at.run.layers, at.padding, strict=True):
            assert layer.values is not None
            assert layer.values.shape[0] == count
            assert padding.shape[0] == 8 - count
            assert torch.isfinite(padding).all()
    assert graphs.check(trial) == []


@pytest.mark.parametrize("name", ["fi", "fi-paged", "fa"])
def test_what_a_replay_read_is_on_record(askers: dict[str, Asker], name: str) -> None:
    done = Trial(Question(THREE_STEPS), askers[name]).graphs
    assert done is not None
    dummy = done.room.dummy_slot
    for at in done.replays:
        placed = done.room.steps[at.step].placed
        for layer in range(2):
            (call,) = [c for c in at.calls if c.layer == layer]
            spans = [span.slots.tolist() for span in call.attended.spans]
            assert spans == [*(s.tolist() for s in placed.slots), *[[dummy]] * (8 - len(placed.slots))]
            if name != "fa":
                assert call.plan is not None
                assert call.plan.at.batch == at.step


OLD = "; a dummy has slot {dummy} alone: its row still holds that of step 0"
SOME = "; a dummy has slot {dummy} alone"


@pytest.mark.parametrize(
    ("at", "read", "words"),
    [
        (1, (0, 1, 9), "9 keys, among them slot {first} (nobody's)" + OLD),
        (1, (0, 1, 1), "slot {first} (nobody's)" + OLD),
        (1, (0, 2, 2), "2 keys, among them slot {first} (request 0's)" + SOME),
        (1, (2, 0, 1), "slot {first} (request 0's)" + SOME),
        (0, (0, 1, 1), "slot {first} (request 1's)" + SOME),
        (1, None, "one outside of this layer's pool" + SOME),
    ],
)
def test_a_padding_row_holds_an_earlier_batch_only_where_it_did(
    askers: dict[str, Asker], at: int, read: tuple[int, int, int] | None, words: str
) -> None:
    """Row 1 pads a replay. `read`: of which step's which request it reads how many keys; None: other memory."""
    done = Trial(Question(THREE_STEPS), askers["torch"]).graphs
    assert done is not None
    slots = np.array([OUTSIDE])
    if read is not None:
        step, request, count = read
        slots = done.room.steps[step].placed.slots[request][:count]
    spans = [ReadSpan(np.array([1]), slots, slots, Span(1, 2, slots), None)]
    told = words.format(first=slots[0], dummy=done.room.dummy_slot)
    assert foreign(done, done.replays[at], spans) == f"row 1, which pads the batch, reads {told}"


def test_sinks_that_a_graph_was_captured_with_are_named(askers: dict[str, Asker]) -> None:
    asker = askers["fa"]

    def planted(engine: EngineContext) -> Any:
        backend: Any = asker.spec.factory(engine)
        attend = backend.flash_attn_with_kvcache
        sinks = torch.zeros(engine.num_qo_heads, dtype=torch.bfloat16, device=engine.device)

        def with_sinks(q: torch.Tensor, **rest: Any) -> Any:
            return attend(q=q, **rest, sinks=sinks if len(q) > 1 else None)

        backend.flash_attn_with_kvcache = with_sinks
        return backend

    case = Case((decode(4),))
    found = graphs.check(Trial(Question(case), replace(asker, spec=replace(asker.spec, factory=planted))))
    assert found
    assert found[0].field == "sinks"
    assert "flash_attn_with_kvcache is given sinks, which no case has" in found[0].message
    assert len(found) > 1


def test_a_scale_that_a_graph_was_captured_with_is_named(askers: dict[str, Asker]) -> None:
    asker = askers["fi"]

    class ScaledInGraphs(FlashInferBackend):
        def prepare_for_replay(self, batch: Any) -> None:
            self.plan_options |= {"sm_scale": 2 * self.engine.scale}
            super().prepare_for_replay(batch)
            self.plan_options |= {"sm_scale": self.engine.scale}

    case = Case((decode(4, 2),))
    spec = replace(asker.spec, factory=ScaledInGraphs)
    found = graphs.check(Trial(Question(case), replace(asker, spec=spec)))
    assert found
    assert found[0].field == "sm_scale"
    assert found[0].message == "replayed for 4 requests: sm_scale is 0.25, must be 0.125"


def test_dummies_have_a_page_and_a_row_of_their_own() -> None:
    question = Question(replace(THREE_STEPS, page_size=3))
    room = with_room(question.tensors)
    for step in range(3):
        table, plain = room.page_table(step), question.tensors.page_table(step)
        assert torch.equal(table[:-1], plain)
        assert table[-1, 0] == room.dummy_slot == 3 * question.tensors.plan.num_pages
        assert (table[:-1] < room.dummy_slot).all()
        pool = room.pool(step, "k", nan=False, after=True)
        assert torch.equal(pool[:, :-1], question.tensors.pool(step, "k", nan=False, after=True))


def test_sizes_and_eager_steps_vary_with_the_seed() -> None:
    steps = tuple(decode(*[2] * n) for n in (1, 3, 4, 2, 1, 1))
    sizes = {seed: captured_sizes(Case(steps, seed=seed)) for seed in range(4)}
    assert sizes == {0: [8], 1: [4], 2: [2, 8], 3: [1, 4]}
    exact = {seed - 64: captured_sizes(Case(steps, seed=seed)) for seed in range(64, 68)}
    assert exact == {0: [5], 1: [4], 2: [2, 4, 5], 3: [1, 3, 4]}
    assert replayed_steps(Case(steps)) == [0, 1, 2, 4, 5]
    assert replayed_steps(Case(steps, seed=48)) == [0, 1, 4, 5], "the largest has no graph"
    assert captured_sizes(Case(steps, seed=51)) == [1, 4]
    assert replayed_steps(Case((decode(2), decode(3)), seed=48)) == [0, 1], (
        "no batch is larger than the others"
    )
    assert replayed_steps(Case((decode(1),), seed=12)) == []
    phases: tuple[Phase, ...] = ("prefill", "decode")
    assert [bool(replayed_steps(Case((Step((Request(),), p, p),)))) for p in phases] == [False, True]


@pytest.mark.parametrize("name", NAMES)
def test_no_false_alarm(askers: dict[str, Asker], name: str) -> None:
    asker = askers[name]
    drawn = [case for chunk in draw(cases_for([asker.spec.capabilities]), 40, 5) for case in chunk]
    edges = [case for case, _ in EDGES.values() if sum(case.steps[0].kv_lens) < 200]
    replayed = 0
    for case in (*edges, *drawn):
        if unsupported(case, asker.spec.capabilities) is not None:
            continue
        trial = Trial(Question(case), asker)
        assert not graphs.check(trial), case
        assert not overruns(trial), case
        replayed += trial.graphs is not None
    assert replayed > 10


def test_no_graph_without_a_declaration_or_a_decode_step(askers: dict[str, Asker]) -> None:
    asker = askers["fa"]
    undeclared = replace(asker.spec, capabilities=replace(asker.spec.capabilities, cuda_graph=False))
    question = Question(THREE_STEPS)
    assert graph_execution(question, undeclared, asker.machine, "strict") is None
    prefill = Question(Case((Step((Request(0, 3),)),)))
    assert graph_execution(prefill, asker.spec, asker.machine, "strict") is None


def test_no_garbage_is_collected_while_a_capture_runs(
    askers: dict[str, Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    collects: list[bool] = []
    graph = torch.cuda.graph

    class Watched(graph):
        def __enter__(self) -> None:
            super().__enter__()
            collects.append(gc.isenabled())

        def __exit__(self, *error: object) -> None:
            collects.append(gc.isenabled())
            super().__exit__(*error)

    monkeypatch.setattr(torch.cuda, "graph", Watched)
    assert Trial(Question(THREE_STEPS), askers["torch"]).graphs is not None
    assert collects == [False, False]
    assert gc.isenabled()


class OneBuffer(FlashAttentionBackend):
    """Every layer's output lies in one buffer; its metadata is known by another name, too."""

    def prepare_metadata(self, batch: Any) -> None:
        super().prepare_metadata(batch)
        self.latest = batch.attn_metadata

    def prepare_for_capture(self, batch: Any) -> None:
        super().prepare_for_capture(batch)
        self.latest = batch.attn_metadata

    def forward(self, q: Any, k: Any, v: Any, layer_id: int, batch: Any) -> Any:
        out = super().forward(q, k, v, layer_id, batch)
        if not hasattr(self, "buffer"):
            self.buffer = torch.empty(256, *out.shape[1:], dtype=out.dtype, device=out.device)
        return self.buffer[: len(out)].copy_(out)


def test_one_buffer_for_all_layers_and_a_second_name_are_no_faults(askers: dict[str, Asker]) -> None:
    trial = Trial(Question(THREE_STEPS), askers[ONE_BUFFER])
    assert trial.graphs is not None
    assert trial.graphs.replays
    assert graphs.check(trial) == []


class PlansNewLengths(FlashInferBackend):
    """Replays of the lengths that the last one had are not planned again: only their page ids differ."""

    planned: list[int] | None = None

    def prepare_for_replay(self, batch: Any) -> None:
        metadata = batch.attn_metadata
        lengths = metadata.seq_lens_cpu.tolist()
        if lengths == self.planned:
            self.captured.indices[: len(metadata.indices)].copy_(metadata.indices)
            return
        self.planned = lengths
        super().prepare_for_replay(batch)


@pytest.mark.parametrize("wanted", [(2, 5, 3), (1, 1, 1)])
def test_a_plan_of_the_same_lengths_is_as_good(askers: dict[str, Asker], wanted: tuple[int, ...]) -> None:
    """(1, 1, 1) are the lengths of the dummies, too: even the plan of the capture will do."""
    case = Case((decode(*wanted), decode(*wanted, first=3)), placement="scattered")
    trial = Trial(Question(case), askers[PLANS_NEW_LENGTHS])
    done = trial.graphs
    assert done is not None
    assert any(
        call.plan is not None and call.plan.at.batch != at.step for at in done.replays for call in at.calls
    ), "no replay went without a plan"
    assert graphs.check(trial) == []
