"""Which array of a call is wrong, at which request, and why: the arrays that a batch must have against those given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.model import Case
from cases.tensors import StepTensors
from fakes.recorder import Call, TensorRecord
from reference import visible


@dataclass(frozen=True, slots=True)
class WrongField:
    """`field` is the argument's own name; `message` says what it holds, what it must hold, and the likely cause."""

    field: str
    request: int | None
    message: str


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the arrays of a batch are made from, and what of them is read."""

    qo_lens: np.ndarray
    kv_lens: np.ndarray
    slots: tuple[np.ndarray, ...]
    page_size: int
    seen: tuple[np.ndarray, ...]
    """Of each request, bool `[kv_len]`: the keys that a row of it sees."""
    masked: bool
    """The call has a custom mask."""
    read_lens: tuple[int, ...]
    """How many keys of each request the call was seen to read; empty where that is not known."""

    @property
    def page_counts(self) -> np.ndarray:
        return -(-self.kv_lens // self.page_size)

    def pages(self, request: int) -> np.ndarray:
        return self.slots[request][:: self.page_size] // self.page_size

    def read_pages(self, request: int) -> np.ndarray:
        """bool, one a page: those with a key that a row sees."""
        starts = np.arange(0, self.kv_lens[request], self.page_size)
        return np.logical_or.reduceat(self.seen[request], starts) if len(starts) else np.zeros(0, dtype=bool)


def _seen(case: Case, tensors: StepTensors) -> tuple[np.ndarray, ...]:
    whole = case.mask.custom is None and case.mask.window is None
    return tuple(
        np.full(r.kv_len, r.qo_len > 0)
        if whole or not r.qo_len
        else visible(r.qo_len, r.kv_len, case.mask, None if tensors.custom is None else tensors.custom[i])
        .numpy()
        .any(axis=0)
        for i, r in enumerate(tensors.step.requests)
    )


def _indptr(lens: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lens)))


def _indptr_owner(index: int) -> int:
    return max(index - 1, 0)


def wrong_fields(
    case: Case, tensors: StepTensors, plan: Call | None, call: Call, page_size: int
) -> list[WrongField]:
    """Compare every known array of a call (and of its plan) with what this step asks for, where the library reads it.

    `page_size` is that of the cache handed over: 1 where the pool is viewed as single slots.
    """
    step = tensors.step
    given = dict(plan.arguments if plan else {}) | dict(call.arguments)
    batch = _Batch(
        np.array(step.qo_lens),
        np.array(step.kv_lens),
        tensors.placed.slots,
        page_size or case.page_size,
        _seen(case, tensors),
        any(given.get(name) is not None for name in ("custom_mask", "packed_custom_mask")),
        _read_lens(call, step.qo_lens),
    )
    return [fault for name in given if name in _FIELDS for fault in _FIELDS[name](name, given[name], batch)]


def _read_lens(call: Call, qo_lens: tuple[int, ...]) -> tuple[int, ...]:
    spans = () if call.attended is None else call.attended.spans
    return tuple(len(span.slots) for span in spans) if len(spans) == len(qo_lens) else ()


def _vector(
    wanted: Callable[[_Batch], np.ndarray],
    owner: Callable[[int], int],
    causes: Callable[..., str],
    unread: Callable[[_Batch], np.ndarray] | None = None,
) -> Callable[[str, Any, _Batch], Iterator[WrongField]]:
    """`unread`: entries that may hold anything."""

    def compare(name: str, given: Any, batch: _Batch) -> Iterator[WrongField]:
        if not isinstance(given, TensorRecord) or given.values is None:
            return
        got, want = given.values.reshape(-1), wanted(batch)
        if unread is None and len(got) == len(want) - 1 and np.array_equal(got, want[1:]) and want[0] == 0:
            yield WrongField(
                name, 0, f"{name} lacks its leading 0: it is {_show(got)}, must be {_show(want)}"
            )
            return
        if len(got) < len(want):
            yield WrongField(name, None, f"{name} has {len(got)} entries, must have {len(want)}")
        shared = min(len(got), len(want))
        differs = got[:shared] != want[:shared]
        wrong = np.flatnonzero(differs if unread is None else differs & ~unread(batch)[:shared])
        if len(wrong):
            i = int(wrong[0])
            cause = causes(batch, i, int(got[i]), int(want[i]))
            yield WrongField(name, owner(i), f"{name}[{i}] is {got[i]}, must be {want[i]}{cause}")

    return compare


def _indices(name: str, given: Any, batch: _Batch) -> Iterator[WrongField]:
    if not isinstance(given, TensorRecord) or given.values is None:
        return
    got = given.values.reshape(-1)
    requests = range(len(batch.kv_lens))
    ends = _indptr(batch.page_counts)
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *(batch.pages(r) for r in requests)])
    read = np.concatenate([np.zeros(0, dtype=bool), *(batch.read_pages(r) for r in requests)])
    needed = int(np.flatnonzero(read)[-1]) + 1 if read.any() else 0
    if len(got) < needed:
        yield WrongField(name, None, f"{name} has {len(got)} entries, must have {needed}")
    shared = min(len(got), needed)
    wrong = np.flatnonzero((got[:shared] != flat[:shared]) & read[:shared])
    if len(wrong):
        i = int(wrong[0])
        request = int(np.searchsorted(ends, i, side="right")) - 1
        cause = _page_cause(batch, int(got[i]), int(flat[i]))
        message = (
            f"{name}[{i}] (page {i - ends[request]} of request {request}) is {got[i]}, must be {flat[i]}"
        )
        yield WrongField(name, request, message + cause)


def _page_table(name: str, given: Any, batch: _Batch) -> Iterator[WrongField]:
    if not isinstance(given, TensorRecord) or given.values is None:
        return
    table = given.values
    if table.ndim != 2 or table.shape[0] < len(batch.kv_lens):
        yield WrongField(
            name, None, f"{name} has shape {tuple(table.shape)}, must have {len(batch.kv_lens)} rows"
        )
        return
    for request in range(len(batch.kv_lens)):
        want, read = batch.pages(request), np.flatnonzero(batch.read_pages(request))
        row = table[request]
        if len(read) and len(row) <= read[-1]:
            message = (
                f"{name} has {len(row)} columns, request {request} needs {read[-1] + 1} "
                f"for its {batch.kv_lens[request]} tokens"
            )
            yield WrongField(name, request, message)
            return
        wrong = read[row[read] != want[read]]
        if len(wrong):
            column = int(wrong[0])
            got, must = int(row[column]), int(want[column])
            cause = _page_cause(batch, got, must)
            yield WrongField(name, request, f"{name}[{request}, {column}] is {got}, must be {must}{cause}")
            return


def _page_cause(batch: _Batch, got: int, want: int) -> str:
    if batch.page_size > 1 and got // batch.page_size == want:
        return f": a token location, not a page number (divide it by the page size {batch.page_size})"
    for request in range(len(batch.kv_lens)):
        if got in batch.pages(request):
            return f": a page of request {request}"
    return ""


def _no_cause(batch: _Batch, index: int, got: int, want: int) -> str:
    del batch, index, got, want
    return ""


def _length_cause(batch: _Batch, index: int, got: int, want: int) -> str:
    if got == want - int(batch.qo_lens[index]):
        return ": the tokens of this step are not counted"
    if got == int(batch.qo_lens[index]) != want:
        return ": the cached prefix is not counted"
    return ""


def _last_page_cause(batch: _Batch, index: int, got: int, want: int) -> str:
    if not batch.kv_lens[index]:
        return f": request {index} has no pages, and its part of the mask is empty only then"
    if got == 0 and want == batch.page_size:
        return f": length {batch.kv_lens[index]} is a multiple of the page size, so the last page is full"
    return ""


def _sum_cause(batch: _Batch, index: int, got: int, want: int) -> str:
    tokens = _indptr(batch.kv_lens)
    if batch.page_size > 1 and index < len(tokens) and got == tokens[index] != want:
        return ": it counts tokens, must count pages"
    return ""


def _last_page_len(batch: _Batch) -> np.ndarray:
    """A request without pages has a whole one: a custom mask counts `(pages - 1) * page_size + last_page_len` keys."""
    return batch.kv_lens - (batch.page_counts - 1) * batch.page_size


def _unread_last_page(batch: _Batch) -> np.ndarray:
    """A request without pages has none, but a custom mask counts it."""
    empty = batch.kv_lens == 0
    counted = empty & (batch.qo_lens > 0) & batch.masked
    return (empty | _unread_len(batch)) & ~counted


def _unread_len(batch: _Batch) -> np.ndarray:
    """Lengths of requests without rows, and those that a kernel did without: it read the right number of keys."""
    rowless = batch.qo_lens == 0
    return rowless | (batch.kv_lens == batch.read_lens) if batch.read_lens else rowless


_PAGE_INDPTR = _vector(lambda b: _indptr(b.page_counts), _indptr_owner, _sum_cause)
_KV_INDPTR = _vector(lambda b: _indptr(b.kv_lens), _indptr_owner, _no_cause)
_QO_INDPTR = _vector(lambda b: _indptr(b.qo_lens), _indptr_owner, _no_cause)
_LAST_PAGE = _vector(_last_page_len, int, _last_page_cause, _unread_last_page)
_KV_LENS = _vector(lambda b: b.kv_lens, int, _length_cause, _unread_len)

_FIELDS: dict[str, Callable[[str, Any, _Batch], Iterator[WrongField]]] = {
    "qo_indptr": _QO_INDPTR,
    "cu_seqlens_q": _QO_INDPTR,
    "indptr": _PAGE_INDPTR,
    "paged_kv_indptr": _PAGE_INDPTR,
    "kv_indptr": _KV_INDPTR,
    "cu_seqlens_k": _KV_INDPTR,
    "indices": _indices,
    "paged_kv_indices": _indices,
    "last_page_len": _LAST_PAGE,
    "paged_kv_last_page_len": _LAST_PAGE,
    "cache_seqlens": _KV_LENS,
    "seq_lens": _KV_LENS,
    "page_table": _page_table,
}


def _show(values: np.ndarray) -> str:
    shown = ", ".join(str(int(v)) for v in values[:8])
    return f"[{shown}{', ...' if len(values) > 8 else ''}]"
