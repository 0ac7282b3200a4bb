"""Recorded attention calls in the case's own coordinates: which request's row read which slot of the pool."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from cases.model import Case
from cases.tensors import StepTensors
from conformance.execution import LayerRun
from fakes.recorder import Attended, Call, Span

OUTSIDE = -1
"""Slot of a key that does not stand in the layer's pool."""


@dataclass(frozen=True, slots=True)
class ReadSpan:
    """One request of one call: rows `first_row` .. of the layer's q, and the pool slot of each key of K and V."""

    first_row: int
    num_rows: int
    k_slots: np.ndarray
    v_slots: np.ndarray
    span: Span
    custom: np.ndarray | None


def read_spans(
    case: Case,
    attended: Attended,
    handed: LayerRun,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    out_loc: torch.Tensor | None = None,
) -> list[ReadSpan]:
    """Decode one call. `k_pool`, `v_pool`: the layer's pool, as it was handed over.

    `out_loc`: the slots that an engine's new tokens are stored to; a row of ragged K and V then counts as its slot.
    """
    base_row = _first_row(attended.q, handed.q)
    ragged = attended.layout == "ragged"
    stored_to = None if out_loc is None else out_loc.numpy()
    spans: list[ReadSpan] = []
    for index, span in enumerate(attended.spans):
        if ragged:
            k_slots = _ragged_rows(attended.k, handed.k, span.slots, stored_to)
            v_slots = _ragged_rows(attended.v, handed.v, span.slots, stored_to)
        else:
            k_slots = _pool_slots(case, attended, attended.k, k_pool, span.slots)
            v_slots = _pool_slots(case, attended, attended.v, v_pool, span.slots)
        custom = None if attended.custom is None else attended.custom[index]
        spans.append(
            ReadSpan(base_row + span.q_start, span.q_end - span.q_start, k_slots, v_slots, span, custom)
        )
    return spans


def is_plain(
    case: Case,
    tensors: StepTensors,
    call: Call,
    handed: LayerRun,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
) -> bool:
    """Whether one call does all that a layer asks, in the plain way: the usual case, told without decoding it."""
    a, mask, step = call.attended, case.mask, tensors.step
    if a is None or a.custom is not None or mask.custom is not None or mask.window is not None:
        return False
    if a.window_left >= 0 or a.window_right > 0 or len(a.spans) != len(step.requests):
        return False
    if (a.causal or a.window_right == 0) != mask.causal and any(n != 1 for n in step.qo_lens):
        return False
    if a.q.data_ptr() != handed.q.data_ptr() or a.q.stride() != handed.q.stride():
        return False
    if a.layout == "ragged":
        wanted, k, v = np.arange(len(tensors.tokens.uid)), handed.k, handed.v
    elif a.layout == case.layout and (a.layout == "NHD" or a.page_size == case.page_size):
        wanted, k, v = tensors.slots, k_pool, v_pool
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


def _first_row(q: torch.Tensor, handed: torch.Tensor) -> int:
    """Row of the layer's q at which the q of a call begins; a copy is taken to begin at row 0."""
    if handed.dim() != 3 or not handed.stride(0):
        return 0
    step = handed.stride(0) * handed.element_size()
    offset = q.data_ptr() - handed.data_ptr()
    return offset // step if 0 <= offset < step * handed.shape[0] else 0


def _ragged_rows(
    k: torch.Tensor, handed: torch.Tensor, rows: np.ndarray, stored_to: np.ndarray | None
) -> np.ndarray:
    """Rows of the layer's k that a call reads, or the slots that they are stored to."""
    if handed.numel() and k.data_ptr() != handed.data_ptr():
        step = handed.stride(0) * handed.element_size()
        offset = k.data_ptr() - handed.data_ptr()
        inside = 0 <= offset < step * handed.shape[0]
        rows = rows + offset // step if inside else np.full_like(rows, OUTSIDE)
    if stored_to is None:
        return rows
    known = (rows >= 0) & (rows < len(stored_to))
    return np.where(known, stored_to[np.where(known, rows, 0)], OUTSIDE)


def _pool_slots(
    case: Case, attended: Attended, cache: torch.Tensor, pool: torch.Tensor, slots: np.ndarray
) -> np.ndarray:
    """Slots of the cache that was handed over, as slots of the layer's pool, by the addresses they stand at."""
    size = pool.element_size()
    slot_dim = 1 if attended.layout == "NHD" else 2
    slot_stride = cache.stride(slot_dim)
    pool_slot = pool.stride(1 if case.layout == "NHD" else 2)
    if (
        cache.data_ptr() == pool.data_ptr()
        and slot_stride == pool_slot
        and (attended.page_size == case.page_size or case.layout == "NHD")
        and cache.stride(0) == attended.page_size * (pool.stride(0) // case.page_size)
    ):
        return slots
    page, offset = slots // attended.page_size, slots % attended.page_size
    address = cache.data_ptr() + (page * cache.stride(0) + offset * slot_stride) * size - pool.data_ptr()
    in_page = address % (pool.stride(0) * size)
    found = address // (pool.stride(0) * size) * case.page_size + in_page // (pool_slot * size)
    inside = (address >= 0) & (address < pool.shape[0] * pool.stride(0) * size)
    return np.where(inside & (in_page // (pool_slot * size) < case.page_size), found, OUTSIDE)
