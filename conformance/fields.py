"""Which array of a call is wrong, at which request, and why: the arrays that a batch must have against those given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.model import Case
from cases.tensors import StepTensors
from conformance.asked import Batch, batch_of
from conformance.causes import Cause, PageIds, claim, of_page
from conformance.outcome import Finding
from fakes.recorder import Call, TensorRecord


@dataclass(frozen=True, slots=True)
class WrongField:
    """`field` is the argument's own name; `message` says what it holds, what it must hold, and the likely cause."""

    field: str
    request: int | None
    message: str

    def finding(self, check: str, step: int, layer: int | None = None, *, how: str = "") -> Finding:
        """As what a check found. `how`: begins the message."""
        return Finding(
            check=check,
            step=step,
            layer=layer,
            request=self.request,
            field=self.field,
            message=f"{how}{self.message}",
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
    given = dict(plan.arguments if plan else {}) | dict(call.arguments)
    batch = batch_of(case, tensors, call, given, page_size or case.page_size)
    arrays = [fault for name in given if name in _FIELDS for fault in _FIELDS[name](name, given[name], batch)]
    return [*unasked(call), *arrays]


def unasked(call: Call) -> list[WrongField]:
    """Arguments that change what attention computes, and that no case asks for."""
    if call.arguments.get("sinks") is None:
        return []
    message = f"{call.name} is given sinks, which no case has: they take weight from every key"
    return [WrongField("sinks", None, message)]


def _vector(
    wanted: Callable[[Batch], np.ndarray],
    owner: Callable[[int], int],
    causes: Callable[[Batch, int], list[Cause]],
    unread: Callable[[Batch], np.ndarray] | None = None,
) -> Callable[[str, Any, Batch], Iterator[WrongField]]:
    """`causes`: those that there may be, by the first wrong entry. `unread`: entries that may hold anything."""

    def compare(name: str, given: Any, batch: Batch) -> Iterator[WrongField]:
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
            cause = claim(got, want, wrong, causes(batch, i))
            yield WrongField(name, owner(i), f"{name}[{i}] is {got[i]}, must be {want[i]}{cause}")

    return compare


def _indices(name: str, given: Any, batch: Batch) -> Iterator[WrongField]:
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
    at = np.flatnonzero(read[:shared])
    owners = np.searchsorted(ends, at, side="right") - 1
    ids = PageIds(owners, at - ends[owners], got[at], flat[at], got)
    if len(ids.wrong):
        first = ids.wrong[0]
        request, page = int(ids.request[first]), ids.page[first]
        where = f"{name}[{at[first]}] (page {page} of request {request})"
        yield WrongField(name, request, f"{where} {_page_fault(ids, batch)}")


def _page_table(name: str, given: Any, batch: Batch) -> Iterator[WrongField]:
    if not isinstance(given, TensorRecord) or given.values is None:
        return
    table = given.values
    if table.ndim != 2 or table.shape[0] < len(batch.kv_lens):
        yield WrongField(
            name, None, f"{name} has shape {tuple(table.shape)}, must have {len(batch.kv_lens)} rows"
        )
        return
    read = [np.flatnonzero(batch.read_pages(r)) for r in range(len(batch.kv_lens))]
    width = table.shape[1]
    cut = next((r for r, columns in enumerate(read) if len(columns) and columns[-1] >= width), len(read))
    request = np.repeat(np.arange(cut), [len(columns) for columns in read[:cut]])
    column = np.concatenate([np.zeros(0, dtype=np.int64), *read[:cut]])
    want = np.concatenate([np.zeros(0, dtype=np.int64), *(batch.pages(r)[read[r]] for r in range(cut))])
    ids = PageIds(request, column, table[request, column], want, table)
    if len(ids.wrong):
        first = ids.wrong[0]
        where = f"{name}[{request[first]}, {column[first]}]"
        yield WrongField(name, int(request[first]), f"{where} {_page_fault(ids, batch)}")
    elif cut < len(read):
        message = (
            f"{name} has {width} columns, request {cut} needs {read[cut][-1] + 1} "
            f"for its {batch.kv_lens[cut]} tokens"
        )
        yield WrongField(name, cut, message)


def _page_fault(ids: PageIds, batch: Batch) -> str:
    first = int(ids.wrong[0])
    cause = of_page(ids, first, batch.slots, batch.page_size)
    return f"is {ids.got[first]}, must be {ids.want[first]}{cause}"


def _no_causes(batch: Batch, index: int) -> list[Cause]:
    del batch, index
    return []


def _length_causes(batch: Batch, index: int) -> list[Cause]:
    """An engine's; to a kernel no key is new and none is cached."""
    del index
    if not batch.engine:
        return []
    if batch.appends:
        return [(": it counts the tokens that the call stores itself", batch.kv_lens)]
    return [
        (": the tokens of this step are not counted", batch.kv_lens - batch.qo_lens),
        (": the cached prefix is not counted", batch.qo_lens),
    ]


def _last_page_causes(batch: Batch, index: int) -> list[Cause]:
    length, rest = batch.kv_lens[index], batch.kv_lens % batch.page_size
    if not length:
        counted = f": request {index} has no pages, and its part of the mask is empty only then"
        return [(counted, rest)]
    return [(f": length {length} is a multiple of the page size, so the last page is full", rest)]


def _sum_causes(batch: Batch, index: int) -> list[Cause]:
    del index
    if batch.page_size == 1:
        return []
    return [(": it counts tokens, must count pages", _indptr(batch.kv_lens))]


def _last_page_len(batch: Batch) -> np.ndarray:
    """A request without pages has a whole one: a custom mask counts `(pages - 1) * page_size + last_page_len` keys."""
    return batch.kv_lens - (batch.page_counts - 1) * batch.page_size


def _unread_last_page(batch: Batch) -> np.ndarray:
    """A request without pages has none, but a custom mask counts it."""
    empty = batch.kv_lens == 0
    counted = empty & (batch.qo_lens > 0) & batch.masked
    return (empty | _unread_len(batch)) & ~counted


def _unread_len(batch: Batch) -> np.ndarray:
    """Lengths of requests without rows, and those that a kernel did without: it read the right number of keys."""
    rowless = batch.qo_lens == 0
    if batch.appends:
        return rowless
    return rowless | (batch.kv_lens == batch.read_lens) if batch.read_lens else rowless


def _kv_indptr(name: str, given: Any, batch: Batch) -> Iterator[WrongField]:
    """Of keys that stand row by row. The new ones alone do where another call reads what is cached."""
    new, want = _indptr(batch.qo_lens), _indptr(batch.kv_lens)
    got = given.values if isinstance(given, TensorRecord) else None
    if batch.engine and got is not None and np.array_equal(got, new) and not np.array_equal(new, want):
        request = int(np.flatnonzero(batch.kv_lens > batch.qo_lens)[0])
        message = (
            f"{name} counts the new tokens alone, and no other call reads what request {request} has cached"
        )
        yield WrongField(name, request, message)
    else:
        yield from _KV_INDPTR(name, given, batch)


_PAGE_INDPTR = _vector(lambda b: _indptr(b.page_counts), _indptr_owner, _sum_causes)
_KV_INDPTR = _vector(lambda b: _indptr(b.kv_lens), _indptr_owner, _no_causes)
_QO_INDPTR = _vector(lambda b: _indptr(b.qo_lens), _indptr_owner, _no_causes)
_LAST_PAGE = _vector(_last_page_len, int, _last_page_causes, _unread_last_page)
_KV_LENS = _vector(lambda b: b.cache_lens, int, _length_causes, _unread_len)

_FIELDS: dict[str, Callable[[str, Any, Batch], Iterator[WrongField]]] = {
    "qo_indptr": _QO_INDPTR,
    "cu_seqlens_q": _QO_INDPTR,
    "indptr": _PAGE_INDPTR,
    "paged_kv_indptr": _PAGE_INDPTR,
    "kv_indptr": _kv_indptr,
    "cu_seqlens_k": _kv_indptr,
    "cu_seqlens_k_new": _QO_INDPTR,
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
