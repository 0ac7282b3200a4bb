"""Recorded attention calls in the case's own coordinates: which request's row read which slot of the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from cases.bits import from_array
from cases.model import Case
from cases.tensors import StepTensors
from conformance.copies import UNKNOWN, Known, Source, keys_and_values, rows_in_order
from conformance.engine import new_tokens
from conformance.execution import LayerRun
from conformance.pool import Pool
from conformance.question import Question
from fakes.recorder import Attended, Call, Span, storage_of

OUTSIDE = -1
"""Slot of a key that does not stand in the layer's pool."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """One request of one call: int64 `rows` of the layer's q, and the pool slot of each key of K and V.

    `sure`: none of them was guessed from the content of a copy. A row that is in no copy is `UNKNOWN`. `heads` int64
    `[num_rows, heads]`: where a call's rows are not whole rows of the layer's q (groups as rows, or some heads), which
    head of which row each of its heads is, as `row * num_qo_heads + head`; the first one's row is in `rows`.
    """

    rows: np.ndarray
    k_slots: np.ndarray
    v_slots: np.ndarray
    span: Span
    custom: np.ndarray | None
    sure: bool = True
    heads: np.ndarray | None = None

    @property
    def num_rows(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer of a step, as the engine had it: what was handed over, and the layer's pool."""

    case: Case
    tensors: StepTensors
    layer: int
    handed: LayerRun
    k_pool: torch.Tensor
    v_pool: torch.Tensor

    @classmethod
    def of(cls, question: Question, step: int, layer: int, handed: LayerRun, pool: Pool) -> LayerTensors:
        """Of a question's step, with the pool that it ran on."""
        k_pool, v_pool = pool.k_cache(layer), pool.v_cache(layer)
        return cls(question.case, question.step(step), layer, handed, k_pool, v_pool)

    @property
    def ragged_slots(self) -> np.ndarray:
        """int64: what a row of the handed k is called; an engine's new token by the slot that it is stored to."""
        if self.case.level == "engine":
            return self.tensors.slots[self.tensors.new]
        return np.arange(len(self.tensors.tokens.uid))

    def queries(self) -> list[Source]:
        q = self.tensors.q[self.layer]
        return [Source(q, np.arange(len(q)))]

    def stored(self, which: int, *, ragged: bool) -> list[Source]:
        """Keys (0) or values (1) that a copy may hold."""
        t = self.tensors
        everything = (t.k_all, t.v_all)[which][self.layer]
        if self.case.level == "kernel":
            return [Source(everything, self.ragged_slots if ragged else t.slots)]
        handed = new_tokens(self.case, t)[1 + which][self.layer]
        return [Source(everything, t.slots), Source(handed, self.ragged_slots)]


def read_spans(attended: Attended, at: LayerTensors) -> list[ReadSpan]:
    """Decode one call: by the addresses of what it was given, and by the content of what was copied."""
    rows, sure_rows = _query_rows(attended, at)
    heads = _query_heads(attended, at)
    known: dict[int, Known] = {}
    spans: list[ReadSpan] = []
    for index, span in enumerate(attended.spans):
        k_slots = _slots(attended, attended.k, at.handed.k, at.k_pool, span.slots, at)
        v_slots = _slots(attended, attended.v, at.handed.v, at.v_pool, span.slots, at)
        sure = bool(sure_rows[span.q_start : span.q_end].all())
        if k_slots is None or v_slots is None:
            for which, given in enumerate((attended.k, attended.v)):
                if which not in known:
                    known[which] = Known(at.stored(which, ragged=attended.layout == "ragged"), given.dtype)
            likely = [
                _likely(attended, known[which], given, found, span.slots)
                for which, (given, found) in enumerate(((attended.k, k_slots), (attended.v, v_slots)))
            ]
            k_slots, v_slots, sure_keys = keys_and_values(*likely)
            sure &= sure_keys
        custom = None if attended.custom is None else attended.custom[index]
        part = slice(span.q_start, span.q_end)
        own = None if heads is None else heads[part]
        spans.append(ReadSpan(rows[part], k_slots, v_slots, span, custom, sure, own))
    return spans


