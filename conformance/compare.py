"""A result against the oracle: type, shape, dtype, device, then every element."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cases.tensors import StepTensors
from conformance.machine import Machine

_ALL_DIGITS = 17
"""What any float64 takes."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """Elements that are wrong. `bad`: bool `[num_rows, num_qo_heads]`; the rest is about the worst element."""

    bad: np.ndarray
    row: int
    head: int
    got: float
    want: float
    error: float
    allowed: float


def tensor_fault(
    name: str, got: object, shape: tuple[int, ...], dtype: torch.dtype, machine: Machine
) -> str | None:
    """What is wrong with a returned object before its values count; None if nothing is."""
    if not isinstance(got, torch.Tensor):
        return f"{name} is {'None' if got is None else type(got).__name__}, must be a tensor"
    if got.layout is not torch.strided:
        return f"{name} is {_name(got.layout)}, must be dense"
    if tuple(got.shape) != shape:
        return f"{name} has shape {list(got.shape)}, must have {list(shape)}"
    if got.dtype != dtype:
        return f"{name} is {_name(got.dtype)}, must be {_name(dtype)}"
    place = machine.place_of(got)
    if place != machine.place:
        return f"{name} is on {place}, must be on {machine.place}"
    return None


def _name(what: torch.dtype | torch.layout) -> str:
    return str(what).removeprefix("torch.")


def elements(got: np.ndarray, want: np.ndarray, allowed: np.ndarray | float) -> Wrong | None:
    """Compare elementwise, `[num_rows, num_qo_heads]` or with a last dimension; equal infinities agree, NaN never."""
    with np.errstate(invalid="ignore"):
        error = np.abs(got - want)
        right = np.asarray(error <= allowed)
        if right.all():
            return None
        right = np.asarray(right | (got == want))
    if right.all():
        return None
    error = np.where(right, 0.0, np.where(np.isfinite(error), error, np.inf))
    worst = np.unravel_index(int(error.argmax()), error.shape)
    bad = ~right if right.ndim == 2 else np.asarray(~right.all(axis=-1))
    limit = np.broadcast_to(allowed, got.shape)[worst]
    return Wrong(
        bad,
        int(worst[0]),
        int(worst[1]),
        float(got[worst]),
        float(want[worst]),
        float(error[worst]),
        float(limit),
    )


def describe(wrong: Wrong, tensors: StepTensors, name: str) -> tuple[int, str]:
    """The request of the worst element, and a sentence that names every request and head that is wrong."""
    request = int(tensors.rows.request[wrong.row])
    position = int(tensors.rows.position[wrong.row])
    rows = np.flatnonzero(wrong.bad.any(axis=1))
    requests = sorted({int(r) for r in tensors.rows.request[rows]})
    heads = np.flatnonzero(wrong.bad.any(axis=0))
    error = "not finite" if not np.isfinite(wrong.got) else f"off by {wrong.error:.3g}"
    where = f"row {wrong.row} (request {request}, position {position}), head {wrong.head}"
    count = f"{len(rows)} of {wrong.bad.shape[0]} rows wrong"
    spread = f"requests {_ranges(requests)}, heads {_ranges([int(h) for h in heads])}"
    message = (
        f"{name} at {where} is {apart(wrong.got, wrong.want, 6)}: "
        f"{error}, allowed {wrong.allowed:.3g}; {count} ({spread})"
    )
    return request, message


def apart(got: float, want: float, digits: int) -> str:
    """Two numbers, "0.25, must be 0.5", with as many digits as it takes to tell the two apart."""
    texts = ((f"{got:.{n}g}", f"{want:.{n}g}") for n in range(digits, _ALL_DIGITS + 1))
    shown = next((both for both in texts if both[0] != both[1]), (f"{got:.{digits}g}", f"{want:.{digits}g}"))
    return ", must be ".join(shown)


def _ranges(numbers: list[int]) -> str:
    if len(numbers) <= 4:
        return ", ".join(map(str, numbers))
    return f"{numbers[0]}, {numbers[1]}, ... {numbers[-1]}"
