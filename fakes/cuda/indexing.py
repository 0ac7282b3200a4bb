"""Indexing across devices: an index may be on the CPU, a value assigned to a slice may be anywhere.

Source: torch/csrc/autograd/python_variable_indexing.cpp and
aten/src/ATen/native/TensorAdvancedIndexing.cpp, torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from types import EllipsisType
from typing import Any

import torch

from fakes.cuda.mixing import mixed, name_of
from fakes.cuda.places import is_device, put, tensors_in
from fakes.cuda.streams import Streams

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_BASIC = frozenset((int, slice, type(None), EllipsisType))


def _basic(index: Any) -> bool:
    """Whether an index makes a view."""
    if type(index) is tuple:
        return all(type(part) in _BASIC for part in index)
    return type(index) in _BASIC


def _check_index(indexed: Tensor, index: Any) -> None:
    """Indices of a CPU tensor are on the CPU, except 0-dim integers, which torch reads."""
    if is_device(indexed):
        return
    for part in tensors_in((index,)):
        if is_device(part) and (part.dim() > 0 or part.dtype in (torch.bool, torch.uint8)):
            raise RuntimeError(
                "indices should be either on cpu or on the same device as the indexed tensor (cpu)"
            )


def _wait(indexed: Tensor, index: Any) -> None:
    """Where an index makes the host wait: a mask's true elements are counted, what is on the host is copied."""
    streams = Streams.latest
    parts = tensors_in((index,))
    if is_device(indexed):
        if any(part.dtype in (torch.bool, torch.uint8) and is_device(part) for part in parts):
            streams.drain("indexing by a mask")
        elif _holds_list(index) or not all(map(is_device, parts)):
            streams.staged_copy("h2d", False, False)
    elif any(map(is_device, parts)):
        streams.drain("an index on the device")


def _check_value(name: str, indexed: Tensor, value: Any) -> None:
    """A value that is scattered is on the tensor's device, or a 0-dim CPU tensor."""
    if isinstance(value, Tensor):
        there = is_device(value)
        if there != is_device(indexed) and (there or value.dim() > 0):
            raise mixed(name)


def getitem(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    indexed, index = args
    if _basic(index):
        return func(indexed, index)
    _check_index(indexed, index)
    _wait(indexed, index)
    out = func(indexed, index)
    return put(out) if is_device(indexed) else out


def setitem(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> None:
    indexed, index, value = args
    if not _basic(index):
        _check_index(indexed, index)
        if isinstance(value, Tensor) or not tensors_in(
            (index,)
        ):  # a number is filled in where the mask is true
            _wait(indexed, index)
        if any(part.dim() > 0 for part in tensors_in((index,))) or _holds_list(index):
            _check_value("index_put_", indexed, value)
    if isinstance(value, Tensor) and is_device(value) != is_device(indexed):
        Streams.latest.staged_copy("h2d" if is_device(indexed) else "d2h", False, False)
    func(indexed, index, value)


def _holds_list(index: Any) -> bool:
    return any(isinstance(part, list) for part in (index if isinstance(index, tuple) else (index,)))


def index_put(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    """`index_put_(indices, values)`, in place or not."""
    given = dict(zip(("input", "indices", "values", "accumulate"), args, strict=False)) | kwargs
    indexed = given.get("input", given.get("self"))
    assert isinstance(indexed, Tensor)
    _check_index(indexed, given["indices"])
    _wait(indexed, given["indices"])
    _check_value(name_of(func), indexed, given["values"])
    out = func(*args, **kwargs)
    return put(out) if is_device(indexed) else out
