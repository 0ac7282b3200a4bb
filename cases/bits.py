"""A tensor's bits as integers, which every library indexes and compares, whatever the dtype (fp8 and bfloat16 too)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from_array: Callable[[np.ndarray], torch.Tensor] = getattr(torch, "from_numpy")  # noqa: B009 - it has no types
"""A tensor over the memory of a numpy array."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size."""
    return tensor.view(_WORDS[tensor.element_size()])


def host_bits(tensor: torch.Tensor) -> np.ndarray:
    """`bits` of a tensor on the CPU, as a numpy array over its memory, whose indexing costs half of torch's."""
    return tensor.view(_WORDS[tensor.element_size()]).numpy()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have one dtype, one shape and the same bits. A NaN equals the same NaN; torch compares
    integers faster than halves."""
    return a.dtype == b.dtype and torch.equal(bits(a), bits(b))
