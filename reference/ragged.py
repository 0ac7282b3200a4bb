"""A ragged batch, checked once, and the order in which its rows and keys are walked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from cases.model import Mask

WORTH_A_PIECE = 2048
"""Scores that are computed in the time that one more piece costs: small requests are better taken together."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Which rows and keys belong to which request.

    Args:
        slots: integers `[sum(kv_lens)]`, numpy's on a CPU; the stream of keys.
        qo_lens: query rows of each request.
        kv_lens: keys of each request.
        mask: as `paged_attention` has it.
        custom: bool `[qo_len, kv_len]` a request, on the device of q, or None.
    """

    slots: torch.Tensor | np.ndarray
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
        *,
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
        _check_shapes(q.shape, k_cache.shape, v_cache.shape)
        if len(qo_lens) != len(kv_lens):
            raise ValueError(
                f"qo_lens names {len(qo_lens)} requests and kv_lens {len(kv_lens)}, must be equal"
            )
        if min(qo_lens, default=0) < 0 or min(kv_lens, default=0) < 0:
            raise ValueError(f"qo_lens {list(qo_lens)} and kv_lens {list(kv_lens)} must not be negative")
        if sum(qo_lens) != q.shape[0]:
            raise ValueError(f"q has {q.shape[0]} rows, qo_lens sum to {sum(qo_lens)}")
        num_keys, num_slots = sum(kv_lens), k_cache.shape[0]
        if isinstance(slots, torch.Tensor):
            slots = slots.numpy() if q.device.type == "cpu" else slots.to(q.device)
        if slots.shape != (num_keys,):
            raise ValueError(f"slots is {tuple(slots.shape)}, must be [sum(kv_lens)] = ({num_keys},)")
        if num_keys and not 0 <= slots.min() <= slots.max() < num_slots:
            raise ValueError(
                f"slots holds {int(slots.min())} .. {int(slots.max())}, the cache has slots 0 .. {num_slots - 1}"
            )
        if custom is not None:
            custom = _checked_custom(custom, qo_lens, kv_lens, q.device)
        elif mask.custom is not None:
            raise ValueError(
                "the mask is a custom one: custom must hold one bool [qo_len, kv_len] per request"
            )
        return cls(slots, qo_lens, kv_lens, mask, custom)


def _check_shapes(q: torch.Size, k: torch.Size, v: torch.Size) -> None:
    for name, shape in (("q", q), ("k_cache", k), ("v_cache", v)):
        if len(shape) != 3:
            raise ValueError(f"{name} is {tuple(shape)}, must be [tokens, heads, dim]")
    if q[2] != k[2]:
        raise ValueError(f"head_dim_qk is {q[2]} in q and {k[2]} in k_cache, must be equal")
    if k[:2] != v[:2]:
        raise ValueError(
            f"[num_slots, num_kv_heads] is {tuple(k[:2])} in k_cache and {tuple(v[:2])} in v_cache, must be equal"
        )
    if q[1] % k[1]:
        raise ValueError(f"q has {q[1]} heads, must be a multiple of the {k[1]} of k_cache")


def _checked_custom(
    custom: Sequence[torch.Tensor], qo_lens: Sequence[int], kv_lens: Sequence[int], device: torch.device
) -> list[torch.Tensor]:
    if len(custom) != len(qo_lens):
        raise ValueError(
            f"custom holds {len(custom)} masks, must hold one for each of {len(qo_lens)} requests"
        )
    for request, (mask, *shape) in enumerate(zip(custom, qo_lens, kv_lens, strict=True)):
        if mask.dtype != torch.bool or list(mask.shape) != shape:
            raise ValueError(
                f"custom mask of request {request} is {mask.dtype} {tuple(mask.shape)}, "
                f"must be torch.bool {tuple(shape)}"
            )
    return [mask.to(device) for mask in custom]


class Piece(NamedTuple):
    """Some rows against some keys, all of one request or of several consecutive ones.

    Args:
        rows: half-open range of rows of the batch.
        keys: half-open range of the stream of keys.
        first: no earlier piece has keys of these rows.
        request: the (last) request, and where its rows and keys start.
        row_start: its first row.
        key_start: its first key.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    first: bool
    request: int
    row_start: int
    key_start: int

    @property
    def num_pairs(self) -> int:
        """Pairs of row and key."""
        return (self.rows[1] - self.rows[0]) * (self.keys[1] - self.keys[0])


def chunks(length: int, size: int) -> list[tuple[int, int]]:
    """Half-open ranges of at most `size` that cover 0 .. length."""
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def pieces(
    batch: Ragged, chunk: tuple[int, int], *, num_qo_heads: int, max_scores: int, join: bool
) -> list[Piece]:
    """What to compute with one chunk of the key stream.

    Args:
        batch: the batch.
        chunk: half-open range of the stream of keys.
        num_qo_heads: heads, each of which has its own scores.
        max_scores: most scores in one piece (but at least one row).
        join: requests may share a piece.
    """
    joined: list[Piece] = []
    row_end = key_end = 0
    for request, (qo_len, kv_len) in enumerate(zip(batch.qo_lens, batch.kv_lens, strict=True)):
        row, key = row_end, key_end
        row_end, key_end = row + qo_len, key + kv_len
        lo, hi = max(key, chunk[0]), min(key_end, chunk[1])
        if lo >= hi or not qo_len:
            continue
        first = lo == key
        if join and first and joined and joined[-1].first:
            last = joined[-1]
            wasted = qo_len * (last.keys[1] - last.keys[0]) + kv_len * (last.rows[1] - last.rows[0])
            if wasted * num_qo_heads <= WORTH_A_PIECE:
                joined[-1] = Piece((last.rows[0], row_end), (last.keys[0], hi), True, request, row, key)
                continue
        joined.append(Piece((row, row_end), (lo, hi), first, request, row, key))
    return [part for piece in joined for part in _tiles(piece, max_scores // num_qo_heads)]


def _tiles(piece: Piece, max_pairs: int) -> list[Piece]:
    """A piece cut along its rows, so that no part has more pairs of row and key."""
    (first, end), (lo, hi) = piece.rows, piece.keys
    if (end - first) * (hi - lo) <= max_pairs:
        return [piece]
    spans = chunks(end - first, max(1, max_pairs // (hi - lo)))
    return [piece._replace(rows=(first + start, first + stop)) for start, stop in spans]
