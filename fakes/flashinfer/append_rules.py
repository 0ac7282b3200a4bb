"""Strict mode's findings about stored tokens: what `append_paged_kv_cache` takes without a word and puts elsewhere."""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda
from fakes.flashinfer import rules
from fakes.recorder import Recorder


def look(
    given: dict[str, torch.Tensor],
    caches: dict[str, torch.Tensor],
    arrays: dict[str, torch.Tensor],
    page_size: int,
) -> None:
    """Record what is wrong with a call: new rows, where they go, and index arrays, each by name."""
    record = rules.strict()
    if record is None:
        return
    count = arrays["positions"].shape[0]
    for (name, rows), cache in zip(given.items(), caches.values(), strict=True):
        if rows.dtype is not cache.dtype:
            record.find(
                "fi.append-dtype",
                "arrays",
                name,
                f"{name} is {rows.dtype}, the cache {cache.dtype}: its memory is read as the cache's dtype",
            )
        if rows.shape[0] < count:
            record.find(
                "fi.append-rows",
                "arrays",
                name,
                f"{name} has {rows.shape[0]} rows, {count} are stored: what lies behind is read",
            )
    num_pages = next(iter(caches.values())).shape[0]
    host = {name: cuda.host(array).numpy() for name, array in arrays.items()}
    _Places(record, host).look(page_size, num_pages, [cuda.host(rows) for rows in given.values()])


def strides(name: str, array: torch.Tensor) -> None:
    """Record an array that a Triton kernel does not read as it is laid out."""
    record = rules.strict()
    if record is not None and not cuda.host(array).is_contiguous():
        stride = cuda.host(array).stride()
        message = f"{name} has stride {stride}, must be contiguous: the kernel does not read strides"
        record.find("fi.contiguous", "arrays", name, message)


class _Places:
    """Where the tokens of one call go."""

    def __init__(self, record: Recorder, host: dict[str, np.ndarray]) -> None:
        self._record = record
        self.requests, self.positions = host["batch_indices"], host["positions"]
        self.starts, self.ids = host["kv_indptr"].astype(np.int64), host["kv_indices"]

    def look(self, page_size: int, num_pages: int, rows: list[torch.Tensor]) -> None:
        """Record the first thing that is wrong with the places of these rows; what comes behind it means nothing."""
        size = len(self.starts) - 1
        token = _first((self.requests < 0) | (self.requests >= size))
        if token is not None:
            words = f"there are {size} requests"
            self._find("fi.append-request", "batch_indices", token, self.requests, words)
            return
        pages = self.starts[self.requests + 1] - self.starts[self.requests]
        token = _first((self.positions < 0) | (self.positions >= pages * page_size))
        if token is not None:
            held = f"{pages[token]} page{'' if pages[token] == 1 else 's'} of {page_size}"
            words = f"request {self.requests[token]} has {held}: it goes to a page that is not the request's"
            self._find("fi.append-position", "positions", token, self.positions, words, token)
            return
        entries = self.starts[self.requests] + self.positions // page_size
        token = _first(entries >= self.ids.size)
        if token is not None:
            self._record.find(
                "fi.indices-short",
                "arrays",
                "kv_indices",
                f"kv_indices has {self.ids.size} entries, kv_indices[{entries[token]}] is read",
                int(self.requests[token]),
            )
            return
        held = self.ids[entries].astype(np.int64)
        token = _first((held < 0) | (held >= num_pages))
        if token is not None:
            words = f"the pool has {num_pages} pages"
            self._find("fi.page-range", "kv_indices", int(entries[token]), self.ids, words, token)
            return
        # Two requests may share a page: the dummies that pad a batch have one slot among them.
        places = self.requests.astype(np.int64) << 32 | self.positions.astype(np.int64)
        _, first, of = np.unique(places, return_index=True, return_inverse=True)
        again = np.flatnonzero(first[of] != np.arange(places.size))
        for token in again.tolist():
            other = int(first[of[token]])
            if all(_same_bits(x[token], x[other]) for x in rows if len(x) > token):
                continue
            words = (
                f"of request {self.requests[token]}: another token of this call goes there, either may stay"
            )
            self._find("fi.append-twice", "positions", token, self.positions, words, token)
            return

    def _find(
        self, rule: str, argument: str, at: int, values: np.ndarray, words: str, token: int | None = None
    ) -> None:
        request = None if token is None else int(self.requests[token])
        self._record.find(rule, "arrays", argument, f"{argument}[{at}] is {values[at]}, {words}", request)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _first(wrong: np.ndarray) -> int | None:
    return int(wrong.argmax()) if wrong.any() else None
