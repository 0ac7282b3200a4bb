"""Storing new keys and values on their pages, and the arrays that say where each token goes.

Source: page.py, page.cu, page.cuh and triton/page.py of flashinfer-python 0.6.6 and 0.7.4; fakes/contract has what was
measured. `kv_last_page_len` gives the kernels nothing but the number of requests.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fakes import cuda, modes, recorder, releases
from fakes.flashinfer import append, append_rules
from fakes.flashinfer.wrapper import LIBRARY, cache_record, check_buffer, unpack_cache
from fakes.recorder import Call

_NOBODYS = -0x55555556
"""What memory that nobody has written holds here: an index that is none."""


def append_paged_kv_cache(
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Store token i at position `positions[i]` of request `batch_indices[i]`.

    Args:
        append_key, append_value: `[nnz, num_kv_heads, head_dim]`; their memory is read as the cache's dtype.
        batch_indices, positions: ints `[nnz]`.
        paged_kv_cache: as attention takes it: a pair, or one tensor with K and V in dimension 1.
        kv_indices, kv_indptr, kv_last_page_len: the page table, ints `[kv_indptr[-1]]`, `[batch_size + 1]`,
            `[batch_size]`.
        kv_layout: "NHD" or "HND".

    Raises:
        KeyError: another layout. ValueError: a cache of another rank.
        RuntimeError: an array on the CPU or of another length, shape or stride than the kernel takes.
    """
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")
    k, v = unpack_cache(paged_kv_cache, kv_layout)
    arrays = _as_int32(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    with cuda.paused():
        given = {"append_key": append_key, "append_value": append_value}
        caches = {"paged_k_cache": k, "paged_v_cache": v}
        append.check(given, caches, arrays, kv_layout)
        cache = {"paged_kv_cache": cache_record(paged_kv_cache), "kv_layout": kv_layout}
        call = _record("append_paged_kv_cache", given | arrays | cache)
        append_rules.look(given, caches, arrays, k.shape[2 if kv_layout == "HND" else 1])
    append.store(given, caches, arrays, kv_layout, call)


def append_paged_mla_kv_cache(
    append_ckv: torch.Tensor,
    append_kpe: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    ckv_cache: torch.Tensor | None,
    kpe_cache: torch.Tensor | None,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
) -> None:
    """The same for MLA, with the index arrays of `append_paged_kv_cache`.

    Args:
        append_ckv, append_kpe: `[nnz, 512]` and `[nnz, 64]`.
        ckv_cache, kpe_cache: `[num_pages, page_size, 512]` and `[num_pages, page_size, 64]`.

    Raises:
        RuntimeError: as there, or other dims. TypeError: a cache that is None.
    """
    if ckv_cache is None or kpe_cache is None:
        raise TypeError("Mismatched type on argument when calling append_paged_mla_kv_cache: a cache is None")
    arrays = _as_int32(batch_indices, positions, kv_indices, kv_indptr, kv_last_page_len)
    with cuda.paused():
        given = {"append_ckv": append_ckv, "append_kpe": append_kpe}
        caches = {"ckv_cache": ckv_cache, "kpe_cache": kpe_cache}
        append.check(given, caches, arrays, None)
        call = _record("append_paged_mla_kv_cache", given | arrays | caches)
        append_rules.look(given, caches, arrays, ckv_cache.shape[1])
    append.store(given, caches, arrays, None, call)


def get_batch_indices_positions(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    nnz: int,
    batch_indices: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each appended token its request, and its position: the last of a request's tokens is at `seq_lens` - 1.

    Args:
        append_indptr: ints `[batch_size + 1]`, where each request's tokens begin.
        seq_lens: ints `[batch_size]`, lengths with the appended tokens.
        nnz: tokens in all. What `append_indptr` does not reach is left as it was; from 0.7.2 on its request is -1.
        batch_indices, positions: int32 `[nnz]`, written in place of new ones.

    Returns:
        int32 `[nnz]` each.

    Raises:
        ValueError: an array on the CPU, or a buffer of another shape, dtype or device.
    """
    with cuda.paused():
        for name, buffer in (("batch_indices", batch_indices), ("positions", positions)):
            if buffer is not None:
                check_buffer(buffer, (nnz,), torch.int32, append_indptr, name)
        cleared = releases.at_least(LIBRARY, "0.7.2")
        clears = cleared, cleared and positions is None
        if batch_indices is None:
            batch_indices = _fresh(nnz, append_indptr)
        if positions is None:
            positions = _fresh(nnz, append_indptr)
        for at, array in enumerate((append_indptr, seq_lens, batch_indices, positions)):
            if not cuda.on_device(array):
                raise ValueError(f"Pointer argument (at {at}) cannot be accessed from Triton (cpu tensor?)")
        for name, array in (("append_indptr", append_indptr), ("seq_lens", seq_lens)):
            append_rules.strides(name, array)
    _positions_kernel(append_indptr, seq_lens, batch_indices, positions, clears)
    return batch_indices, positions


def get_seq_lens(kv_indptr: torch.Tensor, kv_last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    """Lengths that a page table gives: `[batch_size]`; of a request without pages, `kv_last_page_len`."""
    full_pages = (kv_indptr.diff() - 1).clamp(min=0)
    return full_pages * page_size + kv_last_page_len


def _as_int32(*arrays: torch.Tensor) -> append.Arrays:
    """The library converts every index array, whatever integers it holds."""
    names = ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")
    return {name: array.int() for name, array in zip(names, arrays, strict=True)}


def _fresh(size: int, like: torch.Tensor) -> torch.Tensor:
    made = torch.full((size,), _NOBODYS, dtype=torch.int32)
    return cuda.adopt(made) if cuda.on_device(like) else made


def _record(name: str, arguments: dict[str, Any]) -> Call | None:
    record = recorder.current()
    return None if record is None else record.call(LIBRARY, name, "append", 0, arguments)


@cuda.kernel
def _positions_kernel(
    append_indptr: torch.Tensor,
    seq_lens: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    clears: tuple[bool, bool],
) -> None:
    """`clears`: whether requests are set to -1 first, and positions to 0."""
    edges, lens = _from_address(append_indptr), _from_address(seq_lens)
    requests, places = cuda.host(batch_indices).numpy(), cuda.host(positions).numpy()
    if clears[0]:
        requests.fill(-1)
    if clears[1]:
        places.fill(0)
    if len(lens) < len(edges) - 1:
        raise modes.UndefinedRead(f"seq_lens has {len(lens)} entries for {len(edges) - 1} requests")
    for index, (start, stop) in enumerate(zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)):
        if start < stop and (start < 0 or stop > len(requests)):
            raise modes.UndefinedRead(
                f"tokens {start} to {stop - 1} are written, there is room for {len(requests)}"
            )
        requests[start:stop] = index
        places[start:stop] = np.arange(start, stop) + lens[index] - stop


def _from_address(array: torch.Tensor) -> np.ndarray:
    """As many entries as there are from the array's address on: Triton is told no strides."""
    plain = cuda.host(array)
    room = plain.untyped_storage().nbytes() // plain.element_size() - plain.storage_offset()
    return plain.as_strided((min(plain.numel(), room),), (1,)).numpy().astype(np.int64)
