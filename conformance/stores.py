"""Where a library's own kernel stores new tokens, decoded from its arguments, against where they must go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.tensors import StepTensors
from conformance.causes import claim
from conformance.fields import WrongField
from fakes.recorder import Call, TensorRecord

_ARRAYS = ("batch_indices", "positions", "kv_indptr", "kv_indices")


@dataclass(frozen=True)
class _Stored:
    """A call's arrays, int64, and where each of its tokens goes by them."""

    batch_indices: np.ndarray
    positions: np.ndarray
    kv_indices: np.ndarray
    entries: np.ndarray
    """For each token, which of `kv_indices` is its page."""
    slots: np.ndarray


def misplaced(tensors: StepTensors, call: Call) -> list[WrongField]:
    """The array that sends a step's tokens elsewhere, at the first that it does; empty where all go where they must.

    A call of other tokens than the step's, or in another order, is not judged: `pool` sees what comes of it.
    """
    page_size = _page_size(call.arguments.get("paged_kv_cache"), call.arguments.get("kv_layout"))
    stored = None if page_size is None else _read(call, page_size)
    want = tensors.out_loc.numpy()
    if stored is None or page_size is None or len(stored.slots) != len(want):
        return []
    wrong = np.flatnonzero(stored.slots != want)
    if not len(wrong) or np.array_equal(np.sort(stored.slots), np.sort(want)):
        return []
    token = int(wrong[0])
    requests, positions = tensors.rows.request, tensors.rows.position
    request = int(requests[token])
    if stored.batch_indices[token] != request:
        got, must = stored.batch_indices[token], request
        return [WrongField("batch_indices", request, f"batch_indices[{token}] is {got}, must be {must}")]
    if stored.positions[token] != positions[token]:
        told = np.array([r.stored_len for r in tensors.step.requests], dtype=np.int64)[requests]
        causes = [
            (": the request's stored tokens are not counted", positions - told),
            (": the row's own number, not its position", np.arange(len(positions))),
        ]
        at = np.flatnonzero(stored.positions != positions)
        cause = claim(stored.positions, positions, at, causes)
        got, must = stored.positions[token], positions[token]
        return [WrongField("positions", request, f"positions[{token}] is {got}, must be {must}{cause}")]
    entry = int(stored.entries[token])
    got, must = stored.kv_indices[entry], want[token] // page_size
    where = f"where position {positions[token]} of request {request} is stored"
    return [WrongField("kv_indices", request, f"kv_indices[{entry}], {where}, is {got}, must be {must}")]


def _page_size(cache: Any, layout: Any) -> int | None:
    """Slots in a page of the cache handed over."""
    match cache:
        case TensorRecord() | (TensorRecord(), TensorRecord()) if layout in ("NHD", "HND"):
            shape = cache.shape if isinstance(cache, TensorRecord) else cache[0].shape
            return shape[-2 if layout == "HND" else -3]
        case _:
            return None


def _read(call: Call, page_size: int) -> _Stored | None:
    """None where a token has no place."""
    arrays: dict[str, np.ndarray] = {}
    for name in _ARRAYS:
        given = call.arguments.get(name)
        if not isinstance(given, TensorRecord) or given.values is None:
            return None
        arrays[name] = given.values.astype(np.int64)
    requests, positions, starts, ids = (arrays[name] for name in _ARRAYS)
    if not requests.size or not 0 <= requests.min() <= requests.max() < starts.size:
        return None
    entries = starts[requests] + positions // page_size
    if not 0 <= entries.min() <= entries.max() < ids.size:
        return None
    return _Stored(requests, positions, ids, entries, ids[entries] * page_size + positions % page_size)
