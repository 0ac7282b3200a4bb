"""A case with decode steps, run through captured graphs: captured once, every decode step replayed, the others eager.

One backend object lives through it. Beside the case's own pages and page-table rows there is one page and one row for
the dummies that pad a batch. Checks read the `GraphExecution` that is left behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, cast

import torch

from backends.contract import EngineContext, Req
from backends.registry import BackendSpec
from cases.model import Case
from cases.tensors import CaseTensors
from conformance.decode import shares
from conformance.engine import EngineRun, bring_back, fetched_pool, lasting
from conformance.execution import Execution, Failure, LayerRun, Mark, StepRun
from conformance.graphs import GraphRunner
from conformance.graphs_marks import CapturedCall, Marks
from conformance.graphs_memory import Buffers, Guards
from conformance.machine import Machine
from conformance.pool import Pool
from conformance.question import Question
from fakes import cuda
from fakes.recorder import Mode, resumed

DUMMY_UID = -1
_EAGER_EVERY = 4
"""By seed, one of so many decode steps runs eagerly between replays."""
_EXACT_BIT = 64
"""Of a seed: captured sizes are no powers of two."""
_SMALLER_BITS = 48
"""Of a seed, both: the largest decode batches have no graph."""
_LSE_BIT = 128
"""Of a seed: `forward_return_lse` is captured where there is one."""


@dataclass(slots=True)
class Replay:
    """One decode step that was replayed in the graph for `size` requests.

    `run` holds its results for the real rows, `padding` those of the dummies' rows, by layer. `calls`: what the
    captured kernels read. `movable`: captured calls of wrappers that were made for eager use, whose arrays stand
    elsewhere after a plan. `moved`: buffers that are no longer where the graph reads them. `overrun`: buffers around
    which something was written.
    """

    step: int
    size: int
    run: StepRun
    padding: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    calls: list[CapturedCall] = field(default_factory=list[CapturedCall])
    movable: list[str] = field(default_factory=list[str])
    moved: list[str] = field(default_factory=list[str])
    overrun: list[str] = field(default_factory=list[str])

    @property
    def how(self) -> str:
        """What findings call it."""
        return f"replayed for {self.size} request{'' if self.size == 1 else 's'}"


@dataclass(slots=True)
class GraphExecution:
    """What was captured and replayed. `broken` is the exception that ended it, `during` what was being done then.

    `steps` holds every step, `replays` those that were replayed; `room` and `pool` are the tensors and the pool that
    have a page for the dummies, `machine` what they stand on.
    """

    machine: Machine
    sizes: list[int]
    room: Room
    pool: Pool
    steps: Execution
    replays: list[Replay] = field(default_factory=list[Replay])
    broken: Failure | None = None
    during: str = ""
    altered: list[str] = field(default_factory=list[str])
    """What is not as it was before the captures: `bs_list`, torch's settings."""


class Room(CaseTensors):
    """A case's tensors with one more page and one more row of the page table: the dummies'."""

    def page_table(self, step: int) -> torch.Tensor:
        table = super().page_table(step)
        table[-1, 0] = self.dummy_slot
        return table

    @property
    def dummy_slot(self) -> int:
        """Slot of a dummy's only token: the first of the last page."""
        return (self.plan.num_pages - 1) * self.case.page_size


def with_room(tensors: CaseTensors) -> Room:
    """The same steps in a larger pool, whose last page and last row no request is ever given."""
    plan = replace(tensors.plan, num_pages=tensors.plan.num_pages + 1, num_rows=tensors.plan.num_rows + 1)
    return Room(tensors.case, plan, tensors.steps)


def replayed_steps(case: Case) -> list[int]:
    """The decode steps that are replayed; by seed, some run eagerly between them, or the largest do, as where an engine
    captures no graph for them."""
    decode = [index for index, step in enumerate(case.steps) if step.phase == "decode"]
    phase = case.seed // 4
    replayed = [s for i, s in enumerate(decode) if (phase + i) % _EAGER_EVERY != _EAGER_EVERY - 1]
    if case.seed & _SMALLER_BITS == _SMALLER_BITS:
        counts = {s: len(case.steps[s].requests) for s in replayed}
        return [s for s in replayed if counts[s] < max(counts.values())] or replayed
    return replayed


