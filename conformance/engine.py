"""The small engine: builds batches and calls a backend in the order that a serving engine does.

One `EngineRun` is one backend object with one pool and one page table. Every step refills the pool: stored tokens
where they belong, poison everywhere else, so that each step is judged by itself and nothing wrong carries over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import numpy as np
import torch

from backends.contract import Backend, Batch, EngineContext, Req
from backends.registry import BackendSpec
from cases.bits import from_array, same_bits
from cases.model import Case, Request
from cases.tensors import CaseTensors, StepTensors
from conformance.execution import Execution, Failure, LayerRun, Mark, StepRun
from conformance.machine import Machine
from conformance.pool import Pool
from conformance.question import Question
from conformance.surroundings import Surroundings
from fakes import cuda
from fakes.recorder import Mode, Recorder, resumed, storage_of


def engine_context(
    tensors: CaseTensors, pool: Pool, table: torch.Tensor, device: torch.device
) -> EngineContext:
    """What a backend is told about the engine of a case."""
    case = tensors.case
    return EngineContext(
        num_qo_heads=case.heads.num_qo_heads,
        num_kv_heads=case.heads.num_kv_heads,
        head_dim_qk=case.heads.head_dim_qk,
        head_dim_vo=case.heads.head_dim_vo,
        num_layers=case.num_layers,
        page_size=case.page_size,
        num_pages=tensors.plan.num_pages,
        layout=case.layout,
        dtype=getattr(torch, case.dtype),
        kv_dtype=getattr(torch, case.cache_dtype),
        device=device,
        scale=case.scale,
        windows=tuple(case.mask.of_layer(i).window for i in range(case.num_layers)),
        soft_cap=case.mask.soft_cap,
        max_seq_len=case.table_width,
        max_batch=tensors.plan.num_rows - 1,
        kv_pool=pool,
        page_table=table,
    )


class EngineRun:
    """One engine-level backend on one case, executed as often as asked, on the same backend object."""

    def __init__(self, question: Question, spec: BackendSpec, machine: Machine, mode: Mode) -> None:
        self.question = question
        self.spec = spec
        self.machine = machine
        self.recorder = Recorder(mode=mode)
        self.tensors = question.tensors
        self.backend: Backend | None = None
        self._executions = 0
        self.pool = Pool(self.tensors, self.recorder, machine)
        self.table = machine.adopt(self.tensors.page_table(0).clone())
        context = engine_context(self.tensors, self.pool, self.table, machine.device)
        machine.drain()  # what an earlier backend left in flight
        self._built = Execution(nan=True, recorder=self.recorder, first_batch=0)
        self.around = Surroundings.of(machine)
        with self._built.catching(-1, -1):
            self.backend = self.build(context)
        self._left = self.around.restored(machine)
        if self.backend is None and self._built.failure is None:
            text = "the class made None, not a backend"
            self._built.failure = Failure("TypeError", text, "", step=-1, layer=-1, refused=False)

    def execute(self, *, nan: bool, with_lse: bool = True) -> Execution:
        """Run all steps of the case. A fault of the backend ends the execution and is kept in it.

        `with_lse` False calls `forward` where the backend also has `forward_return_lse`.
        """
        steps = len(self.question.case.steps)
        execution = Execution(nan, self.recorder, self._executions * steps, with_lse)
        self._executions += 1
        self.recorder.muted = not execution.is_first
        if self.backend is None:
            execution.failure = self._built.failure
            return execution
        for index in range(steps):
            self._step(execution, self.backend, index)
            if execution.failure:
                break
        with resumed(self.recorder):  # copies are looked at once more when they are done
            self.machine.drain()
        return execution

    def _step(self, execution: Execution, backend: Backend, index: int) -> None:
        tensors = self.tensors.steps[index]
        with_lse = execution.with_lse and self.spec.capabilities.lse is not None
        run = StepRun()
        execution.steps.append(run)
        self.pool.fill(index, nan=execution.nan)
        self.machine.alias(self.table).copy_(self.tensors.page_table(index))
        batch = self._batch(tensors)
        stacked = self._stacked(tensors)
        self.recorder.lasting = lasting(self.pool, *stacked)
        given = [LayerRun(*layer) for layer in zip(*(x.unbind(0) for x in stacked), strict=True)]
        mark = Mark(execution.first_batch + index, -1)
        with execution.catching(index, -1):
            self.prepare(backend, batch, mark)
        for layer, handed in enumerate(given):
            answer: object = None
            if execution.failure is None:
                with execution.catching(index, layer):
                    answer = self.forward(backend, batch, handed, mark._replace(layer=layer), with_lse)
            if execution.failure:
                break
            self._receive(execution, handed, answer)
            run.layers.append(handed)
        left, self._left = self._left + self.around.restored(self.machine), []
        bring_back(execution, self.machine, index)
        if execution.is_first and execution.failure is None:
            run.changed = self._changed(index, batch, stacked) + left
            run.pool = fetched_pool(self.pool, self.machine)

    def build(self, context: EngineContext) -> Any:
        """Make the backend object."""
        self.recorder.at = Mark(-1, -1)
        with self.machine.running(), resumed(self.recorder):
            return self.spec.factory(context)

    def prepare(self, backend: Any, batch: Batch, mark: Mark) -> None:
        """Have the backend prepare a batch."""
        self.recorder.at = mark
        with self.machine.running(), resumed(self.recorder):
            backend.prepare_metadata(batch)

    def forward(self, backend: Any, batch: Batch, handed: LayerRun, mark: Mark, with_lse: bool) -> object:
        """Have the backend compute one layer; whatever it returns."""
        call = backend.forward_return_lse if with_lse else backend.forward
        self.recorder.at = mark
        with self.machine.running(), resumed(self.recorder):
            return call(handed.q, handed.k, handed.v, mark.layer, batch)

    def _receive(self, execution: Execution, handed: LayerRun, answer: object) -> None:
        if execution.with_lse and self.spec.capabilities.lse is not None and isinstance(answer, tuple):
            parts: tuple[object, ...] = answer  # pyright: ignore[reportUnknownVariableType]
            handed.out, handed.lse = (*parts, None, None)[:2]
        else:
            handed.out = answer
        receive(execution, handed)

    def _batch(self, tensors: StepTensors) -> Batch:
        requests = [r for r in tensors.step.requests if isinstance(r, Request)]
        reqs = [
            Req(table_idx=row, cached_len=r.cached_len, device_len=r.kv_len, uid=r.uid)
            for row, r in zip(tensors.placed.rows, requests, strict=True)
        ]
        return Batch(
            reqs=reqs,
            padded_reqs=list(reqs),
            phase=tensors.step.phase,
            kind=tensors.step.kind,
            positions=self.machine.adopt(from_array(tensors.rows.position.astype(np.int32))),
            out_loc=self.machine.adopt(tensors.out_loc.clone()),
        )

    def _stacked(self, tensors: StepTensors) -> tuple[torch.Tensor, ...]:
        """q, k, v of all layers, as fresh tensors (fused and sliced where the case says so)."""
        parts = new_tokens(self.question.case, tensors)
        adopt = self.machine.adopt
        return fused(adopt, *parts) if self.question.case.strided else tuple(adopt(x.clone()) for x in parts)

    def _changed(self, index: int, batch: Batch, stacked: tuple[torch.Tensor, ...]) -> list[str]:
        tensors, fetch = self.tensors.steps[index], self.machine.fetch
        changed: list[str] = []
        for name, given, then in zip("qkv", stacked, new_tokens(self.question.case, tensors), strict=True):
            now = fetch(given)
            if not same_bits(now, then):
                layers = [i for i, (x, y) in enumerate(zip(now, then, strict=True)) if not same_bits(x, y)]
                changed += [f"{name} of layer {layer}" for layer in layers]
        if not torch.equal(fetch(self.table), self.tensors.page_table(index)):
            changed.append("page_table")
        return changed + self._changed_batch(index, batch)

    def _changed_batch(self, index: int, batch: Batch) -> list[str]:
        """What of a batch is not as it was made; rows that pad it are not looked at."""
        tensors, fetch = self.tensors.steps[index], self.machine.fetch
        changed: list[str] = []
        count = tensors.step.num_rows
        if not torch.equal(fetch(batch.out_loc)[:count], tensors.out_loc):
            changed.append("out_loc")
        if not np.array_equal(fetch(batch.positions)[:count].numpy(), tensors.rows.position):
            changed.append("positions")
        asked = zip(tensors.placed.rows, tensors.step.requests, strict=True)
        wanted = [(row, r.stored_len, r.kv_len, r.uid) for row, r in asked]
        told = {"reqs": _told(batch.reqs), "padded_reqs": _told(batch.padded_reqs)[: len(wanted)]}
        return changed + [name for name, requests in told.items() if requests != wanted]


def _told(reqs: Any) -> list[tuple[int, ...]]:
    """What requests say of themselves; empty where a backend has put something else in their place."""
    try:
        return [(r.table_idx, r.cached_len, r.device_len, r.uid) for r in reqs]
    except (AttributeError, TypeError):
        return []


def new_tokens(case: Case, tensors: StepTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, and the k and v that an engine computes in this step, in the case's dtype; not to be written to."""
    k, v = tensors.new_kv
    if case.stored_as_fp8:
        dtype = tensors.q.dtype
        k, v = (k.float() * case.k_scale).to(dtype), (v.float() * case.v_scale).to(dtype)
    return tensors.q, k, v


