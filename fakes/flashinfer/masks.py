"""Custom masks: packed to bits request by request at `plan`, read at offsets in bytes by the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from fakes import cuda, releases
from fakes.recorder import Span, reads_foreign


def check_lengths(qo_indptr: torch.Tensor, kv_indptr: torch.Tensor) -> None:
    """The two are for one batch.

    Raises:
        ValueError: they are not.
    """
    if cuda.host(qo_indptr).shape[0] != cuda.host(kv_indptr).shape[0]:
        raise ValueError("The length of qo_indptr and paged_kv_indptr should be the same.")


def element_indptr(qo_indptr: torch.Tensor, kv_lens: torch.Tensor) -> np.ndarray:
    """Where each request's `[qo_len, kv_len]` block begins in a flat mask.

    Raises:
        RuntimeError: (torch's) there are more or fewer lengths than requests.
    """
    qo = cuda.host(qo_indptr).numpy().astype(np.int64)
    lens = cuda.host(kv_lens).numpy().astype(np.int64)
    ends = np.cumsum(np.diff(qo) * lens)
    if ends.size not in (1, qo.size - 1):
        raise RuntimeError(
            f"The expanded size of the tensor ({qo.size - 1}) must match the existing size ({ends.size}) at "
            "non-singleton dimension 0."
        )
    return np.concatenate((np.zeros(1, np.int64), ends))


def packed(mask: torch.Tensor, elements: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 bits, little end first, each request from a byte of its own; int32 byte offsets).

    What lies past the end of a mask that is too short is read, here as False.
    """
    flat = cuda.host(mask).reshape(-1).numpy().astype(np.bool_)
    end = int(elements.max())  # not always the last one's, see below
    if flat.size < end:
        reads_foreign(f"custom_mask[{flat.size}] is read, the mask has {flat.size} elements")
        flat = np.concatenate((flat, np.zeros(end - flat.size, np.bool_)))
    if elements.min() < 0:
        reads_foreign(
            f"custom_mask[{elements.min()}] is read: a request without pages counts as -page_size keys"
        )
    counts = (np.diff(elements) + 7) // 8
    if counts.size and counts.min() < 0:
        reads_foreign("a request without pages counts as -page_size keys: blocks of the packed mask overlap")
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    bits = np.zeros(int(offsets.max()), np.uint8)
    for start, (a, b) in zip(offsets.tolist(), pairwise(elements), strict=False):
        block = np.packbits(flat[a:b], bitorder="little")
        bits[start : start + block.size] = block[: bits.size - start]
    return torch.from_numpy(bits), torch.from_numpy(offsets.astype(np.int32))


def check_devices(custom_mask: torch.Tensor | None, **arrays: torch.Tensor) -> None:
    """Offsets are computed where the index arrays are, and used where the mask is (0.7.4 moves them there).

    Raises:
        RuntimeError: (torch's) the arrays are on two devices, or not on the mask's.
    """
    places = {cuda.on_device(array) for array in arrays.values()}
    if len(places) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )
    if custom_mask is None or cuda.current() is None:
        return
    used = [("x", custom_mask)]
    if not releases.at_least("flashinfer", "0.7.4"):
        used.append(("input_indptr", next(iter(arrays.values()))))
    for name, tensor in used:
        if not cuda.on_device(tensor):
            raise RuntimeError(
                f"Check failed: ({name}.device().device_type == kDLCUDA) is false: {name} must be a CUDA tensor"
            )


def unpacked(bits: torch.Tensor, offsets: np.ndarray, spans: Sequence[Span]) -> list[np.ndarray]:
    """One bool `[qo_len, kv_len]` per span, as the kernel finds it: bit by bit from byte `offsets[i]`."""
    memory = bits.view(torch.uint8).reshape(-1).numpy()
    masks = []
    for i, span in enumerate(spans):
        count, length = span.q_end - span.q_start, len(span.slots)
        need = -(-count * length // 8)
        block = memory[offsets[i] : offsets[i] + need]
        if block.size < need:
            reads_foreign(
                f"the packed mask has {memory.size} bytes, request {i} reads to byte {offsets[i] + need}"
            )
            block = np.concatenate((block, np.zeros(need - block.size, np.uint8)))
        seen = np.unpackbits(block, bitorder="little", count=count * length) if count * length else block[:0]
        masks.append(seen.reshape(count, length).astype(np.bool_))
    return masks
