"""Which keys a query row sees, by definition.

Row i of a request stands at position kv_len - qo_len + i of its sequence: masks are aligned bottom right, as in
FlashAttention since 2.1 and in FlashInfer. Without a custom mask a row sees one range of keys, `first_key` to
`end_key`; everything else follows from these three.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from cases.model import Mask


def row_position(row: Any, qo_len: Any, kv_len: Any) -> Any:
    """Position of query rows in their sequence; negative where there are more rows than keys."""
    return row + (kv_len - qo_len)


def first_key(position: Any, mask: Mask) -> Any:
    """First key that rows at `position` see; below 0 where the window reaches past the start.

    The window is the number of keys visible up to the row's own, that one included.
    """
    return position - (mask.window - 1) if mask.window is not None else 0


def end_key(position: Any, kv_len: Any, mask: Mask) -> Any:
    """One past the last key that rows at `position` see."""
    return position + 1 if mask.causal else kv_len


def key_ranges(qo_lens: Sequence[int], kv_lens: Sequence[int], mask: Mask) -> tuple[np.ndarray, np.ndarray]:
    """The keys that each row of a batch sees, as half-open ranges; end <= first where it sees none.

    Returns:
        (first, end), int64 `[sum(qo_lens)]`, counted in the stream of all keys, request after request.
    """
    starts = ([0, *accumulate(lens)][:-1] for lens in (qo_lens, kv_lens))
    of_request = np.array((qo_lens, kv_lens, *starts), np.int64)
    qo_len, kv_len, row_start, key_start = of_request.repeat(qo_lens, axis=1)
    position = row_position(np.arange(qo_len.size) - row_start, qo_len, kv_len)
    first = np.maximum(first_key(position, mask), 0)
    return key_start + first, key_start + end_key(position, kv_len, mask)


def visible(
    qo_len: int,
    kv_len: int,
    mask: Mask,
    custom: torch.Tensor | None = None,
    *,
    device: torch.device | str = "cpu",
    keys: tuple[int, int] | None = None,
) -> torch.Tensor:
    """The mask of one request.

    Args:
        qo_len: query rows.
        kv_len: keys.
        mask: causal and window as `cases.model.Mask` defines them; its soft cap hides nothing.
        custom: bool `[qo_len, kv_len]` that replaces causal and window.
        device: where the result is made.
        keys: only the columns of this half-open range; None: all of them.

    Returns:
        bool `[qo_len, kv_len]` (or as many columns as `keys` names), True where the row sees the key.

    Raises:
        ValueError: `custom` has another shape, or `mask` asks for a custom mask and none is given.
    """
    lo, hi = keys if keys is not None else (0, kv_len)
    if custom is not None:
        if tuple(custom.shape) != (qo_len, kv_len):
            raise ValueError(f"custom is {tuple(custom.shape)}, must be (qo_len, kv_len) = {qo_len, kv_len}")
        return custom[:, lo:hi].to(device=device, dtype=torch.bool)
    if mask.custom is not None:
        raise ValueError("the mask is a custom one: custom must hold its bool [qo_len, kv_len]")
    position = row_position(torch.arange(qo_len, device=device)[:, None], qo_len, kv_len)
    key = torch.arange(lo, hi, device=device)
    seen = (key >= first_key(position, mask)) & (key < end_key(position, kv_len, mask))
    return seen.expand(qo_len, hi - lo)
