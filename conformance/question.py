"""A case with its tensors and right answers, made once and shared by every backend that is asked it."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple

import torch

from cases.codec import digest
from cases.model import Case
from cases.tensors import CaseTensors, StepTensors, materialise
from reference import (
    AttentionState,
    Budget,
    error_budget,
    exact_tolerance,
    fast_tanh_error,
    low_precision,
    lse_budget,
    paged_attention,
    widest,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The oracle's answer to one layer of one step: out float64 `[num_rows, num_qo_heads, head_dim_vo]`, lse float64
    `[num_rows, num_qo_heads]` (natural), and how far a float64 result may differ from it."""

    state: AttentionState
    exact_tolerance: float


class Budgets(NamedTuple):
    """How far the output and the LSE of one layer may be from the answer."""

    out: Budget
    lse: Budget


LARGE = 1 << 17
"""Scores of one layer from which on a GPU answers it: below, starting its kernels takes longer than computing here."""
_gpu: torch.device | None = None


@contextmanager
def large_answers_on(device: torch.device) -> Generator[None]:
    """Compute the oracle's answers to large cases, and their budgets, on this device within the block.

    Budgets then allow what real kernels do for speed and fakes do not (`fast_tanh_error`).
    """
    global _gpu  # noqa: PLW0603 - like the device itself, one for the whole process
    before, _gpu = _gpu, device
    try:
        yield
    finally:
        _gpu = before


class Question:
    """One case and, on demand, its tensors and its answers. `values_of` lends q, k and v (see `checks.relations`)."""

    def __init__(self, case: Case, tensors: CaseTensors | None = None) -> None:
        self.case = case
        self._tensors = tensors
        self._answers: dict[tuple[int, int], Answer] = {}
        self._budgets: dict[tuple[int, int], Budgets] = {}

    @cached_property
    def tensors(self) -> CaseTensors:
        return materialise(self.case) if self._tensors is None else self._tensors

    @cached_property
    def digest(self) -> str:
        return digest(self.case)

    def answer(self, step: int, layer: int) -> Answer:
        """The oracle's answer for one layer of one step, on the host. All layers are computed at once, as heads of one
        attention, where they have one mask; those of a large step one by one, on the GPU if there is one."""
        if (step, layer) not in self._answers and _gpu is not None and self._is_large(step):
            self._answer_on(_gpu, step, layer)
        if (step, layer) not in self._answers:
            t = self.tensors.steps[step]
            one_mask = self.case.mask.window_layers is None
            layers = range(self.case.num_layers) if one_mask else range(layer, layer + 1)
            parts = (_side_by_side(x[layers.start : layers.stop]) for x in (t.q, t.k_all, t.v_all))
            state = paged_attention(*parts, **self._batch(t, layer))
            tolerance = exact_tolerance(state.max_score, state.max_v)
            count = len(layers)
            for index, out, lse in zip(
                layers, state.out.chunk(count, dim=1), state.lse.chunk(count, dim=1), strict=True
            ):
                self._answers[step, index] = Answer(state._replace(out=out, lse=lse), tolerance)
        return self._answers[step, layer]

    def _is_large(self, step: int) -> bool:
        t = self.tensors.steps[step].step
        pairs = sum(qo * kv for qo, kv in zip(t.qo_lens, t.kv_lens, strict=True))
        return pairs * self.case.heads.num_qo_heads >= LARGE

    def _answer_on(self, device: torch.device, step: int, layer: int) -> None:
        """Answer and budgets of one layer, computed on a device."""
        t, batch = self.tensors.steps[step], self._batch(self.tensors.steps[step], layer)
        q, k, v = (x[layer].to(device) for x in (t.q, t.k_all, t.v_all))
        state = paged_attention(q, k, v, **batch)
        budgets = self._budgets_of(step, state, _twins(q, k, v, batch))
        self._budgets[step, layer] = Budgets(*(_on_host(budget) for budget in budgets))
        state = state._replace(out=state.out.cpu(), lse=state.lse.cpu())
        self._answers[step, layer] = Answer(state, exact_tolerance(state.max_score, state.max_v))

    def _batch(self, t: StepTensors, layer: int) -> dict[str, Any]:
        """What the oracle and its twin are told beside q, k and v of a layer."""
        return {
            "slots": torch.arange(t.k_all.shape[1]),
            "qo_lens": t.step.qo_lens,
            "kv_lens": t.step.kv_lens,
            "mask": self.case.mask.of_layer(layer),
            "scale": self.case.scale,
            "custom": t.custom,
            "k_scale": self.case.k_scale,
            "v_scale": self.case.v_scale,
        }

    def budget(self, step: int, layer: int) -> Budget:
        """How far a result in the case's dtype may be from the answer: measured on the low-precision twin."""
        return self._budgets_at(step, layer).out

    def lse_budget(self, step: int, layer: int) -> Budget:
        """The same for a float32 LSE, in nats."""
        return self._budgets_at(step, layer).lse

    def _budgets_at(self, step: int, layer: int) -> Budgets:
        state = self.answer(step, layer).state
        if (step, layer) not in self._budgets:
            t = self.tensors.steps[step]
            twins = _twins(t.q[layer], t.k_all[layer], t.v_all[layer], self._batch(t, layer))
            self._budgets[step, layer] = self._budgets_of(step, state, twins)
        return self._budgets[step, layer]

    def _budgets_of(self, step: int, state: AttentionState, twins: Iterable[AttentionState]) -> Budgets:
        score, dtype = state.max_score, getattr(torch, self.case.dtype)
        num_keys = max(self.step(step).step.kv_lens, default=0)
        tanh = fast_tanh_error(self.case.mask.soft_cap, score) if _gpu is not None else 0.0
        found = [
            Budgets(
                error_budget(state, twin, dtype=dtype, max_score=score, max_v=state.max_v),
                lse_budget(state, twin, dtype=dtype, max_score=score, num_keys=num_keys),
            )
            for twin in twins
        ]
        out, lse = (reduce(widest, budgets) for budgets in zip(*found, strict=True))
        return Budgets(out.wider(2.0 * tanh * state.max_v), lse.wider(tanh))

    def step(self, step: int) -> StepTensors:
        return self.tensors.steps[step]


def _twins(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: dict[str, Any]
) -> Iterator[AttentionState]:
    """One computation in the case's own precision, and another where the scale is multiplied into q before: that rounds
    q once more, but by a power of two."""
    yield low_precision(q, k, v, dtype=q.dtype, **batch)
    if math.frexp(batch["scale"])[0] != 0.5:
        scaled = (q.float() * batch["scale"]).to(q.dtype)
        if scaled.isfinite().all():
            unscaled: dict[str, Any] = batch | {"scale": 1.0}
            yield low_precision(scaled, k, v, dtype=q.dtype, **unscaled)


def _on_host(budget: Budget) -> Budget:
    max_abs = budget.max_abs
    return budget._replace(max_abs=max_abs.cpu()) if isinstance(max_abs, torch.Tensor) else budget


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`[layers, n, heads, dim]` as `[n, layers * heads, dim]`."""
    return x.transpose(0, 1).flatten(1, 2)
