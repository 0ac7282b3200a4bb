"""How many rows and keys a tile of FlashAttention 3 has. Source: the kernel's public `tile_size.h`."""

from __future__ import annotations

from fakes.sgl_kernel.arguments import Shape
from fakes.sgl_kernel.masking import Visible


def rows_of(shape: Shape) -> int:
    """Rows of a tile, heads of a group packed."""
    return 192 if shape.dim <= 96 else 128


def keys_of(shape: Shape, mask: Visible) -> int | None:
    """Keys of a tile of 16-bit numbers; None: none that was looked at."""
    dim, local = shape.dim, mask.local
    if dim <= 64:
        return (128 if mask.causal or local else 192) if shape.dim_v <= 64 else None
    if dim <= 96:
        return 128 if local else 144
    if dim <= 128:
        return 128 if mask.causal or local else 176
    if dim <= 192:
        return 96 if local else (128 if shape.dim_v <= 128 else 112)
    return 64 if local else 80
