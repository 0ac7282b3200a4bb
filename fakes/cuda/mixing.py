"""Which functions may mix host and device operands, and the errors of those that may not.

The words are torch 2.13's. Source: aten/src/ATen/TensorIterator.cpp (`compute_types`) and c10/core/impl's
common device check.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fakes.cuda.places import is_device

Tensor = torch.Tensor

NO_CPU_SCALARS = frozenset(
    (
        *("cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "column_stack"),
        *(
            "index_select",
            "index_copy_",
            "index_copy",
            "index_add_",
            "index_add",
            "gather",
            "scatter",
            "scatter_",
        ),
        *(
            "scatter_add",
            "scatter_add_",
            "take",
            "embedding",
            "linear",
            "matmul",
            "mm",
            "bmm",
            "equal",
            "searchsorted",
        ),
    )
)
"""Functions whose check of devices makes no exception for 0-dim CPU tensors."""


def name_of(func: Callable[..., Any]) -> str:
    """A function's name as an engine author knows it."""
    return getattr(func, "__name__", None) or str(func)


def in_place(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__int__", "__index__", "__iter__")
    return name.endswith("_")


def mixed(name: str, other: str = "cpu") -> RuntimeError:
    return RuntimeError(
        "Expected all tensors to be on the same device, but found at least two devices, "
        f"cuda:0 and {other}! (when checking the arguments of {name})"
    )


def refuse_mixing(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], operands: Sequence[Tensor]
) -> None:
    """Raise unless operands, one of them on the device, may meet: all there, or 0-dim CPU tensors read."""
    name = name_of(func)
    for operand in operands:
        if is_device(operand):
            continue
        if operand.is_meta or operand.dim() > 0 or name in NO_CPU_SCALARS:
            raise mixed(name, str(operand.device))
        written = kwargs.get("out")
        if (in_place(name) and operand is args[0]) or (
            written is not None
            and any(operand is t for t in (written if isinstance(written, tuple) else (written,)))
        ):
            raise mixed(name)
