"""Which keys the tile of a row loads in FlashAttention 3.

Measured on an H200 with sglang-kernel 0.4.6, by a NaN in one key of V: with a window a tile's keys begin at the first
that its first row sees, whether a tile of keys begins there or not; without one at the first of all. From there on
whole tiles of keys are loaded, up to the last that its last row sees; packed rows are tiled.
"""

from __future__ import annotations

import numpy as np

from fakes.loaded import Range
from fakes.recorder import Span
from fakes.sgl_kernel import tiles
from fakes.sgl_kernel.arguments import Shape
from fakes.sgl_kernel.masking import Visible


def ranges(shape: Shape, span: Span, mask: Visible) -> list[Range]:
    """For each packed row of a request (the query heads of a KV head, row by row) the keys that its tile loads."""
    count, length = span.q_end - span.q_start, len(span.slots)
    group = shape.heads // shape.heads_k
    rows, keys = tiles.rows_of(shape), tiles.keys_of(shape, mask)
    if keys is None:  # a tile that was not looked at
        return [(0, length)] * (count * group)
    found: list[Range] = []
    for packed in range(count * group):
        tile = packed // rows
        first = max(tile * rows // group + length - count - mask.left, 0) if mask.left >= 0 else 0
        end = length
        if mask.right >= 0:
            end = min(-(-(tile + 1) * rows // group) + length - count + mask.right, length)
        found.append((first, min(first + -(-max(end - first, 0) // keys) * keys, length)))
    return found


def within(shape: Shape, span: Span, mask: Visible, num_slots: int) -> Span | None:
    """The span with 0 for the slots outside of the cache that no tile loads; None where a tile loads one."""
    loaded = ranges(shape, span, mask)
    first, end = min((a for a, _ in loaded), default=0), max((b for _, b in loaded), default=0)
    outside = (span.slots < 0) | (span.slots >= num_slots)
    if outside[first:end].any():
        return None
    return Span(span.q_start, span.q_end, np.where(outside, 0, span.slots))
