"""What a row read, against what it must read: the sentence that a user reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cases.model import Case, Request, Step
from conformance.decode import OUTSIDE, ReadSpan
from conformance.question import Question
from conformance.reading import compare
from fakes.recorder import Attended, Span

CASE = Case((Step((Request(2, 1, 0), Request(0, 1, 1)), "decode", "decode"),))
FAR = OUTSIDE


def sentence(first: list[int], layout: str = "NHD") -> str | None:
    """About row 0, which must read slots 0, 1 and 2; row 1 reads its own slot 3."""
    none = torch.zeros(0)
    decoded: list[tuple[Attended, ReadSpan]] = []
    for row, slots in enumerate((first, [3])):
        read = np.array(slots, dtype=np.int64)
        span = Span(row, row + 1, read)
        attended = Attended(none, none, none, layout, 1, (span,), True, -1, -1, 0.0, 1.0)
        decoded.append((attended, ReadSpan(np.array([row]), read, read, span, None)))
    wrong = compare(CASE, Question(CASE).step(0), CASE.mask, decoded)
    return None if wrong is None else wrong[1].removeprefix("row 0 (request 0, position 2) ")


def test_right_keys_are_not_named() -> None:
    assert sentence([0, 1, 2]) is None


@pytest.mark.parametrize(
    ("slots", "words"),
    [
        ([0, 1, 2, 3], "reads a key that is not its own: slot 3 (request 1's)"),
        (
            [0, 1, 2, 5, 3, 5],
            "reads 3 keys that are not its own, among them slot 3 (request 1's)",
        ),
        (
            [FAR, FAR, FAR],
            "does not read 3 keys (positions 0, 1, 2), reads 3 keys outside of this layer's pool",
        ),
        (
            [0, 1, FAR, 5],
            "does not read the key at position 2, reads a key that is not its own: slot 5 (nobody's), "
            "reads a key outside of this layer's pool",
        ),
        ([0, 1, 2, 2], "reads the key at position 2 more than once"),
    ],
)
def test_every_key_counts_and_those_of_another_pool_are_told_apart(slots: list[int], words: str) -> None:
    assert sentence(slots) == words


def test_ragged_keys_may_stand_in_the_layers_own_k() -> None:
    assert sentence([0, 1, 2, FAR], "ragged") == "reads a key outside of this layer's pool, k and v"
