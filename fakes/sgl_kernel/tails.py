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
from fakes.sgl_kernel import tiles
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.masking import Visible
from fakes.sgl_kernel.pages import Keys


def spoil(
    out: np.ndarray, args: Forward, shape: Shape, spans: tuple[Span, ...], reading: Keys, mask: Visible
) -> None:
    """Write NaN to the elements of out `[rows, heads, dim_v]` that V behind a last key makes NaN."""
    tile_rows, tile_keys = tiles.rows_of(shape), tiles.keys_of(shape, mask)
    if args.page_table is None or args.k_new is not None or args.v.element_size() == 1 or tile_keys is None:
        return
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
            loads = _loads_last_tile(q_end - q_start, len(slots), group, (tile_rows, tile_keys), mask)
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
