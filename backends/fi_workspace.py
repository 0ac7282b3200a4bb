"""The float workspace of FlashInfer's wrappers: scratch for partial results where KV is split over blocks."""

from __future__ import annotations

import torch

from backends.contract import EngineContext

RECOMMENDED_BYTES = 128 * 1024 * 1024
"""What FlashInfer recommends. Groups of eight query heads and more can need more."""

_FLOAT = 4
_TILE_ROWS = {256: 64}
"""Packed rows (query rows times group size) of fa2's largest tile by head dim, 128 for others."""


def float_workspace(engine: EngineContext) -> torch.Tensor:
    """A workspace that no batch of this engine overflows, uint8, on its device.

    The planner of fa2 splits KV into at most two blocks a multiprocessor, or as many as tiles there are in a captured
    batch; each keeps a tile of float32 output and LSE for every query head. Source: `PrefillPlan` in FlashInfer's
    `scheduler.cuh`, the same in 0.6.6 and 0.7.4.
    """
    multiprocessors = torch.cuda.get_device_properties(engine.device).multi_processor_count
    dim, heads = engine.head_dim_vo, engine.num_qo_heads
    group = heads // engine.num_kv_heads
    tile = _TILE_ROWS.get(dim, 128)
    split = heads * max(2 * multiprocessors // engine.num_kv_heads, 1) * tile
    padded = 2 * engine.max_batch  # at most
    captured = heads * padded * (group + (tile if group > 16 else 16))
    needed = max(split, captured) * (dim + 1) * _FLOAT + 16
    return torch.empty(max(RECOMMENDED_BYTES, needed), dtype=torch.uint8, device=engine.device)
