"""Where a tensor lives, in the light device: a tag on the Python object of its storage.

All views share the storage object, and torch keeps that one object for as long as the storage lives,
whoever holds it (measured on torch 2.13; `test_places.py` holds torch to it). So views, `detach`, `.data`
and parameters keep the tag by themselves, and memory that is reused comes with a new object and no tag.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import EllipsisType
from typing import Any

import torch

from fakes.cuda.interface import NotSimulated

TAG = "simulated_place"
DEVICE = "cuda"
PINNED = "pinned"

ON_DEVICE, ON_HOST, UNKNOWN = 1, 2, 4
"""Bits of `sides_of`."""

Tensor = torch.Tensor
_Parameter = torch.nn.Parameter
_PLAIN = frozenset(
    (
        *(int, float, bool, complex, str, type(None), slice, EllipsisType),
        *(torch.dtype, torch.Size, torch.memory_format, torch.layout),
    )
)
"""Types of arguments that hold no tensor."""


def place_of(tensor: Tensor) -> str | None:
    """DEVICE, PINNED, or None for ordinary host memory. Tensors without a storage (sparse) are there.

    Raises:
        NotSimulated: It is a device tensor inside a torch.func transform, whose results cannot be tagged.
    """
    try:
        return getattr(tensor.untyped_storage(), TAG, None)
    except (NotImplementedError, RuntimeError):
        functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
        if functorch.is_functorch_wrapped_tensor(tensor) and is_device(functorch.get_unwrapped(tensor)):
            raise NotSimulated(
                "the light simulated CUDA device cannot see through torch.func transforms (vmap, grad)"
            ) from None
        return None


def is_device(tensor: Tensor) -> bool:
    return place_of(tensor) is DEVICE


def put(tensor: Tensor, place: str = DEVICE) -> Tensor:
    """Tag the storage of a tensor.

    Raises:
        NotSimulated: It has none (sparse layouts).
    """
    try:
        setattr(tensor.untyped_storage(), TAG, place)
    except (NotImplementedError, RuntimeError) as error:
        raise NotSimulated(
            f"the light simulated CUDA device holds strided tensors only, not one with layout {tensor.layout}"
        ) from error
    return tensor


def put_all(result: Any) -> None:
    """Tag every tensor in the result of a device operation (tuples, lists and dicts, nested)."""
    if type(result) is Tensor or isinstance(result, Tensor):
        put(result)
    elif isinstance(result, (tuple, list)):
        for item in result:
            put_all(item)
    elif isinstance(result, dict):
        for item in result.values():
            put_all(item)


def put_new(result: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
    """Tag the tensors in a function's result, except those that live in the storage of an argument."""
    given: list[Tensor] | None = None
    for tensor in (result,) if isinstance(result, Tensor) else tensors_in((result,)):
        if not is_device(tensor):
            if given is None:
                given = tensors_in(args) + tensors_in(kwargs.values())
            if not same_storage(tensor, given):
                put(tensor)


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among arguments, in order, those in nested tuples, lists and dicts too."""
    found: list[Tensor] = []
    for value in values:
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_in(value)
        elif isinstance(value, dict):
            found += tensors_in(value.values())
    return found


def sides_of(values: Iterable[Any]) -> int:
    """Where the tensors among arguments live: bits ON_DEVICE, ON_HOST, and UNKNOWN for the unusual."""
    sides = 0
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is _Parameter:
            try:
                sides |= ON_DEVICE if getattr(value.untyped_storage(), TAG, None) is DEVICE else ON_HOST
            except (NotImplementedError, RuntimeError):
                return UNKNOWN
        elif kind in _PLAIN:
            continue
        elif kind is list or kind is tuple:
            sides |= sides_of(value)
        else:
            sides |= UNKNOWN
    return sides


def same_storage(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    """Whether a tensor lives in the storage of one of the others."""
    storage = tensor.untyped_storage()
    return any(other.untyped_storage() is storage for other in others)
