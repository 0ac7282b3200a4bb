"""Attention weights in words: which of several causes may be named."""

from __future__ import annotations

import numpy as np
import pytest

from cases.model import Case, KernelRequest, Mask, Request, Step
from conformance.compare import apart
from conformance.question import Question
from conformance.weights import Weights, describe


def engine(kv_len: int, window: int | None = None, extend: int = 1) -> Case:
    return Case((Step((Request(kv_len - extend, extend, 0),)),), mask=Mask(window=window))


def sentences(case: Case, got: list[float], want: list[float], kv_head: float = 0.0) -> list[str]:
    """Of a request's last row, by the weight of each position."""
    tensors = Question(case).step(0)
    rows, keys = tensors.step.num_rows, len(want)
    weights = [np.zeros((rows, 1, keys)) for _ in range(2)]
    for array, values in zip(weights, (got, want), strict=True):
        array[-1, 0] = values
    lines = describe(
        Weights(
            case=case,
            mask=case.mask,
            tensors=tensors,
            slots=np.arange(keys),
            got=weights[0],
            want=weights[1],
            kv_heads=np.full((rows, 1), kv_head),
            tolerance=1e-7,
        ),
        None,
    )
    return [line.partition("head 0: ")[2] for line in lines]


@pytest.mark.parametrize(
    ("kv_len", "window", "got", "cause"),
    [
        (4, 2, [0.0, 0.2, 0.3, 0.5], ": one key too many on the left, window off by one"),
        # with window + 1 keys, one too many is all there are
        (3, 2, [0.2, 0.3, 0.5], ": one key too many on the left, window off by one or not applied"),
        (
            4,
            2,
            [0.1, 0.1, 0.3, 0.5],
            ": it reads all from position 0 on, the window is not applied or too wide",
        ),
        (4, 1, [0.0, 0.2, 0.3, 0.5], ""),
    ],
)
def test_a_window_that_is_not_applied(kv_len: int, window: int, got: list[float], cause: str) -> None:
    want = [0.0] * (kv_len - window) + [1 / window] * window
    (line,) = sentences(engine(kv_len, window), got, want)
    assert line.partition("with weight ")[2].partition(":")[0] + cause == line.partition("with weight ")[2]


def test_a_window_is_no_cause_where_there_is_none() -> None:
    case = Case(
        (Step((KernelRequest(1, 3),)),), level="kernel", num_layers=1, mask=Mask(causal=False, custom=4)
    )
    custom = Question(case).step(0).custom
    assert custom is not None
    assert np.array_equal(custom[0][0], [False, True, True])
    (line,) = sentences(case, [0.2, 0.4, 0.4], [0.0, 0.5, 0.5])
    assert "window" not in line


@pytest.mark.parametrize(
    ("case", "got", "cause"),
    [
        (engine(4), [0.0, 0.0, 0.0, 1.0], "its 3 keys at positions 0 to 2, all of its cached prefix"),
        (engine(4, extend=2), [0.5, 0.5, 0.0, 0.0], "its 2 keys at positions 2, 3, the tokens of this step"),
        (engine(4), [0.0, 0.0, 0.0, 0.0], "its 4 keys at positions 0 to 3, all that it must read"),
        (engine(1), [0.0], "its key at position 0, the only one that it must read"),
        (engine(4), [0.0, 0.4, 0.3, 0.3], "its key at position 0, one key too few on the left"),
        (
            Case((Step((KernelRequest(1, 4),)),), level="kernel", num_layers=1),
            [0.0, 0.0, 0.0, 1.0],
            "its 3 keys at positions 0 to 2",
        ),
        (
            Case((Step((KernelRequest(1, 4),)),), level="kernel", num_layers=1),
            [0.0, 0.0, 0.0, 0.0],
            "its 4 keys at positions 0 to 3, all that it must read",
        ),
    ],
)
def test_what_is_missing(case: Case, got: list[float], cause: str) -> None:
    keys = case.steps[0].kv_lens[0]
    assert sentences(case, got, [1 / keys] * keys)[0] == f"does not read {cause}"


def test_numbers_differ_in_print_where_they_differ() -> None:
    assert apart(0.20791, 0.20792, 4) == "0.20791, must be 0.20792"
    assert apart(0.25, 0.5, 4) == "0.25, must be 0.5"
    assert apart(1.0, 1.0, 4) == "1, must be 1"
    (line,) = sentences(engine(2), [0.207899, 0.792101], [0.207901, 0.792099])
    assert "position 0: 0.207899, must be 0.207901" in line


def test_keys_of_another_head_are_told_by_their_values() -> None:
    (line,) = sentences(engine(2), [0.25, 0.75], [0.5, 0.5], kv_head=2.0)
    assert line == "has wrong weights, and the values of KV head 2, must have those of KV head 0"
    (line,) = sentences(engine(2), [0.25, 0.75], [0.5, 0.5], kv_head=0.4)
    assert "a mixture of KV heads (their mean is 0.4)" in line
