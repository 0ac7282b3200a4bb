"""A ragged batch, checked once, and the order in which its keys and rows are walked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from cases.model import Mask


@dataclass(frozen=True, slots=True)
class Ragged:
    """Which rows and keys belong to which request. Tensors are on the device of q.

    Args:
        slots: integers `[sum(kv_lens)]`. custom: bool `[qo_len, kv_len]` a request, or None.
    """

    slots: torch.Tensor
    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    mask: Mask
    custom: Sequence[torch.Tensor] | None

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        slots: torch.Tensor | np.ndarray,
        qo_lens: Sequence[int],
        kv_lens: Sequence[int],
        mask: Mask,
        custom: Sequence[torch.Tensor] | None,
    ) -> Ragged:
        """Check that everything fits together.

        Raises:
            ValueError: what does not, what it is and what it must be.
        """
        for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            if tensor.ndim != 3:
                raise ValueError(f"{name} is {tuple(tensor.shape)}, must be [tokens, heads, dim]")
        if q.shape[2] != k_cache.shape[2]:
            raise ValueError(f"head_dim_qk is {q.shape[2]} in q and {k_cache.shape[2]} in k_cache, must be equal")
        if k_cache.shape[:2] != v_cache.shape[:2]:
            raise ValueError(
                f"[num_slots, num_kv_heads] is {tuple(k_cache.shape[:2])} in k_cache and {tuple(v_cache.shape[:2])} "
                "in v_cache, must be equal"
            )
        if q.shape[1] % k_cache.shape[1]:
            raise ValueError(f"q has {q.shape[1]} heads, must be a multiple of the {k_cache.shape[1]} of k_cache")
        if len(qo_lens) != len(kv_lens):
            raise ValueError(f"qo_lens names {len(qo_lens)} requests and kv_lens {len(kv_lens)}, must be equal")
        if min(qo_lens, default=0) < 0 or min(kv_lens, default=0) < 0:
            raise ValueError(f"qo_lens {list(qo_lens)} and kv_lens {list(kv_lens)} must not be negative")
        if sum(qo_lens) != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} rows, qo_lens sum to {sum(qo_lens)}")
        index = torch.from_numpy(slots) if isinstance(slots, np.ndarray) else slots
        index = index if index.device == q.device else index.to(q.device)
        if index.ndim != 1 or len(index) != sum(kv_lens):
            raise ValueError(f"slots is {tuple(index.shape)}, must be [sum(kv_lens)] = ({sum(kv_lens)},)")
        if custom is not None:
            custom = _checked_custom(custom, qo_lens, kv_lens, q.device)
        elif mask.custom is not None:
            raise ValueError("the mask is a custom one: custom must hold one bool [qo_len, kv_len] per request")
        lowest, highest = bounds(index) if len(index) else (0, 0)
        if len(index) and not 0 <= lowest <= highest < len(k_cache):
            raise ValueError(f"slots holds {lowest} .. {highest}, the cache has slots 0 .. {len(k_cache) - 1}")
        return cls(index, qo_lens, kv_lens, mask, custom)


def bounds(index: torch.Tensor) -> tuple[int, int]:
    """Smallest and largest element."""
    array: Any = index.numpy() if index.device.type == "cpu" else index
    return int(array.min()), int(array.max())


def _checked_custom(
    custom: Sequence[torch.Tensor], qo_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    if len(custom) != len(qo_lens):
        raise ValueError(f"custom holds {len(custom)} masks, must hold one for each of {len(qo_lens)} requests")
    for request, (mask, shape) in enumerate(zip(custom, zip(qo_lens, kv_lens, strict=True), strict=True)):
        if mask.dtype != torch.bool or tuple(mask.shape) != shape:
            raise ValueError(
                f"custom mask of request {request} is {mask.dtype} {tuple(mask.shape)}, must be torch.bool {shape}"
            )
    return [mask.to(device) for mask in custom]


class Piece(NamedTuple):
    """Some rows of one request against those of its keys that a chunk holds. All ranges are half-open.

    Args:
        rows, keys: counted within the request. rows_of_batch, keys_of_chunk: the same, counted within the batch and
            within the chunk.
    """

    request: int
    qo_len: int
    kv_len: int
    rows: tuple[int, int]
    keys: tuple[int, int]
    rows_of_batch: tuple[int, int]
    keys_of_chunk: tuple[int, int]


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most `size` that cover 0 .. length."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def pieces(batch: Ragged, chunk: tuple[int, int], max_scores: int) -> Iterator[Piece]:
    """What to compute with one chunk of the key stream, at most `max_scores` pairs of row and key at a time."""
    row = key = 0
    for request, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        first, end = max(chunk[0] - key, 0), min(chunk[1] - key, kv_len)
        if first < end:
            keys_of_chunk = (key + first - chunk[0], key + end - chunk[0])
            for start, stop in chunks(qo_len, max(1, max_scores // (end - first))):
                rows_of_batch = (row + start, row + stop)
                yield Piece(
                    request, qo_len, kv_len, (start, stop), (first, end), rows_of_batch, keys_of_chunk
                )
        row, key = row + qo_len, key + kv_len
