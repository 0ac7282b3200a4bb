"""Which keys a query row sees, by definition.

Row i of a request stands at position kv_len - qo_len + i of its sequence (aligned bottom right, as in FlashAttention
since 2.1 and in FlashInfer). Without a custom mask it sees one interval of keys, `first_key` to `end_key`; everything
here follows from these three.
"""

from __future__ import annotations

from typing import Any

import torch

from cases.model import Mask
from reference.library import Library, torch_on


def row_position(row: int, qo_len: int, kv_len: int) -> int:
    """Position of a query row in its sequence; negative where there are more rows than keys."""
    return kv_len - qo_len + row


def first_key(position: Any, mask: Mask) -> Any:
    """First key that a row at `position` sees; below 0 where the window reaches past the start of the sequence.

    The window is the number of keys visible up to the row's own, that one included.
    """
    return position - (mask.window - 1) if mask.window is not None else 0


def end_key(position: Any, kv_len: int, mask: Mask) -> Any:
    """One past the last key that a row at `position` sees."""
    return position + 1 if mask.causal else kv_len


def block(
    rows: tuple[int, int], keys: tuple[int, int], qo_len: int, kv_len: int, mask: Mask, lib: Library
) -> Any | None:
    """What the rows of one half-open range see of the keys of another.

    Returns:
        bool `[rows, keys]`, an array of `lib`; None where every row sees every key.
    """
    top, bottom = row_position(rows[0], qo_len, kv_len), row_position(rows[1] - 1, qo_len, kv_len)
    left_is_open = first_key(bottom, mask) <= keys[0]
    right_is_open = end_key(top, kv_len, mask) >= keys[1]
    if left_is_open and right_is_open:
        return None
    position = lib.arange(top, bottom + 1)[:, None]
    key = lib.arange(keys[0], keys[1])
    if left_is_open:
        return key < end_key(position, kv_len, mask)
    if right_is_open:
        return key >= first_key(position, mask)
    return (key >= first_key(position, mask)) & (key < end_key(position, kv_len, mask))


def row_is_empty(row: int, qo_len: int, kv_len: int, mask: Mask) -> bool:
    """Whether a row sees no key at all."""
    position = row_position(row, qo_len, kv_len)
    return bool(end_key(position, kv_len, mask) <= max(first_key(position, mask), 0))


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
        qo_len: query rows. kv_len: keys.
        mask: causal and window as `cases.model.Mask` defines them; its soft cap hides nothing.
        custom: bool `[qo_len, kv_len]` that replaces causal and window.
        keys: only the columns of this half-open range; None: all of them.

    Returns:
        bool `[qo_len, kv_len]` (or as many columns as `keys` names), True where the row sees the key.

    Raises:
        ValueError: `custom` has another shape, or `mask` asks for a custom mask and none is given.
    """
    lo, hi = keys if keys is not None else (0, kv_len)
    if custom is not None:
        if tuple(custom.shape) != (qo_len, kv_len):
            raise ValueError(f"custom is {tuple(custom.shape)}, must be (qo_len, kv_len) = {(qo_len, kv_len)}")
        return custom[:, lo:hi].to(device=device, dtype=torch.bool)
    if mask.custom is not None:
        raise ValueError("the mask is a custom one: custom must hold its bool [qo_len, kv_len]")
    device = torch.device(device)
    seen = block((0, qo_len), (lo, hi), qo_len, kv_len, mask, torch_on(device)) if qo_len else None
    full = (qo_len, hi - lo)
    return torch.ones(full, dtype=torch.bool, device=device) if seen is None else seen.expand(full)
