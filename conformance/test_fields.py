"""Which array is wrong, and why: the sentences that a user reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.model import Case, Request, Step
from conformance.fields import wrong_fields
from conformance.question import Question
from fakes.recorder import Call, TensorRecord

PAGE = 4
CASE = Case(
    steps=(
        Step(
            requests=(
                Request(cached_len=5, extend_len=3, uid=0),
                Request(cached_len=0, extend_len=2, uid=1),
                Request(cached_len=8, extend_len=1, uid=2),
            )
        ),
    ),
    page_size=PAGE,
)
RIGHT: dict[str, Any] = {
    "qo_indptr": [0, 3, 5, 6],
    "paged_kv_indptr": [0, 2, 3, 6],
    "paged_kv_indices": [0, 1, 2, 3, 4, 5],
    "paged_kv_last_page_len": [4, 2, 1],
    "cache_seqlens": [8, 2, 9],
    "page_table": [[0, 1, 7], [2, 7, 7], [3, 4, 5]],
    "cu_seqlens_k": [0, 8, 10, 19],
}


def sentences(**given: Any) -> list[str]:
    arguments = {
        name: TensorRecord.of(torch.tensor(values, dtype=torch.int32)) for name, values in given.items()
    }
    call = Call(0, "flashinfer", "plan", "plan", 1, arguments, None)
    return [f.message for f in wrong_fields(CASE, Question(CASE).step(0), None, call, PAGE)]


def test_right_arrays_are_not_named() -> None:
    assert sentences(**RIGHT) == []


@pytest.mark.parametrize(
    ("name", "values", "sentence"),
    [
        ("qo_indptr", [3, 5, 6], "qo_indptr lacks its leading 0: it is [3, 5, 6], must be [0, 3, 5, 6]"),
        ("qo_indptr", [0, 3, 6, 6], "qo_indptr[2] is 6, must be 5"),
        (
            "paged_kv_indptr",
            [0, 8, 10, 19],
            "paged_kv_indptr[1] is 8, must be 2: it counts tokens, must count pages",
        ),
        (
            "paged_kv_last_page_len",
            [0, 2, 1],
            "paged_kv_last_page_len[0] is 0, must be 4: length 8 is a multiple of the page size, "
            "so the last page is full",
        ),
        (
            "paged_kv_indices",
            [0, 4, 8, 12, 16, 20],
            "paged_kv_indices[1] (page 1 of request 0) is 4, must be 1: a token location, not a page number "
            "(divide it by the page size 4)",
        ),
        ("paged_kv_indices", [0, 1, 2], "paged_kv_indices has 3 entries, must have 6"),
        (
            "cache_seqlens",
            [5, 2, 9],
            "cache_seqlens[0] is 5, must be 8: the tokens of this step are not counted",
        ),
        ("cache_seqlens", [3, 2, 9], "cache_seqlens[0] is 3, must be 8: the cached prefix is not counted"),
        (
            "page_table",
            [[0, 1, 7], [0, 7, 7], [3, 4, 5]],
            "page_table[1, 0] is 0, must be 2: a page of request 0",
        ),
        (
            "page_table",
            [[0, 1], [2, 7], [3, 4]],
            "page_table has 2 columns, request 2 needs 3 for its 9 tokens",
        ),
        ("page_table", [[0, 1, 7]], "page_table has shape (1, 3), must have 3 rows"),
    ],
)
def test_wrong_array_is_named_with_its_cause(name: str, values: list[Any], sentence: str) -> None:
    assert sentences(**RIGHT | {name: values}) == [sentence]
