"""Packing masks into bits, as attention takes them (`packed_custom_mask`, little-endian bits).

Source: quantization.py (0.7.4: quantization/packbits.py), quantization.cu and quantization.cuh of flashinfer-python
0.6.6 and 0.7.4; fakes/contract has what was measured.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from fakes import cuda, modes, releases
from fakes.flashinfer import rules


def packbits(x: torch.Tensor, bitorder: str = "big") -> torch.Tensor:
    """Bits of a 1-D mask: uint8 `[ceil(n / 8)]`. What is no bool is converted.

    Raises:
        RuntimeError: a mask on the CPU, an empty one, or another order than "big" and "little".
    """
    flags = x.to(torch.bool)
    size = (flags.size(0) + 7) // 8
    with cuda.paused():
        _check(bitorder, x=flags)
        if flags.numel() > size * 8:
            raise modes.UndefinedRead(f"a mask of shape {tuple(x.shape)} is packed behind {size} bytes")
        if not flags.numel():
            raise RuntimeError(
                "Check failed: (status == cudaSuccess) is false: PackBits failed with error code invalid argument"
            )
        ends = [cuda.adopt(torch.tensor([0, end], dtype=torch.int32)) for end in (flags.numel(), size)]
    return _pack_kernel(flags, ends[0], ends[1], bitorder, size)


def segment_packbits(
    x: torch.Tensor, indptr: torch.Tensor, bitorder: str = "big"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits of a mask of each request, each from a byte of its own: uint8 bytes and int32 `[batch_size + 1]`, where
    each request's bytes begin. The host waits for their number.

    Args:
        x: bool `[indptr[-1]]`, of any shape. Before 0.7.4 the memory of another dtype is read byte by byte.
        indptr: ints `[batch_size + 1]`.
        bitorder: "big" or "little"; attention takes "little".

    Raises:
        RuntimeError: a tensor on the CPU or not contiguous, or another order.
    """
    bytes_of = (indptr.diff() + 7) // 8
    starts = torch.cat((torch.zeros_like(indptr[:1]), bytes_of.cumsum(0).to(indptr.dtype)))
    size = int(starts[-1].item())
    edges, starts = indptr.to(torch.int32), starts.to(torch.int32)
    if releases.at_least("flashinfer", "0.7.4"):
        x = x.to(torch.bool)
    with cuda.paused():
        _check(bitorder, x=x, input_indptr=edges, output_indptr=starts)
        record = rules.strict()
        if record is not None and x.dtype not in (torch.bool, torch.uint8, torch.int8):
            record.find(
                "fi.mask-dtype",
                "arrays",
                "x",
                f"x is {x.dtype}, must be torch.bool: its memory is read byte by byte",
            )
    return _pack_kernel(x, edges, starts, bitorder, size), starts


def _check(bitorder: str, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not cuda.on_device(tensor):
            raise RuntimeError(
                f"Check failed: {name}.device().device_type == kDLCUDA (1 vs. 2) : {name} must be a CUDA tensor"
            )
        if not cuda.host(tensor).is_contiguous():
            raise RuntimeError(f"Check failed: ({name}.IsContiguous()) is false: {name} must be contiguous")
    if bitorder not in ("big", "little"):
        condition = '(bitorder == "big" || bitorder == "little")'
        raise RuntimeError(f"Check failed: {condition} is false: bitorder must be 'big' or 'little'")


@cuda.kernel
def _pack_kernel(
    x: torch.Tensor, edges: torch.Tensor, starts: torch.Tensor, bitorder: str, size: int
) -> torch.Tensor:
    """Bytes `[size]`: the flags from `edges[i]` to `edges[i + 1]`, packed from byte `starts[i]` on."""
    order: Literal["big", "little"] = "big" if bitorder == "big" else "little"
    flags = cuda.host(x).reshape(-1).view(torch.uint8).numpy()
    found = np.zeros(size, np.uint8)
    for (begin, end), at in zip(
        pairwise(cuda.host(edges).tolist()), cuda.host(starts).tolist(), strict=False
    ):
        if end > flags.size or begin < 0:
            beyond = begin if begin < 0 else end - 1
            raise modes.UndefinedRead(f"x[{beyond}] is read, it has {flags.size} bytes")
        block = np.packbits(flags[begin:end], bitorder=order)
        found[at : at + block.size] = block
    return torch.from_numpy(found)