def captured_sizes(case: Case) -> list[int]:
    """Batch sizes to capture: powers of two that hold the replayed steps.

    By seed, they are no powers but the numbers of requests; each is larger than it need be or not, so that there is
    padding; one size serves all steps or each has its own.
    """
    counts = [len(case.steps[s].requests) for s in replayed_steps(case)]
    sizes = set(counts) if case.seed & _EXACT_BIT else {1 << (n - 1).bit_length() for n in counts}
    if not case.seed & 1:
        sizes = {n + 1 for n in sizes} if case.seed & _EXACT_BIT else {2 * n for n in sizes}
    return sorted(sizes) if case.seed & 2 else [max(sizes)]


class GraphRun(EngineRun):
    """A new backend object for a case; `replay_all` captures and runs every step."""

    def __init__(
        self,
        question: Question,
        spec: BackendSpec,
        machine: Machine,
        mode: Mode,
        sizes: Sequence[int] | None = None,
    ) -> None:
        self.room = with_room(question.tensors)
        self.sizes = captured_sizes(question.case) if sizes is None else list(sizes)
        super().__init__(Question(question.case, self.room), spec, machine, mode)

    def build(self, context: EngineContext) -> Any:
        self.context = replace(
            context, max_batch=context.max_batch - 1
        )  # the dummies' row is none of a batch's
        return super().build(self.context)

    def replay_all(self, *, nan: bool) -> GraphExecution:
        """Capture, then run all steps. A fault of the backend ends it and is kept."""
        with_lse = self.spec.capabilities.lse is not None and bool(self.question.case.seed & _LSE_BIT)
        steps = Execution(nan, self.recorder, 0, with_lse)
        found = GraphExecution(self.machine, self.sizes, self.room, self.pool, steps)
        if self.backend is None:
            found.broken, found.during = self._built.failure, "construction"
            return found
        self.marks = Marks(self.recorder)
        self.runner = GraphRunner(
            self.backend,  # type: ignore[arg-type]  # the registry made sure of its hooks
            self.context,
            self.sizes,
            Req(table_idx=self.room.plan.num_rows - 1, cached_len=0, device_len=1, uid=DUMMY_UID),
            self.room.dummy_slot,
            fused=self.question.case.strided,
            with_lse=with_lse,
            at=self.marks,
        )
        self.guards = Guards(self.machine)
        self._capture(found)
        replayed = set(replayed_steps(self.question.case))
        for index in range(len(self.question.case.steps)):
            if found.broken is not None:
                break
            self.marks.step = index
            if index in replayed:
                self._replay(found, index)
            else:
                self._step(steps, self.backend, index)
                found.broken, found.during = steps.failure, "an eager step between replays"
        return found

    def _capture(self, found: GraphExecution) -> None:
        with found.steps.catching(-1, -1), self.machine.running(), resumed(self.recorder):
            with self.guards:
                self.runner.make_buffers()
            self.runner.capture()
            self.buffers = Buffers(self.backend)
            for size in self.sizes:
                self.buffers.captured(size, self.runner.batches[size], self.marks.captured(size))
        found.altered = self.runner.altered + self.around.restored(self.machine)
        found.broken, found.during = found.steps.failure, self.marks.doing

    def _replay(self, found: GraphExecution, index: int) -> None:
        tensors, runner, steps = self.room.steps[index], self.runner, found.steps
        run = StepRun()
        steps.steps.append(run)
        self.pool.fill(index, nan=steps.nan)
        self.machine.alias(self.table).copy_(self.room.page_table(index))
        batch = self._batch(tensors)
        count = len(batch.reqs)
        inputs, given = runner.inputs, self._stacked(tensors)
        buffers = inputs.q, inputs.k, inputs.v
        self.recorder.lasting = lasting(self.pool, *buffers)
        answers: list[Any] = []
        self.marks.doing, self.recorder.at = "prepare_metadata", Mark(index, -1)
        with steps.catching(index, -1), self.machine.running(), resumed(self.recorder):
            runner.pad(batch)
            self.backend.prepare_metadata(batch)  # type: ignore[union-attr]
            answers = runner.replay(batch, *given)
            self.machine.settle()
        left = self.around.restored(self.machine)
        if steps.failure is not None:
            found.broken, found.during = steps.failure, self.marks.doing
            return
        size = len(batch.padded_reqs)
        replay = Replay(index, size, run)
        q, k, v = buffers
        for layer, answer in enumerate(answers):
            handed = LayerRun(q[layer, :size], k[layer, :size], v[layer, :size])
            self._receive(steps, handed, _rows_of(answer, size, slice(count)))
            run.layers.append(handed)
            padding = _first(_rows_of(answer, size, slice(count, None)))
            if _has_rows(padding, size - count):
                replay.padding.append(self.machine.fetch(padding).detach().clone())
        bring_back(steps, self.machine, index)
        run.changed = self._changed(index, batch, tuple(x[:, :count] for x in buffers))
        run.changed += self._changed_batch(
            index, replace(batch, positions=inputs.positions, out_loc=inputs.out_loc)
        )
        run.changed += left
        run.pool = fetched_pool(self.pool, self.machine)
        replay.calls = self.marks.carried_out(size, self._layer_of)
        eager = self.marks.eager_wrappers()
        replay.movable = [c.name for c in self.marks.captured(size) if c.owner in eager]
        replay.moved = self.buffers.moved(size)
        replay.overrun = self.guards.broken()
        found.replays.append(replay)

    def _layer_of(self, k: torch.Tensor) -> int:
        """The layer whose cache a tensor of keys begins in, with some of its heads perhaps; -1: none."""
        layers = [self.pool.k_cache(i) for i in range(self.question.case.num_layers)]
        begins = [(c.data_ptr(), i) for i, c in enumerate(layers) if shares(k, c)]
        return max((pair for pair in begins if pair[0] <= k.data_ptr()), default=(0, -1))[1]


