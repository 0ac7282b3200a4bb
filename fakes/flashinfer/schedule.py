"""How FlashInfer's planners cut a batch: tiles of query rows, chunks of KV, and the scratch they need.

The answer does not depend on it while plan and run agree. Where they do not (other group size, page size or lengths
than planned), what the plan did not cut is not computed. Source: `scheduler.cuh` of flashinfer-python 0.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NUM_SM = 132
"""Multiprocessors of the device that the fake stands for, an H200."""

RESIDENT_BLOCKS = {64: {1: 6, 2: 9, 3: 8, 4: 8, 8: 8}, 128: {1: 6, 2: 9, 3: 9, 4: 8, 8: 9}}
"""Blocks of the CUDA-core decode kernel on one multiprocessor, by head dim and group size, for 16-bit numbers.

By the registers and shared memory of 0.6.6's kernels as CUDA 13.0 compiled them for sm_90a (64: with a window); for
128 and groups of 1 and 3 also measured on an H200, as sizes of batch_decode_tmp_v.
"""

ASSUMED_BLOCKS = 8
"""The same for other kernels: the compiler decides."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`tile_rows` packed rows (query rows times group size) in a tile; per request its tiles and chunks.

    `chunk_tokens` keys in a chunk, None where KV is not split. `scratch`: (name, bytes) to be taken from the
    float workspace, in order.
    """

    tile_rows: int
    tiles: list[int]
    chunks: list[int]
    chunk_tokens: int | None
    scratch: tuple[tuple[str, int], ...]


def check_scratch(schedule: Schedule, workspace_bytes: int) -> None:
    """Take the scratch from the float workspace.

    Raises:
        RuntimeError: it does not suffice.
    """
    used = 0
    for name, size in schedule.scratch:
        used = -(-used // 16) * 16
        if used + size > workspace_bytes:
            raise RuntimeError(
                f"Buffer overflow when allocating memory for {name} with size {size} and alignment 16, "
                f"but only {max(workspace_bytes - used, 0)} bytes available in AlignedAllocator. "
                "Increase the workspace buffer size."
            )
        used += size


def tile_of(packed_len: int, head_dim: int) -> int:
    """Packed rows in a tile of the fa2 kernel, for an average (graphs: largest) packed query length."""
    if packed_len > 64 and head_dim < 256:
        return 128
    return 64 if packed_len > 16 else 16


def needs_no_split(pages: Sequence[int], page_size: int) -> bool:
    """Whether every request is too short to be split, whatever the batch."""
    return max(pages, default=0) <= max(128 // page_size, 1)


def plan_prefill(
    qo_lens: Sequence[int],
    pages: Sequence[int],
    *,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    total_rows: int,
    graph: bool,
    window_left: int,
    fixed_split: int,
    disable_split: bool,
) -> Schedule:
    """The fa2 planner, also of tensor-core decode. `pages` per request, in `page_size` tokens."""
    group = num_qo_heads // num_kv_heads
    packed = [n * group for n in qo_lens]
    batch = len(packed)
    if graph:
        tile = tile_of((total_rows - batch + 1) * group, head_dim)
        bound = -(-total_rows * group // tile) + batch - 1
    else:
        tile = tile_of(sum(packed) // batch, head_dim)
        bound = sum(-(-n // tile) for n in packed)
    tiles = [-(-n // tile) for n in packed]
    seen = [
        min(-(-(window_left + tile) // page_size), n) if window_left >= 0 else n for n in pages
    ]  # pages that a windowed tile reaches
    limit = 2 * NUM_SM // num_kv_heads
    split = False
    if disable_split:
        chunk = 1 << 62
    elif fixed_split > 0:
        chunk = fixed_split
    else:
        longest = max(1, *seen)
        chunk = _smallest(
            max(128 // page_size, 1),
            longest,
            lambda c: sum(t * -(-max(n, 1) // c) for t, n in zip(tiles, seen, strict=True)) <= limit,
        )
        split = graph or chunk < longest
    chunks = [-(-max(n, 1) // chunk) for n in seen]
    split = split or (fixed_split > 0 and not disable_split and max(chunks) > 1)
    blocks = sum(t * c for t, c in zip(tiles, chunks, strict=True))
    padded = max(limit, bound) if graph else blocks
    rows = num_qo_heads * padded * tile
    scratch = (
        (("batch_prefill_tmp_v", rows * head_dim * 4), ("batch_prefill_tmp_s", rows * 4)) if split else ()
    )
    return Schedule(tile, tiles, chunks, chunk * page_size if split else None, scratch)


def plan_decode(
    pages: Sequence[int], *, num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, graph: bool
) -> Schedule:
    """The planner of CUDA-core decode: one row per request."""
    batch = len(pages)
    limit = RESIDENT_BLOCKS.get(head_dim, {}).get(num_qo_heads // num_kv_heads, ASSUMED_BLOCKS) * NUM_SM
    chunk, split = max(1, *pages, 1), False
    if batch * num_kv_heads < limit:
        chunk = _smallest(
            max(128 // page_size, 1),
            max(pages, default=0),
            lambda c: sum(-(-n // c) for n in pages) * num_kv_heads <= limit,
        )
        split = graph or sum(-(-max(n, 1) // chunk) for n in pages) > batch
    chunks = [-(-max(n, 1) // chunk) for n in pages]
    padded = (limit // num_kv_heads if split else batch) if graph else sum(chunks)
    rows = num_qo_heads * padded
    scratch = (("batch_decode_tmp_v", rows * head_dim * 4), ("batch_decode_tmp_s", rows * 4)) if split else ()
    return Schedule(1, [1] * batch, chunks, chunk * page_size if split else None, scratch)


def decode_step(head_dim: int, group: int) -> int:
    """Keys that a block of the CUDA-core decode kernel takes at once, of 16-bit numbers."""
    threads = head_dim // max(8, head_dim // 32)  # that share a row of K
    at_once = max(128, threads * group) // (threads * group) * group
    return at_once * 4 if group == 1 else at_once


def _smallest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """Smallest chunk in low .. high that fits the grid, by the library's bisection; `low` if low >= high."""
    while low < high:
        mid = (low + high) // 2
        if fits(mid):
            high = mid
        else:
            low = mid + 1
    return low
