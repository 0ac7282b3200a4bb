"""New keys and values, written to the cache behind those that it holds, before attention reads it."""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda, modes
from fakes.sgl_kernel import readings
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.pages import Keys


def append(args: Forward, shape: Shape, lens: np.ndarray) -> Keys:
    """Write `k_new` and `v_new` in place at positions `lens` and up; return where all keys are read then.

    Raises:
        RuntimeError: illegal memory access, where a new key belongs to no page of the pool.
    """
    k_new, v_new = args.k_new, args.v_new
    assert k_new is not None
    assert v_new is not None
    k_rows, v_rows = cuda.host(k_new), cuda.host(v_new)
    if args.cu_seqlens_k_new is None:
        count = k_new.shape[1]
        starts = [i * count for i in range(shape.batch)]
        counts = np.full(shape.batch, count, dtype=np.int64)
        k_rows, v_rows = k_rows.flatten(0, 1), v_rows.flatten(0, 1)
    else:
        edges = cuda.host(args.cu_seqlens_k_new).numpy().astype(np.int64)
        starts = edges[:-1].tolist()
        counts = np.maximum(np.diff(edges), 0)
    reading = readings.keys(args, shape, lens + counts)
    k, v = cuda.host(args.k), cuda.host(args.v)
    for index, (start, old, count) in enumerate(zip(starts, lens.tolist(), counts.tolist(), strict=True)):
        if not count:
            continue
        if start < 0 or start + count > len(k_rows):
            raise modes.UndefinedRead(
                f"cu_seqlens_k_new gives request {index} the rows {start} to {start + count - 1}, "
                f"k has {len(k_rows)}"
            )
        slots = reading.slots[index][old:]
        page, offset = np.divmod(slots, reading.page_size)
        if int(page.min()) < 0 or int(page.max()) >= len(k):
            raise modes.illegal_access(f"request {index} appends to page {int(page.max())} of {len(k)}")
        at = torch.from_numpy(page), torch.from_numpy(offset)
        k[at] = k_rows[start : start + count]
        v[at] = v_rows[start : start + count]
    return reading
