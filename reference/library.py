"""The array functions that the oracle is written in: numpy's for tensors on a CPU, torch's for any other device.

A numpy call costs a fraction of a torch call, and most batches are tiny. Both libraries agree on everything that is
spelled as an operator or a method (`@`, `reshape`, `swapaxes`, `sum`); the few names that differ are listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class Library:
    """Functions on arrays of one library and device. Arrays are `Any`: numpy arrays or tensors."""

    name: str
    arange: Any
    zeros: Any
    """zeros(shape, dtype), with torch's dtypes."""
    amax: Any
    """amax(array, axis)"""
    maximum: Any
    exp: Any
    log: Any
    tanh: Any
    isfinite: Any
    vecdot: Any
    """vecdot(a, b): inner products along the last axis."""
    array: Any
    """A tensor of this library's device as an array, in the same memory."""
    tensor: Any
    """The inverse of `array`."""
    from_host: Any
    """A numpy array as an array of this library's device."""
    fill: Any
    """fill(array, value, where) in place; `where` broadcasts."""


def library_of(device: torch.device) -> Library:
    """The library to compute with on a device."""
    return NUMPY if device.type == "cpu" else torch_on(device)


def _numpy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    return np.zeros(shape, np.float64 if dtype == torch.float64 else np.float32)


def _numpy_fill(array: np.ndarray, value: float, where: np.ndarray) -> None:
    np.copyto(array, value, where=where)


def _torch_fill(array: torch.Tensor, value: float, where: torch.Tensor) -> None:
    array.masked_fill_(where, value)


NUMPY = Library(
    name="numpy",
    arange=np.arange,
    zeros=_numpy_zeros,
    amax=np.maximum.reduce,
    maximum=np.maximum,
    exp=np.exp,
    log=np.log,
    tanh=np.tanh,
    isfinite=np.isfinite,
    vecdot=np.vecdot,
    array=torch.Tensor.numpy,
    tensor=torch.from_numpy,
    from_host=lambda array: array,
    fill=_numpy_fill,
)


@cache
def torch_on(device: torch.device) -> Library:
    """torch's functions for one device."""
    return Library(
        name="torch",
        arange=partial(torch.arange, device=device),
        zeros=lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device),
        amax=torch.amax,
        maximum=torch.maximum,
        exp=torch.exp,
        log=torch.log,
        tanh=torch.tanh,
        isfinite=torch.isfinite,
        vecdot=torch.linalg.vecdot,
        array=lambda tensor: tensor,
        tensor=torch.as_tensor,
        from_host=lambda array: torch.from_numpy(array).to(device),
        fill=_torch_fill,
    )