def _rows_of(answer: object, size: int, rows: slice) -> object:
    """Some rows of what a captured call returned, a tensor or a tuple; what has not `size` of them stays as it is."""
    if isinstance(answer, tuple):
        return tuple(_rows_of(part, size, rows) for part in cast("tuple[object, ...]", answer))
    return answer[rows] if _has_rows(answer, size) else answer


def _first(answer: object) -> object:
    """The output, where there may be an LSE beside it."""
    return next(iter(cast("tuple[object, ...]", answer)), None) if isinstance(answer, tuple) else answer


def _has_rows(answer: object, size: int) -> TypeGuard[torch.Tensor]:
    return isinstance(answer, torch.Tensor) and answer.dim() > 0 and answer.shape[0] == size


def graph_execution(
    question: Question, spec: BackendSpec, machine: Machine, mode: Mode
) -> GraphExecution | None:
    """A case through graphs, on a backend object of its own.

    `machine` is where the backend runs otherwise. None: no step is to be replayed, the backend declares no graphs, or
    no device is there that has them.
    """
    if question.case.level != "engine" or not spec.capabilities.cuda_graph:
        return None
    graphs_on = _graph_machine(machine)
    if graphs_on is None or not replayed_steps(question.case):
        return None
    nan = not spec.capabilities.reads_unowned_slots
    return GraphRun(question, spec, graphs_on, mode).replay_all(nan=nan)


def _graph_machine(machine: Machine) -> Machine | None:
    """A real GPU, or the full simulated device, also for backends that otherwise run on the plain CPU."""
    if machine.real:
        return machine
    simulation = cuda.current()
    return Machine(simulation) if simulation is not None and simulation.kind == "full" else None
