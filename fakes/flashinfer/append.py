"""The kernel behind `append_paged_kv_cache`, and what the library checks before it.

It is told where a request's pages begin and no more: a position past the last of them goes to the next request's.
"""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda, modes, recorder
from fakes.recorder import Call, Stored

HEAD_DIMS = (64, 128, 256, 512)
MLA_DIMS = {"ckv_cache": 512, "kpe_cache": 64}
_BUILT = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)

Arrays = dict[str, torch.Tensor]


def check(given: Arrays, caches: Arrays, arrays: Arrays, layout: str | None) -> None:
    """What the library checks. Neither the rows of the second tensor nor any dtype but the cache's is among it.

    Args:
        given: the new keys and values by name.
        caches: where they go, by name.
        arrays: index arrays by name, int32.
        layout: "NHD" or "HND"; None for MLA, whose tensors have no heads.

    Raises:
        RuntimeError: the first check that fails.
    """
    inputs = given | {name: arrays[name] for name in ("batch_indices", "positions")} | caches | arrays
    for name, tensor in inputs.items():
        if name not in given and not cuda.on_device(tensor):
            _equal(f"{name}.device().device_type", 1, "kDLCUDA", 2, f"{name} must be a CUDA tensor")
        if name in arrays:
            if not cuda.host(tensor).is_contiguous():
                _refuse(f"({name}.IsContiguous()) is false: {name} must be contiguous")
        else:
            words = f"{name}must be contiguous at last dimension"
            _equal(f"{name}.stride(-1)", tensor.stride(-1), "1", 1, words)
    rank = 3 if layout else 2
    ranks = dict.fromkeys(given, rank) | dict.fromkeys(caches, rank + 1) | dict.fromkeys(arrays, 1)
    for name, tensor in inputs.items():
        words = f"{name} must be a {ranks[name]}D tensor"
        _equal(f"{name}.ndim()", tensor.dim(), str(ranks[name]), ranks[name], words)
    first_name, first = next(iter(given.items()))
    batch_size = arrays["kv_last_page_len"].shape[0]
    _equal("kv_indptr.size(0)", arrays["kv_indptr"].shape[0], "batch_size + 1", batch_size + 1)
    for name in ("batch_indices", "positions"):
        _equal(f"{name}.size(0)", arrays[name].shape[0], "nnz", first.shape[0])
    here = cuda.on_device(first)
    for name, tensor in (*list(given.items())[1:], *caches.items()):
        there = f"{name}.device().device_type"
        _equal(there, 1 + cuda.on_device(tensor), f"{first_name}.device().device_type", 1 + here)
    _check_shapes(given, caches, layout)


def _check_shapes(given: Arrays, caches: Arrays, layout: str | None) -> None:
    first, second = caches.values()
    if layout is None:
        for (name, tensor), cache in zip(given.items(), (first, second), strict=True):
            _equal(f"{name}.size(1)", tensor.shape[1], f"{name.removeprefix('append_')}_dim", cache.shape[2])
    else:
        if first.stride() != second.stride():
            _refuse(
                "(std::equal(k_strides.begin(), k_strides.begin() + k_dim, v_strides.begin())) is false: "
                "k/v strides must be identical"
            )
        for name, tensor in given.items():
            _equal(f"{name}.size(1)", tensor.shape[1], "num_heads", first.shape[1 if layout == "HND" else 2])
            _equal(f"{name}.size(2)", tensor.shape[2], "head_dim", first.shape[3])
    record = recorder.current()
    extended = record is not None and record.extended and first.dtype is torch.float32
    if first.dtype not in _BUILT and not extended:
        raise RuntimeError(f"failed to dispatch data type {first.dtype}")
    if layout is None:
        for name, cache in caches.items():
            if cache.shape[2] != MLA_DIMS[name]:
                dim = name.removesuffix("_cache")
                raise RuntimeError(f"head_dim_{dim} must be equal to {MLA_DIMS[name]}")
    elif first.shape[3] not in HEAD_DIMS:
        raise RuntimeError(f"Unsupported head_dim: {first.shape[3]}")
    if not next(iter(given.values())).shape[0]:
        name = "AppendPagedKVCache" if layout else "AppendPagedKVMlaCache"
        _refuse(f"(status == cudaSuccess) is false: {name} failed with error: invalid argument")


