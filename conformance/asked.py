"""What the arrays of a batch are made from, and which of their entries a library reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cases.model import Case, Mask
from cases.tensors import StepTensors
from fakes.recorder import Call
from reference import visible


@dataclass(frozen=True, slots=True)
class Batch:
    qo_lens: np.ndarray
    kv_lens: np.ndarray
    slots: tuple[np.ndarray, ...]
    page_size: int
    engine: bool
    seen: tuple[np.ndarray, ...]
    """Of each request, bool `[kv_len]`: the keys that a row of it sees."""
    masked: bool
    """The call has a custom mask."""
    appends: bool
    """The call stores the new tokens itself: lengths beside the cache are those before it."""
    read_lens: tuple[int, ...]
    """How many keys of each request the call was seen to read; empty where that is not known."""

    @property
    def cache_lens(self) -> np.ndarray:
        """Keys that the cache holds when the call begins."""
        return self.kv_lens - self.qo_lens if self.appends else self.kv_lens

    @property
    def page_counts(self) -> np.ndarray:
        return -(-self.kv_lens // self.page_size)

    def pages(self, request: int) -> np.ndarray:
        return self.slots[request][:: self.page_size] // self.page_size

    def read_pages(self, request: int) -> np.ndarray:
        """bool, one a page: those with a key that a row sees."""
        seen = self.seen[request]
        whole = np.zeros(int(self.page_counts[request]) * self.page_size, dtype=bool)
        whole[: len(seen)] = seen
        return np.asarray(whole.reshape(-1, self.page_size).any(axis=1))


def _seen(mask: Mask, tensors: StepTensors) -> Iterator[np.ndarray]:
    for i, r in enumerate(tensors.step.requests):
        if not r.qo_len or (mask.custom is None and mask.window is None):
            yield np.full((r.kv_len,), r.qo_len > 0)
            continue
        custom = None if tensors.custom is None else tensors.custom[i]
        yield visible(r.qo_len, r.kv_len, mask, custom).any(dim=0).numpy()


def batch_of(case: Case, tensors: StepTensors, call: Call, given: Mapping[str, Any], page_size: int) -> Batch:
    """The batch that a call (with its plan's arguments: `given`) is about."""
    step = tensors.step
    spans = () if call.attended is None else call.attended.spans
    layer = -1 if call.at is None else call.at.layer
    return Batch(
        np.array(step.qo_lens),
        np.array(step.kv_lens),
        tensors.placed.slots,
        page_size,
        case.level == "engine",
        tuple(_seen(case.mask.of_layer(layer), tensors)),
        any(given.get(name) is not None for name in ("custom_mask", "packed_custom_mask")),
        case.level == "engine" and "k_cache" in given and given.get("k") is not None,
        tuple(len(span.slots) for span in spans) if len(spans) == len(step.qo_lens) else (),
    )
