"""A case with its tensors and right answers, made once and shared by every backend that is asked it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from cases.codec import digest
from cases.model import Case
from cases.tensors import CaseTensors, StepTensors, materialise
from reference import (
    AttentionState,
    Budget,
    error_budget,
    exact_tolerance,
    least_budget,
    low_precision,
    paged_attention,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """The oracle's answer to one layer of one step: out float64 `[num_rows, num_qo_heads, head_dim_vo]`, lse float64
    `[num_rows, num_qo_heads]` (natural), and how far a float64 result may differ from it."""

    state: AttentionState
    exact_tolerance: float


class Question:
    """One case and, on demand, its tensors and its answers. `values_of` lends q, k and v (see `checks.relations`)."""

    def __init__(self, case: Case, tensors: CaseTensors | None = None) -> None:
        self.case = case
        self._tensors = tensors
        self._answers: dict[tuple[int, int], Answer] = {}
        self._budgets: dict[tuple[int, int], Budget] = {}

    @cached_property
    def tensors(self) -> CaseTensors:
        return materialise(self.case) if self._tensors is None else self._tensors

    @cached_property
    def digest(self) -> str:
        return digest(self.case)

    def answer(self, step: int, layer: int) -> Answer:
        """The oracle's answer for one layer of one step. All layers are computed at once, as heads of one attention."""
        if (step, layer) not in self._answers:
            t, layers = self.tensors.steps[step], self.case.num_layers
            state = paged_attention(
                _side_by_side(t.q), _side_by_side(t.k_all), _side_by_side(t.v_all), **self._batch(t)
            )
            tolerance = exact_tolerance(state.max_score, state.max_v)
            parts = zip(state.out.chunk(layers, dim=1), state.lse.chunk(layers, dim=1), strict=True)
            for index, (out, lse) in enumerate(parts):
                self._answers[step, index] = Answer(state._replace(out=out, lse=lse), tolerance)
        return self._answers[step, layer]

    def _batch(self, t: StepTensors) -> dict[str, Any]:
        """What the oracle and its twin are told beside q, k and v."""
        return {
            "slots": torch.arange(t.k_all.shape[1]),
            "qo_lens": t.step.qo_lens,
            "kv_lens": t.step.kv_lens,
            "mask": self.case.mask,
            "scale": self.case.scale,
            "custom": t.custom,
            "k_scale": self.case.k_scale,
            "v_scale": self.case.v_scale,
        }

    def least_budget(self, step: int, layer: int) -> Budget:
        """What `budget` allows at least; costs no twin."""
        state = self.answer(step, layer).state
        dtype = getattr(torch, self.case.dtype)
        return least_budget(state, dtype=dtype, max_score=state.max_score, max_v=state.max_v)

    def budget(self, step: int, layer: int) -> Budget:
        """How far a result in the case's dtype may be from the answer: measured on the low-precision twin."""
        key = (step, layer)
        if key not in self._budgets:
            t = self.tensors.steps[step]
            dtype = getattr(torch, self.case.dtype)
            twin = low_precision(t.q[layer], t.k_all[layer], t.v_all[layer], dtype=dtype, **self._batch(t))
            state = self.answer(step, layer).state
            self._budgets[key] = error_budget(
                state, twin, dtype=dtype, max_score=state.max_score, max_v=state.max_v
            )
        return self._budgets[key]

    def step(self, step: int) -> StepTensors:
        return self.tensors.steps[step]


def _side_by_side(x: torch.Tensor) -> torch.Tensor:
    """`[layers, n, heads, dim]` as `[n, layers * heads, dim]`."""
    return x.transpose(0, 1).flatten(1, 2)