def fused(adopt: Callable[[torch.Tensor], torch.Tensor], *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts, adopted, as slices of one tensor, the way a fused projection leaves them."""
    fused = adopt(torch.cat([p.flatten(2) for p in parts], dim=2))
    pieces: list[torch.Tensor] = list(fused.split_with_sizes([p.shape[2] * p.shape[3] for p in parts], dim=2))
    return tuple(piece.view(*piece.shape[:2], *p.shape[2:]) for piece, p in zip(pieces, parts, strict=True))


def lasting(pool: Pool, *tensors: torch.Tensor) -> frozenset[int]:
    """Storages that the harness itself keeps while a step is judged."""
    return frozenset(map(storage_of, (pool.k, pool.v, *tensors)))


def receive(execution: Execution, handed: LayerRun) -> None:
    """Copy what came back before the next layer can overwrite it; of the first execution with its unrounded values."""
    recorder = execution.recorder
    if _has_values(handed.out):
        handed.exact = recorder.exact_of(handed.out) if execution.is_first else None
        handed.values = cuda.host(handed.out).detach().clone()
    if _has_values(handed.lse):
        handed.exact_lse = recorder.exact_of(handed.lse)
        handed.lse_values = cuda.host(handed.lse).detach().clone()


def bring_back(execution: Execution, machine: Machine, step: int) -> None:
    """Fetch what a step returned from a GPU. A fault that shows only now is the backend's, in the last layer run.

    The layers of a step run without waiting for each other, as they do in an engine.
    """
    if not machine.real:
        return
    run, earlier = execution.steps[-1], execution.failure
    with execution.catching(step, len(run.layers) - 1):
        machine.settle()
        for handed in run.layers:
            handed.values = None if handed.values is None else machine.fetch(handed.values)
            handed.lse_values = None if handed.lse_values is None else machine.fetch(handed.lse_values)
    if execution.failure is not earlier:  # the context is lost, and the results with it
        run.layers.clear()
        execution.failure = earlier or execution.failure


def fetched_pool(pool: Pool, machine: Machine) -> tuple[torch.Tensor, torch.Tensor]:
    """What K and V hold now, as host tensors of their own."""
    if machine.real:
        return machine.fetch(pool.k), machine.fetch(pool.v)
    return pool.k.clone(), pool.v.clone()


def _has_values(answer: object) -> TypeGuard[torch.Tensor]:
    """Not so for a tensor on the meta device or a sparse one; the checks say what it is."""
    return isinstance(answer, torch.Tensor) and not answer.is_meta and answer.layout == torch.strided