def computed_anew(attended: Attended, at: LayerTensors) -> tuple[bool, bool, bool]:
    """Whether a call's queries, keys and values are neither the engine's nor copied from them (zeros tell nothing)."""
    ragged = attended.layout == "ragged"
    sources = (at.queries(), at.stored(0, ragged=ragged), at.stored(1, ragged=ragged))
    caches = (at.handed.k, at.handed.v) if ragged else (at.k_pool, at.v_pool)
    given = (attended.q, attended.k, attended.v)
    anew = [
        not shares(tensor, own)
        and not any(Known(source, tensor.dtype).candidates(_as_rows(attended, tensor)))
        for tensor, own, source in zip(given, (at.handed.q, *caches), sources, strict=True)
    ]
    return anew[0], anew[1], anew[2]


def _as_rows(attended: Attended, tensor: torch.Tensor) -> torch.Tensor:
    """`[n, heads, dim]` of a q, k or v, slot by slot: those that are not all zeros."""
    rows = tensor
    if tensor.dim() == 4:
        rows = (tensor if attended.layout == "NHD" else tensor.transpose(1, 2)).flatten(0, 1)
    return rows[rows.ne(0).flatten(1).any(1)]


def doubtful(spans: Sequence[ReadSpan], num_rows: int) -> bool:
    """Whether what a layer read is guessed where it matters: rows of padding may stay unknown, a batch's may not."""
    known = {int(row) for span in spans for row in span.rows}
    if known.issuperset(range(num_rows)):
        return any(not span.sure for span in spans if (span.rows != UNKNOWN).all())
    return any(not span.sure for span in spans)


def is_plain(call: Call, at: LayerTensors) -> bool:
    """Whether one call does all that a layer asks, in the plain way: the usual case, told without decoding it."""
    case, tensors, handed = at.case, at.tensors, at.handed
    a, mask, step = call.attended, case.mask.of_layer(at.layer), tensors.step
    if a is None or a.custom is not None or mask.custom is not None or mask.window is not None:
        return False
    if a.window_left >= 0 or a.window_right > 0 or len(a.spans) != len(step.requests):
        return False
    if (a.causal or a.window_right == 0) != mask.causal and any(n != 1 for n in step.qo_lens):
        return False
    if (a.q.data_ptr(), a.q.shape, a.q.stride()) != (handed.q.data_ptr(), handed.q.shape, handed.q.stride()):
        return False
    if a.layout == "ragged":
        wanted, k, v = np.arange(len(tensors.tokens.uid)), handed.k, handed.v
    elif a.layout == case.layout and (a.layout == "NHD" or a.page_size == case.page_size):
        wanted, k, v = tensors.slots, at.k_pool, at.v_pool
    else:
        return False
    for given, own in ((a.k, k), (a.v, v)):
        if given.data_ptr() != own.data_ptr() or not (given.is_contiguous() and own.is_contiguous()):
            return False
    row = 0
    for span, qo_len, kv_len in zip(a.spans, step.qo_lens, step.kv_lens, strict=True):
        if (span.q_start, span.q_end, len(span.slots)) != (row, row + qo_len, kv_len):
            return False
        row += qo_len
    return np.array_equal(np.concatenate([span.slots for span in a.spans]), wanted)


def visible_keys(attended: Attended, span: ReadSpan) -> np.ndarray:
    """bool `[num_rows, num_keys]`: what each row of a span sees, as the library read its arguments."""
    rows, keys = span.num_rows, len(span.k_slots)
    if span.custom is not None:
        return span.custom
    at = np.arange(rows)[:, None] + keys - rows
    key = np.arange(keys)
    seen = np.ones((rows, keys), dtype=bool)
    if attended.causal:
        seen &= key <= at
    if attended.window_left >= 0:
        seen &= key >= at - attended.window_left
    if attended.window_right >= 0:
        seen &= key <= at + attended.window_right
    return seen


