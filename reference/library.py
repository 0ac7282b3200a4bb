"""The array functions that the oracle is written in: numpy's on a CPU, torch's on any other device.

A numpy call costs a fraction of a torch call, and most batches are tiny. Both libraries agree on whatever is spelled
as an operator or a method (`@`, `reshape`, `swapaxes`, `sum`); what they spell differently is listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Library:
    """Functions on the arrays of one library and device.

    Args:
        device: where its arrays are.
        amax: amax(array, axis).
        maximum: maximum(a, b), NaN where either is.
        exp: exp(array, out=array).
        log: log(array).
        tanh: tanh(array).
        isfinite: isfinite(array).
        vecdot: vecdot(a, b), inner products along the last axis.
        array: an array in the memory of a tensor of this device.
        tensor: the inverse of `array`.
    """

    device: torch.device
    amax: Any
    maximum: Any
    exp: Any
    log: Any
    tanh: Any
    isfinite: Any
    vecdot: Any
    array: Any
    tensor: Any

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.zeros(shape, dtype=dtype, device=self.device)

    def arange(self, start: int, end: int) -> Any:
        return torch.arange(start, end, device=self.device)

    def from_host(self, array: Any) -> Any:
        """An array of this device that holds what a numpy array holds."""
        return torch.as_tensor(array, device=self.device)

    def fill(self, array: Any, value: float, where: Any) -> None:
        """Write `value` in place; `where` broadcasts."""
        array.masked_fill_(where, value)


class NumpyLibrary(Library):
    """On a CPU: the same in numpy."""

    __slots__ = ()

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return np.zeros(shape, np.float64 if dtype == torch.float64 else np.float32)

    def arange(self, start: int, end: int) -> Any:
        return np.arange(start, end)

    def from_host(self, array: Any) -> Any:
        return array

    def fill(self, array: Any, value: float, where: Any) -> None:
        np.copyto(array, value, where=where)


_from_array: Callable[[np.ndarray], torch.Tensor] = getattr(torch, "from_numpy")  # noqa: B009 - it has no types

FEW = 600
"""Numbers from which on torch's vector code for exp and tanh is faster than numpy's loop, its calls included."""


def _exp(array: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    if out is not array or array.size < FEW:
        return np.exp(array, out=out)
    _from_array(array).exp_()
    return array


def _tanh(array: np.ndarray) -> np.ndarray:
    return np.tanh(array) if array.size < FEW else _from_array(array).tanh().numpy()


NUMPY: Library = NumpyLibrary(
    device=torch.device("cpu"),
    amax=np.maximum.reduce,
    maximum=np.maximum,
    exp=_exp,
    log=np.log,
    tanh=_tanh,
    isfinite=np.isfinite,
    vecdot=np.vecdot,
    array=torch.Tensor.numpy,
    tensor=_from_array,
)


def library_of(device: torch.device) -> Library:
    """The library to compute with on a device."""
    return NUMPY if device.type == "cpu" else torch_on(device)


@cache
def torch_on(device: torch.device) -> Library:
    """Torch's functions on one device."""
    return Library(
        device=device,
        amax=torch.amax,
        maximum=torch.maximum,
        exp=torch.exp,
        log=torch.log,
        tanh=torch.tanh,
        isfinite=torch.isfinite,
        vecdot=torch.linalg.vecdot,  # pyright: ignore[reportUnknownMemberType]
        array=torch.as_tensor,
        tensor=torch.as_tensor,
    )
