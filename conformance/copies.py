"""Which rows a copy holds, told by their content: engines gather, sort and cut q, k and v before they call a library.

Rows of different tokens may be alike (a query of zeros, a constant V). Then the answer is a guess, and marked so.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import torch

UNKNOWN = -2
"""What stands for a row that is in no source: of a padded batch, or computed anew."""


@dataclass(frozen=True, slots=True)
class Source:
    """Rows that a copy may hold: `[n, heads, dim]`, and int64 `[n]`, what each is called."""

    rows: torch.Tensor
    names: np.ndarray


class Known:
    """The rows of some sources by their bits, in one dtype."""

    def __init__(self, sources: list[Source], dtype: torch.dtype) -> None:
        self._names: defaultdict[bytes, list[int]] = defaultdict(list)
        for source in sources:
            for bits, name in zip(_bits(source.rows.to(dtype)), source.names, strict=True):
                if int(name) not in self._names[bits]:
                    self._names[bits].append(int(name))

    def candidates(self, copy: torch.Tensor) -> list[list[int]]:
        """Of each row of a copy the names that it may go by."""
        return [self._names.get(bits, []) for bits in _bits(copy)]


def rows_in_order(candidates: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows of q: int64 names, like ones taken in their order; bool: whether each is sure, `UNKNOWN` is not.

    A row that comes twice may be one that pads the batch.
    """
    taken: defaultdict[int, int] = defaultdict(int)
    names = np.full(len(candidates), UNKNOWN, dtype=np.int64)
    for i, likely in enumerate(candidates):
        if likely:
            names[i] = likely[taken[likely[0]] % len(likely)]
            taken[likely[0]] += 1
    sure = [len(likely) == 1 and taken[likely[0]] == 1 for likely in candidates]
    return names, np.array(sure, dtype=np.bool_)


def keys_and_values(k: list[list[int]], v: list[list[int]]) -> tuple[np.ndarray, np.ndarray, bool]:
    """K and V of the same keys: a name that both may go by is taken. int64 names each, and whether all are sure."""
    names = np.full((2, len(k)), UNKNOWN, dtype=np.int64)
    sure = True
    for i, (of_k, of_v) in enumerate(zip(k, v, strict=True)):
        both = [name for name in of_k if name in of_v]
        if len(both) == 1:
            names[:, i] = both[0]
            continue
        sure &= not both and len(of_k) == len(of_v) == 1
        for row, likely in zip(names, (both or of_k, both or of_v), strict=True):
            if likely:
                row[i] = likely[0]
    return names[0], names[1], sure


def _bits(rows: torch.Tensor) -> list[bytes]:
    plain = rows.detach().contiguous()
    if not plain.numel():
        return [b""] * len(plain)
    return [row.tobytes() for row in plain.view(torch.uint8).reshape(len(plain), -1).numpy()]