def _query_rows(attended: Attended, at: LayerTensors) -> tuple[np.ndarray, np.ndarray]:
    """int64: which row of the layer's q each row of a call's q is; bool: whether that is sure."""
    q, handed = attended.q, at.handed.q
    if shares(q, handed) and handed.dim() == 3 and handed.stride(0):
        step = handed.stride(0) * handed.element_size()
        address = q.data_ptr() - handed.data_ptr() + np.arange(len(q)) * q.stride(0) * q.element_size()
        inside = (address >= 0) & (address < step * handed.shape[0])
        return np.where(inside, address // step, UNKNOWN), np.ones(len(q), dtype=np.bool_)
    return rows_in_order(Known(at.queries(), q.dtype).candidates(q))


def _query_heads(attended: Attended, at: LayerTensors) -> np.ndarray | None:
    """See `ReadSpan.heads`, for every row of a call's q; None where its rows are whole ones, or copies."""
    q, handed = attended.q, at.handed.q
    if not shares(q, handed) or handed.dim() != 3 or not handed.stride(0) or not handed.stride(1):
        return None
    if q.shape[1] == handed.shape[1] and q.stride(1) == handed.stride(1):
        return None
    offset = (q.data_ptr() - handed.data_ptr()) // q.element_size()
    place = offset + np.arange(len(q))[:, None] * q.stride(0) + np.arange(q.shape[1]) * q.stride(1)
    row, rest = np.divmod(place, handed.stride(0))
    return np.asarray(row * handed.shape[1] + rest // handed.stride(1))


def shares(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in one piece of memory."""
    return storage_of(tensor) == storage_of(other)


def _slots(
    attended: Attended,
    given: torch.Tensor,
    handed: torch.Tensor,
    pool: torch.Tensor,
    slots: np.ndarray,
    at: LayerTensors,
) -> np.ndarray | None:
    """Slots of keys or values that stand where the engine has them; None for a copy."""
    if attended.layout != "ragged":
        if not shares(given, pool):
            return None
        return pool_slots(at.case, (attended.layout, attended.page_size), given, pool, slots)
    if not shares(given, handed):
        return None if given.numel() else slots
    if given.data_ptr() != handed.data_ptr():
        step = handed.stride(0) * handed.element_size()
        slots = slots + (given.data_ptr() - handed.data_ptr()) // step
    names = at.ragged_slots
    known = (slots >= 0) & (slots < len(names))
    return np.where(known, names[np.where(known, slots, 0)], OUTSIDE) if len(names) else slots


def _likely(
    attended: Attended, known: Known, given: torch.Tensor, found: np.ndarray | None, slots: np.ndarray
) -> list[list[int]]:
    """Of each key the slots that it may have been copied from, none outside of the copy; of no copy the one it has."""
    if found is not None:
        return [[int(slot)] for slot in found]
    if attended.layout == "ragged":
        rows = given
    else:
        nhd = given if attended.layout == "NHD" else given.transpose(1, 2)
        rows = nhd.flatten(0, 1)
    inside = (slots >= 0) & (slots < len(rows))
    candidates = iter(known.candidates(rows[from_array(slots[inside])]))
    return [next(candidates) if held else [] for held in inside]


def pool_slots(
    case: Case, form: tuple[str, int], cache: torch.Tensor, pool: torch.Tensor, slots: np.ndarray
) -> np.ndarray:
    """Slots of a cache that was handed over, as slots of the layer's pool, by the addresses they stand at.

    `form`: layout and page size of the cache, which lies in the pool's memory. What lies elsewhere in it: `OUTSIDE`.
    """
    layout, page_size = form
    size = pool.element_size()
    slot_dim = 1 if layout == "NHD" else 2
    slot_stride = cache.stride(slot_dim)
    pool_slot = pool.stride(1 if case.layout == "NHD" else 2)
    if (
        cache.data_ptr() == pool.data_ptr()
        and slot_stride == pool_slot
        and (page_size == case.page_size or case.layout == "NHD")
        and cache.stride(0) == page_size * (pool.stride(0) // case.page_size)
    ):
        return slots
    page, offset = slots // page_size, slots % page_size
    address = cache.data_ptr() + (page * cache.stride(0) + offset * slot_stride) * size - pool.data_ptr()
    in_page = address % (pool.stride(0) * size)
    found = address // (pool.stride(0) * size) * case.page_size + in_page // (pool_slot * size)
    inside = (address >= 0) & (address < pool.shape[0] * pool.stride(0) * size)
    return np.where(inside & (in_page // (pool_slot * size) < case.page_size), found, OUTSIDE)
