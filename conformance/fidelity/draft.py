"""`Draft`: the arguments of a call before it is made. All on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from conformance.fidelity.call import LibraryCall

WORKSPACE_BYTES = 32 << 20
LN2 = 0.6931471805599453


@dataclass(slots=True)
class Draft:
    """What one call hands over.

    `arrays`: index arrays and masks by their usual names. `tensors`: q, k, v (caches where there are pages,
    always NHD here), the states of a merge, or caches and what is stored in them. `options`: the other arguments, of
    `plan` where there is one. `late`: options of the older `forward`. `earlier`: index arrays of the plan that a stale
    call executes. `on_host`, `strided`: arrays or tensors that stay on the CPU, that are not contiguous. `expected`:
    what was meant, out float64 `[rows, num_qo_heads, head_dim]` and natural-log LSE float64 `[rows, num_qo_heads]`; of
    a store the slots of both caches, one after the other, and zeros.
    """

    call: LibraryCall
    arrays: dict[str, torch.Tensor]
    tensors: dict[str, torch.Tensor]
    options: dict[str, Any]
    expected: tuple[torch.Tensor, torch.Tensor]
    late: dict[str, Any] = field(default_factory=dict[str, Any])
    earlier: dict[str, torch.Tensor] | None = None
    on_host: set[str] = field(default_factory=set[str])
    strided: set[str] = field(default_factory=set[str])
    planned: bool = True
    workspace_bytes: int = WORKSPACE_BYTES
    graph_batch: int = 0
    """Requests that the graph wrapper's buffers have room for."""
    graph_indices: int = 0
    buffer_dtype: torch.dtype = torch.int32


def csr(kv_lens: Iterable[int], pages: list[list[int]], page_size: int) -> dict[str, torch.Tensor]:
    """FlashInfer's page arrays for these lengths."""
    counts = [len(p) for p in pages]
    last = [
        length - (count - 1) * page_size if count else 0
        for length, count in zip(kv_lens, counts, strict=True)
    ]
    return {
        "kv_indptr": running_sum(counts),
        "indices": ints(page for p in pages for page in p),
        "last_page_len": ints(last),
    }


def ints(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def edges(lens: Iterable[int]) -> list[int]:
    """Where each of consecutive parts begins, and where the last ends."""
    found = [0]
    for length in lens:
        found.append(found[-1] + length)
    return found


def running_sum(lens: Iterable[int]) -> torch.Tensor:
    """int32, from 0."""
    return torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
