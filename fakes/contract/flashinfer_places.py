"""Where appended tokens go, lengths by pages, and masks packed to bits."""

from __future__ import annotations

from typing import Any

import torch

from fakes.contract.paged_fi import bind, ints, rule
from fakes.contract.rule import Lab, Observation, refused, value


def _places(lab: Lab, nnz: int = 5, lens: Any = (7, 5), host: bool = False, **buffers: Any) -> Observation:
    device = "cpu" if host else lab.device
    indptr = ints([0, 3, 5]).to(device)
    made = {name: buffer.to(lab.device) for name, buffer in buffers.items()}
    seq_lens = torch.as_tensor(lens).to(lab.device)
    requests, positions = lab.library.get_batch_indices_positions(indptr, seq_lens, nnz, **made)
    found = requests.cpu().tolist(), positions.cpu().tolist()
    return Observation("value", f"{found[0]} {found[1]}")


def _places_strided(lab: Lab) -> Observation:
    """Lengths 7 and 5 in every other entry."""
    lens = ints([7, 99, 5, 99]).to(lab.device)[::2]
    indptr = ints([0, 3, 5]).to(lab.device)
    requests, positions = lab.library.get_batch_indices_positions(indptr, lens, 5)
    found = requests.cpu().tolist(), positions.cpu().tolist()
    return Observation("value", f"{found[0]} {found[1]}")


def _places_behind(lab: Lab) -> Observation:
    """Buffers of seven for five tokens."""
    return _places(
        lab, 7, batch_indices=torch.full((7,), 9, dtype=torch.int32), positions=torch.full((7,), 9).int()
    )


def _seq_lens(lab: Lab) -> Observation:
    indptr, last = ints([0, 2, 4, 4, 5]).to(lab.device), ints([3, 1, 0, 4]).to(lab.device)
    return Observation("value", str(lab.library.get_seq_lens(indptr, last, 4).cpu().tolist()))


MASK = [1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1]


def _bits(lab: Lab, order: str = "big", dtype: torch.dtype = torch.bool, count: int = 11) -> Observation:
    mask = torch.tensor(MASK[:count]).to(dtype).to(lab.device)
    return Observation("value", str(lab.library.packbits(mask, order).cpu().tolist()))


def _segments(
    lab: Lab, order: str = "big", dtype: torch.dtype = torch.bool, host: bool = False, shape: Any = (11,)
) -> Observation:
    mask = torch.tensor(MASK).to(dtype).reshape(shape).to(lab.device)
    indptr = ints([0, 4, 4, 7, 11]).to("cpu" if host else lab.device)
    bits, starts = lab.library.segment_packbits(mask, indptr, order)
    return Observation("value", f"{bits.cpu().tolist()} {starts.cpu().tolist()} {starts.dtype}")


PACKED = value("[176, 32, 208] [0, 1, 1, 2, 3] torch.int32")
RULES = (
    rule(
        "places",
        "The last token of a request is at its length - 1.",
        _places,
        value("[0, 0, 0, 1, 1] [4, 5, 6, 3, 4]"),
    ),
    rule(
        "places.int64",
        "Lengths are loaded as what they are.",
        bind(_places, lens=torch.tensor([7, 5], dtype=torch.int64)),
        value("[0, 0, 0, 1, 1] [4, 5, 6, 3, 4]"),
    ),
    rule(
        "places.behind",
        "What no request reaches stays as it was; from 0.7.2 on it is of request -1.",
        _places_behind,
        value("[0, 0, 0, 1, 1, 9, 9] [4, 5, 6, 3, 4, 9, 9]"),
        value("[0, 0, 0, 1, 1, -1, -1] [4, 5, 6, 3, 4, 9, 9]"),
    ),
    rule(
        "places.strided",
        "Triton is told no strides.",
        _places_strided,
        value("[0, 0, 0, 1, 1] [4, 5, 6, 97, 98]"),
        finding="fi.contiguous",
    ),
    rule(
        "places.buffer",
        "Buffers are int32.",
        bind(_places, batch_indices=torch.zeros(5, dtype=torch.int64)),
        refused("ValueError", "Invalid dtype of batch_indices"),
    ),
    rule(
        "places.host",
        "Triton takes device memory.",
        bind(_places, host=True),
        refused("ValueError", "cannot be accessed from Triton"),
    ),
    rule("seq-lens", "Full pages, and what the last one holds.", _seq_lens, value("[7, 5, 0, 4]")),
    rule("packbits", "numpy's packbits.", _bits, value("[179, 160]")),
    rule("packbits.little", "The same from the little end.", bind(_bits, "little"), value("[205, 5]")),
    rule(
        "packbits.int32", "What is no bool is converted.", bind(_bits, dtype=torch.int32), value("[179, 160]")
    ),
    rule(
        "packbits.order",
        "There are two orders.",
        bind(_bits, "middle"),
        refused("RuntimeError", "bitorder must be"),
    ),
    rule(
        "packbits.empty",
        "A grid of no blocks.",
        bind(_bits, count=0),
        refused("RuntimeError", "invalid argument"),
    ),
    rule("segment-packbits", "Each segment from a byte of its own.", _segments, PACKED),
    rule("segment-packbits.uint8", "Bytes of 0 and 1 are bools.", bind(_segments, dtype=torch.uint8), PACKED),
    rule(
        "segment-packbits.2d", "Memory is read, whatever its shape.", bind(_segments, shape=(1, 11)), PACKED
    ),
    rule(
        "segment-packbits.int32",
        "Before 0.7.4 memory is read byte by byte.",
        bind(_segments, dtype=torch.int32),
        value("[128, 0, 64] [0, 1, 1, 2, 3] torch.int32"),
        PACKED,
    ),
    rule(
        "segment-packbits.host",
        "Kernels read device memory.",
        bind(_segments, host=True),
        refused("RuntimeError", "input_indptr must be a CUDA tensor"),
    ),
)