def _refuse(condition: str) -> None:
    raise RuntimeError(f"Check failed: {condition}")


def _equal(left: str, a: int, right: str, b: int, words: str = "") -> None:
    if a != b:
        _refuse(f"{left} == {right} ({a} vs. {b}) : {words}")


@cuda.kernel
def store(given: Arrays, caches: Arrays, arrays: Arrays, layout: str | None, call: Call | None) -> None:
    """Read the arrays where they lie now, and store. Arguments as for `check`; `call` learns where.

    Raises:
        UndefinedRead: an entry, a row or a page that is not there.
        RuntimeError: (CUDA's) a page far outside of the pool.
    """
    requests, positions, starts, ids = (
        cuda.host(arrays[name]).numpy().astype(np.int64)
        for name in ("batch_indices", "positions", "kv_indptr", "kv_indices")
    )
    plain = [cuda.host(cache) for cache in caches.values()]
    if layout is None:
        plain = [cache.unsqueeze(2) for cache in plain]
    first = plain[0]
    if layout == "HND":
        plain = [cache.transpose(1, 2) for cache in plain]
    num_pages, page_size = plain[0].shape[:2]
    tokens = _entry(starts, requests, "kv_indptr") * page_size + positions
    pages, offsets = _entry(ids, tokens // page_size, "kv_indices"), tokens % page_size
    slots = pages * page_size + offsets
    if call is not None:
        call.stored = Stored(first, layout or "NHD", page_size, slots)
    if np.unique(slots).size < slots.size:
        recorder.reads_foreign("two tokens go to the same place: either may stay")
    foreign = pages[(pages < 0) | (pages >= num_pages)]
    if foreign.size:
        page = int(foreign[0])
        beyond = -page if page < 0 else page - num_pages
        distance = beyond * first.stride(0) * first.element_size()
        raise modes.outside(distance, f"a token is stored on page {page}, the pool has {num_pages}")
    at = torch.from_numpy(pages), torch.from_numpy(offsets)
    for new, cache in zip(given.values(), plain, strict=True):
        rows = _as_read(cuda.host(new), cache.dtype, len(requests))
        rows = rows.unsqueeze(1) if layout is None else rows
        if cache.element_size() == 1:  # index_put knows no float8
            cache.view(torch.uint8)[at] = rows.view(torch.uint8)
        else:
            cache[at] = rows


def _entry(array: np.ndarray, at: np.ndarray, name: str) -> np.ndarray:
    if not 0 <= at.min() <= at.max() < array.size:
        beyond = at.min() if at.min() < 0 else at.max()
        raise modes.UndefinedRead(f"{name}[{beyond}] is read, it has {array.size} entries")
    return array[at]


def _as_read(given: torch.Tensor, dtype: torch.dtype, rows: int) -> torch.Tensor:
    """`[rows, ...]` of the cache's dtype, read from the first byte on, with strides counted in that dtype."""
    if given.dtype is dtype and given.shape[0] >= rows:
        return given[:rows]
    raw = torch.empty(0, dtype=torch.uint8).set_(given.untyped_storage())
    raw = raw[given.storage_offset() * given.element_size() :]
    raw = raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    shape = (rows, *given.shape[1:])
    last = sum((n - 1) * stride for n, stride in zip(shape, given.stride(), strict=True))
    if last >= raw.numel():
        raise modes.UndefinedRead(
            f"{rows} rows of {dtype} are read from {tuple(given.shape)} of {given.dtype}"
        )
    return raw.as_strided(shape, given.stride())
