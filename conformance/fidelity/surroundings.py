"""Where the tensors of a call lie, and what lies around them.

A read of memory that no argument describes shows when the same call is made twice with other surroundings: every
array, pool and workspace is a view into a larger buffer that a pattern fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Pattern = Literal["low", "high"]

PATTERNS: tuple[Pattern, Pattern] = ("low", "high")

INDEX_GUARD = 1 << 16
"""Bytes before and behind an index array."""

POOL_GUARD = 16 << 20
"""Bytes before and behind tensors of numbers: what a page id next to the pool, or a token location, reaches."""

_ALIGNMENT = 256
_RUNNING_SUMS = ("indptr", "cu_seqlens")
_HEAP_SIZES = (8, 16, 24, 40, 64, 96, 128)


@dataclass(slots=True)
class Plain:
    """Tensors as they are, on one device; a strided one is every second element of an array of its own."""

    device: torch.device | str

    def put(self, name: str, tensor: torch.Tensor, *, on_host: bool, strided: bool) -> torch.Tensor:  # noqa: ARG002
        """A tensor where the library reads it; its name says what could follow an array in memory."""
        placed = tensor if on_host else tensor.to(self.device)
        return _every_second(placed) if strided else placed

    def workspace(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=self.device)


@dataclass(slots=True)
class Guarded:
    """Tensors inside buffers that one of two patterns fills: "low" makes the shortest, "high" longer reads.

    Integers around an array are 0, or what could follow in it; numbers around a tensor are 0.5 or -2.
    """

    device: torch.device | str
    pattern: Pattern
    _kept: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def put(self, name: str, tensor: torch.Tensor, *, on_host: bool, strided: bool) -> torch.Tensor:
        device = torch.device("cpu") if on_host else torch.device(self.device)
        floating = tensor.dtype.is_floating_point
        guard = POOL_GUARD if floating and not on_host else INDEX_GUARD
        item = tensor.element_size()
        steps = 2 if strided else 1
        size = tensor.numel() * item * steps
        buffer = torch.empty(
            2 * guard + -(-size // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8, device=device
        )
        self._fill(buffer, name, tensor)
        self._kept.append(buffer)
        held = buffer[guard : guard + size].view(tensor.dtype)
        if strided:
            held.zero_()
            held = held.view(*tensor.shape[:-1], tensor.shape[-1] * 2)[..., ::2] if tensor.dim() else held
        else:
            held = held.view(tensor.shape)
        held.copy_(tensor)
        return held

    def workspace(self, size: int) -> torch.Tensor:
        buffer = torch.full(
            (size + 2 * INDEX_GUARD,),
            0 if self.pattern == "low" else 255,
            dtype=torch.uint8,
            device=self.device,
        )
        self._kept.append(buffer)
        return buffer[INDEX_GUARD : INDEX_GUARD + size]

    def heap(self) -> None:
        """Leave freed blocks on the host's heap behind: the libraries copy index arrays there and read past them."""
        # a planner that reads pairs of int32 as 64-bit words must find no rising sum: its tiles would fill all memory
        word = 0 if self.pattern == "low" else 1000
        blocks = [
            torch.full((size // 8,), word, dtype=torch.int64) for _ in range(40) for size in _HEAP_SIZES
        ]
        del blocks

    def _fill(self, buffer: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
        high = self.pattern == "high"
        if tensor.dtype.is_floating_point:
            buffer.view(tensor.dtype).fill_(-2.0 if high else 0.5)
        elif tensor.dtype == torch.bool:
            buffer.fill_(1 if high else 0)
        else:
            word = 0
            if high:
                last = int(tensor.reshape(-1)[-1]) if tensor.numel() else 0
                word = max(0, min(last, 1 << 20)) + 1 if any(part in name for part in _RUNNING_SUMS) else 1
            buffer.view(torch.int32).fill_(word)


def _every_second(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.dim():
        return tensor
    wide = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] * 2))
    every = wide[..., ::2]
    every.copy_(tensor)
    return every


Place = Plain | Guarded


def places(device: torch.device | str, guarded: bool) -> Sequence[Place]:
    """The surroundings in which a call is made, one after the other."""
    return [Guarded(device, pattern) for pattern in PATTERNS] if guarded else [Plain(device)]
