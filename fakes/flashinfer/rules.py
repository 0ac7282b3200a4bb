"""Strict mode's findings: what FlashInfer would take without a word and get wrong, or right by luck only.

Each is recorded against the latest call. Faithful mode records nothing.
"""

from __future__ import annotations

import numpy as np
import torch

from fakes import cuda, recorder, releases
from fakes.flashinfer.arrays import words
from fakes.recorder import Recorder


def strict() -> Recorder | None:
    """The open recorder, if it is strict."""
    record = recorder.current()
    return record if record is not None and record.strict else None


def array(record: Recorder, argument: str, tensor: torch.Tensor) -> np.ndarray | None:
    """Dtype of an index array; its values where they mean what they should."""
    plain = cuda.host(tensor)
    if plain.dtype is not torch.int32:
        record.find(
            "fi.int32",
            "arrays",
            argument,
            f"{argument} is {plain.dtype}, must be torch.int32: its memory is read as 32-bit words, so "
            "that element 1 is the high half of element 0",
        )
        return None
    return plain.reshape(-1).numpy()


def strides(record: Recorder, planned: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    """Arrays that are read in place, without their strides, up to 0.7.4, which makes them contiguous.

    `planned`: those whose host copy the planner reads; a device array's copy is contiguous. `loaded`: those that the
    kernel reads where `plan` leaves them: a copy is contiguous, a device array itself is not copied.
    """
    if releases.at_least("flashinfer", "0.7.4"):
        return
    in_place = {name: tensor for name, tensor in planned.items() if not cuda.on_device(tensor)}
    in_place |= {name: tensor for name, tensor in loaded.items() if cuda.on_device(tensor)}
    for argument, tensor in in_place.items():
        plain = cuda.host(tensor)
        if plain.dtype is torch.int32 and not plain.is_contiguous():
            reader = "planner" if argument in planned and not cuda.on_device(tensor) else "kernel"
            record.find(
                "fi.contiguous",
                "arrays",
                argument,
                f"{argument} has stride {plain.stride()}, must be contiguous: the {reader} does not read strides",
            )


def loaded(
    kernel: str, graph: bool, indices: str, arrays: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Which arrays a kernel reads where the caller has them: fa3 page ids alone, for the rest is in its plan; in graph
    mode none, for they are copied to buffers. `indices` names the page ids."""
    if graph:
        return {}
    return {name: tensor for name, tensor in arrays.items() if kernel != "fa3" or name == indices}


def indptr(record: Recorder, argument: str, values: np.ndarray | None, batch_size: int, unit: str) -> bool:
    """An indptr array: one entry more than requests, from 0, never falling. True where all holds."""
    if values is None:
        return False
    if values.size != batch_size + 1:
        record.find(
            "fi.indptr-length",
            "arrays",
            argument,
            f"{argument} has {values.size} entries for {batch_size} requests, must have {batch_size + 1}: "
            "is its leading 0 missing?",
        )
        return False
    if values[0] != 0:
        record.find(
            "fi.indptr-start",
            "arrays",
            argument,
            f"{argument}[0] is {values[0]}, must be 0: the first {values[0]} {unit} belong to no request",
            0,
        )
        return False
    falls = np.diff(values) < 0
    if falls.any():
        i = int(falls.argmax())
        record.find(
            "fi.indptr-falls",
            "arrays",
            argument,
            f"{argument}[{i + 1}] is {values[i + 1]}, less than {argument}[{i}] = {values[i]}: it must "
            "not fall",
            i,
        )
        return False
    return True


def pages(
    record: Recorder,
    names: tuple[str, str, str],
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    batch_size: int,
    page_size: int,
    seq_lens: torch.Tensor | None,
) -> None:
    """The page table in CSR form: the three arrays, and `seq_lens` beside them."""
    starts = array(record, names[0], kv_indptr)
    ids = array(record, names[1], indices)
    tails = array(record, names[2], last_page_len)
    good = indptr(record, names[0], starts, batch_size, "page ids")
    if starts is not None and ids is not None and good:
        if starts[-1] > ids.size:
            short = int((starts[1:] > ids.size).argmax())
            record.find(
                "fi.indices-short",
                "arrays",
                names[1],
                f"{names[1]} has {ids.size} entries, {names[0]}[-1] is {starts[-1]}: what lies behind is "
                "read",
                short,
            )
        used = ids[: starts[-1]]
        if used.size and int(used.min()) < 0:
            at = int((used < 0).argmax())
            record.find(
                "fi.page-range",
                "arrays",
                names[1],
                f"{names[1]}[{at}] is {used[at]}, must be a page id, 0 or more",
                int(np.searchsorted(starts, at, side="right")) - 1,
            )
    if tails is None:
        return
    if tails.size != batch_size:
        record.find(
            "fi.last-page-length",
            "arrays",
            names[2],
            f"{names[2]} has {tails.size} entries, must have one for each of {batch_size} requests",
        )
        return
    counts = np.diff(starts) if starts is not None and good else None
    wrong = (tails < 1) | (tails > page_size)
    if counts is not None:
        wrong &= counts > 0
    if wrong.any():
        i = int(wrong.argmax())
        cause = f": {_last_page_cause(int(tails[i]), page_size, i)}"
        record.find(
            "fi.last-page-range",
            "arrays",
            names[2],
            f"{names[2]}[{i}] is {tails[i]}, must be 1..{page_size}{cause}",
            i,
        )
    elif counts is not None and seq_lens is not None:
        _seq_lens(record, seq_lens, np.where(counts > 0, (counts - 1) * page_size + tails, 0))


def _last_page_cause(tail: int, page_size: int, request: int) -> str:
    if tail == 0:
        full = f"so its last page is full ({page_size})"
        return f"request {request}'s length is a multiple of the page size, {full}"
    if tail < 0:
        return "a length cannot be negative"
    return f"the last of its pages holds at most {page_size} tokens; is it the request's whole length?"


def _seq_lens(record: Recorder, seq_lens: torch.Tensor, lens: np.ndarray) -> None:
    given = cuda.host(seq_lens).reshape(-1).numpy()
    if given.size != lens.size:
        record.find(
            "fi.seq-lens",
            "arrays",
            "seq_lens",
            f"seq_lens has {given.size} entries, must have one for each of {lens.size} requests",
        )
    elif not np.array_equal(given, lens):
        i = int((given != lens).argmax())
        record.find(
            "fi.seq-lens",
            "arrays",
            "seq_lens",
            f"seq_lens[{i}] is {given[i]}, the page arrays give request {i} {lens[i]} tokens: some "
            "kernels read one, some the other",
            i,
        )


def mask_size(record: Recorder, argument: str, given: int, wanted: int) -> None:
    if given != wanted:
        record.find(
            "fi.mask-size",
            "arrays",
            argument,
            f"{argument} has {given} elements, sum of qo_len * kv_len is {wanted}: what lies behind is read",
        )


def pool(
    record: Recorder, argument: str, indices: torch.Tensor, used: int, num_pages: int, page_size: int
) -> None:
    """Page ids within the pool that is handed over. `used`: entries that the batch reads."""
    plain = cuda.host(indices)
    if plain.dtype is not torch.int32:
        return
    ids = words(plain)[:used]
    if ids.size and int(ids.max()) >= num_pages:
        at = int((ids >= num_pages).argmax())
        hint = ""
        if page_size > 1 and ids[at] // page_size < num_pages:
            hint = f": is it a token location? divided by the page size it is {ids[at] // page_size}"
        record.find(
            "fi.page-range",
            "arrays",
            argument,
            f"{argument}[{at}] is {ids[at]}, the pool has {num_pages} pages{hint}",
        )


def order(record: Recorder, rule: str, argument: str, message: str) -> None:
    record.find(rule, "order", argument, message)
