"""How FlashInfer reads index arrays: raw memory from the tensor's first byte, as int32 (or int64) words."""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda, releases
from fakes.modes import UndefinedRead


def words(tensor: torch.Tensor, bits: int = 32) -> np.ndarray:
    """The memory behind an index array as kernels and planners read it, `int32` or `int64` words, 1-D.

    An array of another dtype is not converted: int64 values become their low and high words. Up to 0.6.6
    strides are not read either; later releases make the array contiguous first.
    """
    plain = cuda.host(tensor)
    if plain.dtype is torch.int32 and bits == 32 and plain.is_contiguous():
        return plain.numpy().reshape(-1)
    if not plain.is_contiguous():
        if releases.at_least("flashinfer", "0.7.4"):
            plain = plain.contiguous()
        else:
            extent = min(plain.numel(), plain.untyped_storage().nbytes() // plain.element_size())
            plain = plain.as_strided((extent,), (1,))
    raw = plain.reshape(-1).view(torch.uint8).numpy()
    unit = bits // 8
    if raw.size % unit:
        raw = np.concatenate((raw, np.zeros(-raw.size % unit, np.uint8)))
    return raw.view(np.int32 if bits == 32 else np.int64)


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """What `tensor.to("cpu")` gives planners: a contiguous copy of a device tensor, a host tensor itself."""
    plain = cuda.host(tensor)
    return plain.contiguous() if cuda.current() is None or cuda.on_device(tensor) else plain


def first(array: np.ndarray, count: int, argument: str) -> list[int]:
    """The first `count` entries, as a kernel reads them.

    Raises:
        UndefinedRead: the array is shorter.
    """
    if array.size < count:
        raise UndefinedRead(
            f"{argument}[{array.size}] is read, but the array has {array.size} entries: "
            f"the {count} that this batch needs do not all exist"
        )
    return array[:count].tolist()


def upload(tensor: torch.Tensor, non_blocking: bool, device: torch.device) -> torch.Tensor:
    """What `tensor.to(device)` gives: the tensor itself where it is on the device already, else a copy.

    Without a simulated device nothing says where a tensor lives, so it is always copied.
    """
    simulation = cuda.current()
    if simulation is None:
        return tensor.clone()
    if cuda.on_device(tensor):
        return tensor
    if simulation.kind == "light":
        streams = cuda.streams()
        if streams is not None and not (non_blocking and tensor.is_pinned()):
            streams.staged_copy("h2d", non_blocking, False)
        with cuda.paused():
            return cuda.adopt(tensor.clone())
    return tensor.to(device, non_blocking=non_blocking)


def lengths_by_pages(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """KV lengths that the Python side of `plan` computes: (pages - 1) * page_size + last, at least last.

    Raises:
        RuntimeError: (torch's) the two arrays are for different batch sizes and do not broadcast.
    """
    if indptr.dtype == last_page_len.dtype == torch.int32 and indptr.numel() == last_page_len.numel() + 1:
        pages = np.diff(cuda.host(indptr).numpy())
        pages -= 1
        np.maximum(pages, 0, out=pages)
        pages *= page_size
        pages += cuda.host(last_page_len).numpy()
        return torch.from_numpy(pages)
    plain, last = cuda.host(indptr), cuda.host(last_page_len)
    return (plain[1:] - plain[:-1] - 1).clamp(min=0) * page_size + last
