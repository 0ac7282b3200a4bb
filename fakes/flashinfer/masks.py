"""Custom masks: packed to bits request by request at `plan`, read at offsets in bytes by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from fakes import cuda
from fakes.recorder import Span, reads_foreign


def element_indptr(qo_indptr: torch.Tensor, kv_lens: torch.Tensor) -> np.ndarray:
    """Where each request's `[qo_len, kv_len]` block begins in a flat mask.

    Raises:
        ValueError: another number of requests in the two.
    """
    qo = cuda.host(qo_indptr).numpy().astype(np.int64)
    lens = cuda.host(kv_lens).numpy().astype(np.int64)
    if qo.size != lens.size + 1:
        raise ValueError("The length of qo_indptr and paged_kv_indptr should be the same.")
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(np.diff(qo) * lens)))


def packed(mask: torch.Tensor, elements: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 bits, little end first, each request from a byte of its own; int32 byte offsets).

    What lies past the end of a mask that is too short is read, here as False.
    """
    flat = cuda.host(mask).reshape(-1).numpy().astype(np.bool_)
    if flat.size < elements[-1]:
        reads_foreign(f"custom_mask[{flat.size}] is read, the mask has {flat.size} elements")
        flat = np.concatenate((flat, np.zeros(int(elements[-1]) - flat.size, np.bool_)))
    blocks = [np.packbits(flat[a:b], bitorder="little") for a, b in pairwise(elements)]
    offsets = np.cumsum([0, *(block.size for block in blocks)]).astype(np.int32)
    bits = np.concatenate(blocks) if blocks else np.empty(0, np.uint8)
    return torch.from_numpy(bits), torch.from_numpy(offsets)


def unpacked(bits: torch.Tensor, offsets: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
    """One bool `[qo_len, kv_len]` per span, as the kernel finds it: bit by bit from byte `offsets[i]`."""
    memory = bits.view(torch.uint8).reshape(-1).numpy()
    masks = []
    for i, span in enumerate(spans):
        count, length = span.q_end - span.q_start, len(span.slots)
        need = -(-count * length // 8)
        block = memory[offsets[i] : offsets[i] + need]
        if block.size < need:
            block = np.concatenate((block, np.zeros(need - block.size, np.uint8)))
        seen = np.unpackbits(block, bitorder="little", count=count * length) if count * length else block[:0]
        masks.append(seen.reshape(count, length).astype(np.bool_))
    return masks
