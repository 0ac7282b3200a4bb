"""What one execution of a case on a backend left behind. Checks read this and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from backends.contract import Refused
from cases.bits import same_bits
from conformance.question import Answer
from conformance.whereabouts import whereabouts
from fakes.recorder import Call, Recorder


class Mark(NamedTuple):
    """Where a library call was made. `batch` counts steps over all executions of one backend object (-1: while it was
    built); layer -1: while metadata was prepared."""

    batch: int
    layer: int


@dataclass(slots=True)
class LayerRun:
    """One layer: what was handed over (`q`, `k`, `v`), and what came back.

    `out` is whatever the backend returned, `values` a host copy made at once, `exact` the unrounded float64 values
    behind it where the recorder has them; the same for `lse`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: object = None
    values: torch.Tensor | None = None
    exact: np.ndarray | None = None
    lse: object = None
    lse_values: torch.Tensor | None = None
    exact_lse: np.ndarray | None = None


@dataclass(slots=True)
class StepRun:
    """One step. Of a first execution, `changed` names inputs that were altered and `pool` holds K and V afterwards
    (None if it broke off)."""

    layers: list[LayerRun] = field(default_factory=list[LayerRun])
    changed: list[str] = field(default_factory=list[str])
    pool: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(slots=True)
class Failure:
    """An exception that left the backend: its class, its text in one line, and where (`conformance.whereabouts`).

    Not the exception itself: its traceback holds every frame that it left, and so the backend.
    """

    kind: str
    text: str
    place: str
    step: int
    layer: int
    refused: bool

    @classmethod
    def of(cls, error: BaseException, step: int, layer: int) -> Failure:
        try:
            said = str(error)
        except Exception:  # noqa: BLE001 - whatever a foreign class does when it is asked
            said = "(it cannot be put in words)"
        text = " ".join(line.strip() for line in said.splitlines() if line.strip())
        return cls(type(error).__name__, text, whereabouts(error), step, layer, isinstance(error, Refused))

    def __str__(self) -> str:
        said = f"{self.kind}: {self.text}"
        return f"{said.rstrip()} ({self.place})" if self.place else said


@dataclass(slots=True)
class Execution:
    """One run over all steps of a case. `nan`: unowned slots held NaN (else large finite values). `first_batch`: the
    mark of its first step; the recorder is shared by all executions of one backend object. `with_lse`: whether
    `forward_return_lse` was called where there is one."""

    nan: bool
    recorder: Recorder
    first_batch: int
    with_lse: bool = True
    steps: list[StepRun] = field(default_factory=list[StepRun])
    failure: Failure | None = None
    answers: dict[tuple[int, int], Answer] = field(default_factory=dict[tuple[int, int], Answer])
    """Answers by (step, layer) that differ from the question's own, for adapters that merge given states."""

    def catching(self, step: int, layer: int) -> _Catching:
        """Only backend code runs inside: whatever it throws is its verdict, and ends the execution."""
        return _Catching(self, step, layer)

    @property
    def is_first(self) -> bool:
        """Whether this is the backend object's first execution: the one that is looked at closely."""
        return self.first_batch == 0

    def calls(self, step: int) -> list[Call]:
        """Library calls of one step, in order."""
        return [c for c in self.recorder.calls if c.at.batch == self.first_batch + step]


class _Catching:
    """A class, not a generator: it is entered for every call of every case."""

    __slots__ = ("_execution", "_layer", "_step")

    def __init__(self, execution: Execution, step: int, layer: int) -> None:
        self._execution, self._step, self._layer = execution, step, layer

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt):
            return False
        self._execution.failure = Failure.of(error, self._step, self._layer)
        _forget_frames(error)
        return True


def _forget_frames(error: BaseException) -> None:
    """A frame that holds its own exception, and with it the backend, would live until cycles are collected."""
    left: list[BaseException | None] = [error]
    seen: set[int] = set()
    while left:
        one = left.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            left += [one.__cause__, one.__context__]


def differing_layers(a: Execution, b: Execution) -> list[tuple[int, int, int]]:
    """(step, layer, first row) wherever two executions of the same case gave different bits (any NaN equals any).

    A result of another shape or dtype, or none, differs from row 0 on.
    """
    found: list[tuple[int, int, int]] = []
    for step, (run_a, run_b) in enumerate(zip(a.steps, b.steps, strict=False)):
        for layer, (x, y) in enumerate(zip(run_a.layers, run_b.layers, strict=False)):
            if x.values is None or y.values is None:
                if x.values is not y.values:
                    found.append((step, layer, 0))
                continue
            if x.values.shape != y.values.shape or x.values.dtype != y.values.dtype:
                found.append((step, layer, 0))
                continue
            if same_bits(x.values, y.values):
                continue
            same = (x.values == y.values) | (x.values.isnan() & y.values.isnan())
            if not same.all():
                found.append((step, layer, int((~same).flatten(1).any(1).nonzero()[0])))
    return found
