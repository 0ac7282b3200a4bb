"""What FlashMLA's dense decode refuses, in its order and its words, and the schedule it takes."""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda
from fakes.sgl_kernel.checks import refuse
from fakes.sgl_kernel.findings import find

PAGE_SIZE = 64
HEAD_DIM_QK = 576
HEAD_DIM_VO = 512

_SCHEDULE_WIDTH = 8
_NUM_SMS = 132  # of the H200 that the contract was measured on


def check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    descale_q: torch.Tensor | None,
    descale_k: torch.Tensor | None,
) -> None:
    """Refuse what the operator refuses.

    Raises:
        RuntimeError: the first check that fails.
    """
    if k_cache.dtype != q.dtype:
        refuse("query and key must have the same dtype")
    if cache_seqlens.dtype != torch.int32:
        refuse("seqlens_k must have dtype int32")
    if block_table.dtype != torch.int32:
        refuse("block_table must have dtype torch.int32")
    for name, tensor in (
        ("q", q),
        ("kcache", k_cache),
        ("seqlens_k", cache_seqlens),
        ("block_table", block_table),
    ):
        if not cuda.on_device(tensor):
            refuse(f"{name} must be on CUDA")
    if q.stride(-1) != 1:
        refuse("q must have contiguous last dimension")
    if k_cache.stride(-1) != 1:
        refuse("kcache must have contiguous last dimension")
    if not cache_seqlens.is_contiguous():
        refuse("seqlens_k must be contiguous")
    if block_table.stride(-1) != 1:
        refuse("block_table must have contiguous last dimension")
    if q.shape[-1] != HEAD_DIM_QK:
        refuse("Only head_size_k == 576 is supported")
    if head_dim_v != HEAD_DIM_VO:
        refuse("Only head_size_v == 512 is supported")
    if k_cache.shape[1] != PAGE_SIZE:
        refuse("Currently page_block_size must be 64")
    if not q.shape[0]:
        refuse("batch size must be positive")
    if q.shape[2] % k_cache.shape[2]:
        refuse("Number of heads in key/value must divide number of heads in query")
    if tuple(k_cache.shape[1:]) != (PAGE_SIZE, k_cache.shape[2], q.shape[-1]):
        refuse("kcache must have shape (num_blocks, page_block_size, num_heads_k, head_size_k)")
    if tuple(cache_seqlens.shape) != (q.shape[0],):
        refuse("seqlens_k must have shape (batch_size)")
    if block_table.dim() != 2 or block_table.shape[0] != q.shape[0]:
        refuse("block_table must have shape (batch_size, max_num_blocks_per_seq)")
    if q.element_size() == 1 and (descale_q is None or descale_k is None):
        refuse("descale is required when input dtype is fp8")
    for name, scale in (("descale_q", descale_q), ("descale_k", descale_k)):
        if scale is not None and tuple(scale.shape) != (1,):
            refuse(f"{name}_ must have shape (1)")


def schedule(cache_seqlens: torch.Tensor, rows: int, num_heads_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A schedule's two tensors. Inside are the lengths that it was made for, as far as they fit."""
    if cache_seqlens.dtype != torch.int32:
        refuse("seqlens_k must have dtype int32")
    lens = cuda.host(cache_seqlens)
    made = torch.zeros(_parts(rows, num_heads_k), _SCHEDULE_WIDTH, dtype=torch.int32)
    flat = made.view(-1)
    fits = min(len(lens), len(flat))
    flat[:fits] = lens[:fits]
    return made, torch.arange(len(lens) + 1, dtype=torch.int32)


def check_schedule(
    made: torch.Tensor, num_splits: torch.Tensor | None, batch: int, rows: int, num_heads_k: int
) -> None:
    """Refuse a schedule of other shapes."""
    if tuple(made.shape) != (_parts(rows, num_heads_k), _SCHEDULE_WIDTH):
        refuse("tile_scheduler_metadata must have shape (num_sm_parts, DecodingSchedMetaSize/sizeof(int))")
    if num_splits is not None and tuple(num_splits.shape) != (batch + 1,):
        refuse("num_splits must have shape (batch_size+1)")


def check_planned(made: torch.Tensor, lens: np.ndarray) -> None:
    """Strict: the schedule must have been made for these lengths."""
    planned = cuda.host(made).numpy().reshape(-1)[: len(lens)]
    if (planned != lens[: len(planned)]).any():
        find(
            "mla.tile_scheduler_metadata.stale",
            "tile_scheduler_metadata",
            f"the schedule was made for lengths {planned.tolist()}, this call has {lens.tolist()}",
            kind="order",
        )
    for index in np.flatnonzero(lens < 0).tolist():
        message = f"cache_seqlens[{index}] is {lens[index]}, must not be negative"
        find("mla.lengths.negative", "cache_seqlens", message, index)


def _parts(rows: int, num_heads_k: int) -> int:
    return max(_NUM_SMS // num_heads_k // -(-rows // 64), 1)
