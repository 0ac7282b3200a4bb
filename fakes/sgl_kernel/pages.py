"""How keys are found through a table of pages, whatever it holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from fakes import cuda
from fakes.recorder import reads_foreign
from fakes.sgl_kernel.findings import find

UNREADABLE = -(1 << 31)
"""Stands for a page number that lies behind all memory of its table."""

_SQUARE = 1 << 14
"""Slots that are read for nothing rather than going request by request."""


@dataclass(slots=True)
class Keys:
    """Where keys are read.

    `slots`: int64 per request, `page * page_size + offset`, or a row of k. `lost`: requests whose keys are
    not all in the cache; the kernel reads foreign memory for them without a word. `zeros`: rows of zeros that
    loads find past the end of k, as many as slots go past it.
    """

    layout: str
    page_size: int
    slots: list[np.ndarray]
    lost: set[int] = field(default_factory=set[int])
    zeros: int = 0


def paged_slots(
    table: torch.Tensor,
    lens: np.ndarray,
    page_size: int,
    num_pages: int,
    *,
    rule: str,
    name: str,
    lens_name: str,
    rows: np.ndarray | None = None,
    appended: str = "",
) -> Keys:
    """Keys in pages. `rows`: the table row of each request, where it is not its own. `appended`: words behind a length.

    Columns past a request's pages are not read. A request with more pages than columns reads on in memory.
    """
    host = cuda.host(table)
    pages = host.numpy()
    width = pages.shape[1]
    if rows is not None:
        pages = pages[rows]
    needed = -(-lens // page_size) if page_size > 1 else lens
    widest = int(needed.max()) if len(lens) else 0
    if widest > width:
        pages = _read_on(host, pages, rows, needed)
        for index in np.flatnonzero(needed > width).tolist():
            find(
                f"{rule}.{name}.narrow",
                name,
                f"{lens_name}[{index}] is {lens[index]}{appended}, which takes {needed[index]} pages of {page_size}; "
                f"{name} has {width} columns: the rest is read from behind the row",
                index,
            )
    edges = [0, *np.cumsum(lens).tolist()]
    slots = _flattened(pages, lens, needed, page_size, widest, edges[-1])
    found = Keys("NHD", page_size, [slots[a:b] for a, b in pairwise(edges)])
    if edges[-1] and int(slots.view(np.uint64).max()) >= num_pages * page_size:  # negative ones are large
        for index, count in enumerate(needed.tolist()):
            outside = np.flatnonzero((pages[index, :count] < 0) | (pages[index, :count] >= num_pages))
            if len(outside):
                found.lost.add(index)
                at = int(outside[0])
                if at < width:
                    message = _outside(name, index, at, int(pages[index, at]), num_pages, page_size)
                    find(f"{rule}.{name}.range", name, message, index)
    return found


def _flattened(
    pages: np.ndarray, lens: np.ndarray, needed: np.ndarray, page_size: int, widest: int, total: int
) -> np.ndarray:
    """Slots of all requests, int64, one behind the other."""
    if not total:
        return np.empty(0, dtype=np.int64)
    offset = _offsets(page_size)
    if len(lens) * widest * page_size <= 4 * total + _SQUARE:
        square = pages[:, :widest, None].astype(np.int64) * page_size + offset
        return square.reshape(len(lens), -1)[_offsets(widest * page_size) < lens[:, None]]
    rows = [
        (row[:count, None].astype(np.int64) * page_size + offset).reshape(-1)[:length]
        for row, count, length in zip(pages, needed.tolist(), lens.tolist(), strict=True)
    ]
    return np.concatenate(rows)


@lru_cache
def _offsets(count: int) -> np.ndarray:
    return np.arange(count)


def _outside(name: str, row: int, column: int, page: int, num_pages: int, page_size: int) -> str:
    message = f"{name}[{row}, {column}] is {page}, the pool has {num_pages} pages"
    if page_size > 1 and page > 0 and page % page_size == 0 and page // page_size < num_pages:
        likely = (
            f"it looks like a token location; divide by page_size {page_size} to get page {page // page_size}"
        )
        return f"{message}: {likely}"
    return f"{message}: it must be 0 to {num_pages - 1}"


def _read_on(
    table: torch.Tensor, pages: np.ndarray, rows: np.ndarray | None, needed: np.ndarray
) -> np.ndarray:
    """The table's rows as wide as the kernel reads them: what follows in memory, if anything."""
    base = table.storage_offset()
    held = table.untyped_storage().nbytes() // table.element_size() - base
    memory = table.as_strided((held,), (1,), base).numpy()
    described = (table.shape[0] - 1) * table.stride(0) + table.shape[1]
    wide = np.full((len(pages), int(needed.max())), UNREADABLE, dtype=np.int64)
    for index in range(len(pages)):
        start = (index if rows is None else int(rows[index])) * table.stride(0)
        if start + int(needed[index]) > described:
            reads_foreign(f"row {index} of a page table of shape {tuple(table.shape)} is read past its end")
        there = memory[start : start + wide.shape[1]]
        wide[index, : len(there)] = there
    return wide
