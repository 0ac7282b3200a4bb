"""What FlashAttention 3 loads behind a request's last key, where it loads whole tiles.

Where a page is a multiple of a tile and there are more rows than a tile has, pages are loaded by tiles (TMA). The
weights behind the last key are 0, but 0 times NaN or Inf is NaN.

Measured on an H200 with sglang-kernel 0.4.6 (and reported: flash-attention#1745): bf16, pages of 128 and 256, causal,
head dims 64 and 128; the LSE is right. Tiles and the condition: the kernel's public `tile_size.h` and C++ entry point.
"""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda
from fakes.recorder import Span
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.masking import Visible
from fakes.sgl_kernel.pages import Keys


def spoil(
    out: np.ndarray, args: Forward, shape: Shape, spans: tuple[Span, ...], reading: Keys, mask: Visible
) -> None:
    """Write NaN to the elements of out `[rows, heads, dim_v]` that V behind a last key makes NaN."""
    tile = _tile(shape, mask)
    if args.page_table is None or args.k_new is not None or args.v.element_size() == 1 or tile is None:
        return
    tile_rows, tile_keys = tile
    group = shape.heads // shape.heads_k
    if reading.page_size % tile_keys or shape.seqlen_q * group <= tile_rows:
        return
    v = cuda.host(args.v)
    for index, span in enumerate(spans):
        q_start, q_end, slots = span.q_start, span.q_end, span.slots
        behind = -len(slots) % tile_keys
        if not behind or not len(slots) or q_end <= q_start or index in reading.lost:
            continue
        page, offset = divmod(int(slots[-1]) + 1, reading.page_size)
        spoiled = ~torch.isfinite(v[page, offset : offset + behind]).all(dim=0).numpy()
        if spoiled.any():
            loads = _loads_last_tile(q_end - q_start, len(slots), group, tile, mask)
            rows = out[q_start:q_end].reshape(q_end - q_start, shape.heads_k, group, shape.dim_v)
            rows[loads[:, None, :, None] & spoiled[None, :, None, :]] = np.nan


def _loads_last_tile(rows: int, keys: int, group: int, tile: tuple[int, int], mask: Visible) -> np.ndarray:
    """Bool `[rows, group]`: whether the tile of a row and head, heads of a group side by side, has the last keys."""
    tile_rows, tile_keys = tile
    if not mask.causal and mask.right < 0:
        return np.ones((rows, group), dtype=bool)
    packed = np.arange(rows * group).reshape(rows, group)
    last_row = np.minimum(-(-(packed // tile_rows + 1) * tile_rows // group), rows)
    right = np.minimum(last_row + keys - rows + max(mask.right, 0), keys)
    return -(-right // tile_keys) == -(-keys // tile_keys)


def tile_rows(shape: Shape) -> int:
    """Rows of a tile, heads of a group packed."""
    return 192 if shape.dim <= 96 else 128


def _tile(shape: Shape, mask: Visible) -> tuple[int, int] | None:
    """Rows and keys of a tile of 16-bit numbers; None: none that was looked at."""
    keys = tile_keys(shape, causal=mask.causal, local=mask.local)
    return None if keys is None else (tile_rows(shape), keys)


def tile_keys(shape: Shape, *, causal: bool, local: bool) -> int | None:
    """Keys of a tile of 16-bit numbers; None: none that was looked at."""
    dim = shape.dim
    if dim <= 64:
        return (128 if causal or local else 192) if shape.dim_v <= 64 else None
    if dim <= 96:
        return 128 if local else 144
    if dim <= 128:
        return 128 if causal or local else 176
    if dim <= 192:
        return 96 if local else (128 if shape.dim_v <= 128 else 112)
    return 64 if local else 80
