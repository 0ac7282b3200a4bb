"""Which array is wrong, and why: the sentences that a user reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cases.model import Case, KernelRequest, Mask, Request, Step
from conformance.fields import wrong_fields
from conformance.question import Question
from fakes.recorder import Attended, Call, Span, TensorRecord

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


def sentences(case: Case = CASE, attended: Attended | None = None, /, **given: Any) -> list[str]:
    arguments = {
        name: TensorRecord.of(torch.tensor(values, dtype=torch.int32)) for name, values in given.items()
    }
    call = Call(0, "flashinfer", "plan", "plan", 1, arguments, None, attended=attended)
    return [f.message for f in wrong_fields(case, Question(case).step(0), None, call, case.page_size)]


def kernel_case(*requests: tuple[int, int], mask: Mask | None = None, page_size: int = PAGE) -> Case:
    """Requests of (qo_len, kv_len)."""
    steps = (Step(tuple(KernelRequest(*r, uid=uid) for uid, r in enumerate(requests))),)
    return Case(steps, page_size=page_size, level="kernel", num_layers=1, mask=mask or Mask())


def decode(*kv_lens: int, page_size: int = PAGE) -> Case:
    requests = tuple(Request(n - 1, 1, uid) for uid, n in enumerate(kv_lens))
    return Case((Step(requests, "decode", "decode"),), page_size=page_size)


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


@pytest.mark.parametrize("tail", [0, PAGE, -3, 99])
def test_a_last_page_that_no_request_has_is_not_read(tail: int) -> None:
    case = kernel_case((1, 8), (1, 0), (1, 2))
    assert sentences(case, paged_kv_last_page_len=[4, tail, 2]) == []
    assert sentences(case, paged_kv_last_page_len=[1, tail, 2]) == [
        "paged_kv_last_page_len[0] is 1, must be 4"
    ]


def test_a_custom_mask_counts_the_last_page_of_a_request_without_pages() -> None:
    case = kernel_case((1, 8), (1, 0), (0, 0), mask=Mask(causal=False, custom=1))
    assert sentences(case, last_page_len=[4, 4, 9], custom_mask=[1] * 8) == []
    assert sentences(case, last_page_len=[4, 0, 9], custom_mask=[1] * 8) == [
        "last_page_len[1] is 0, must be 4: request 1 has no pages, and its part of the mask is empty only then"
    ]


def test_what_no_row_reads_is_not_blamed() -> None:
    case = kernel_case((1, 5), (0, 8), (0, 3))
    assert (
        sentences(
            case,
            page_table=[[0, 1], [99, -1], [7, 7]],
            paged_kv_indices=[0, 1, 99],
            paged_kv_last_page_len=[1, 3, 0],
            cache_seqlens=[5, 0, 0],
        )
        == []
    )


def test_pages_before_the_window_are_not_read() -> None:
    case = kernel_case((2, 12), (1, 3), mask=Mask(window=4))
    assert sentences(case, page_table=[[9, 1, 2], [3, 9, 9]], indices=[9, 1, 2, 3]) == []
    assert sentences(case, page_table=[[9, 9, 2], [3, 9, 9]]) == ["page_table[0, 1] is 9, must be 1"]


def test_sinks_are_named() -> None:
    assert sentences(**RIGHT, sinks=[0]) == [
        "plan is given sinks, which no case has: they take weight from every key"
    ]


def test_entries_behind_the_batch_are_not_read() -> None:
    behind = {name: [*values, 77] for name, values in RIGHT.items() if name != "page_table"}
    assert sentences(**behind, page_table=[*RIGHT["page_table"], [77, 77, 77]]) == []


def test_lengths_that_a_kernel_has_not_read_are_not_blamed() -> None:
    """fa2 reads the last page's length, fa3 `seq_lens`: what was read says which."""
    case = decode(5, 2)
    none = torch.zeros(0)
    for lens, blamed in (((5, 2), []), ((6, 2), ["seq_lens[0] is 9, must be 5"])):
        spans = tuple(Span(i, i + 1, np.arange(n)) for i, n in enumerate(lens))
        attended = Attended(none, none, none, "NHD", PAGE, spans, True, -1, -1, 0.0, 1.0)
        assert sentences(case, attended, seq_lens=[9, 9]) == blamed


@pytest.mark.parametrize(
    ("case", "name", "values", "sentence"),
    [
        # rounded to float16: one token less, which is no token of this step's
        (decode(2049, 3), "cache_seqlens", [2048, 3], "cache_seqlens[0] is 2048, must be 2049"),
        # two causes, each of which fits
        (
            Case((Step((Request(4, 4, 0), Request(2, 2, 1))),), page_size=PAGE),
            "cache_seqlens",
            [4, 2],
            "cache_seqlens[0] is 4, must be 8",
        ),
        # the first entry alone fits
        (CASE, "cache_seqlens", [5, 7, 9], "cache_seqlens[0] is 5, must be 8"),
        # a kernel's keys are no cached prefix and no new tokens
        (kernel_case((3, 8)), "cache_seqlens", [5], "cache_seqlens[0] is 5, must be 8"),
        (kernel_case((3, 8)), "cache_seqlens", [3], "cache_seqlens[0] is 3, must be 8"),
        (CASE, "paged_kv_indptr", [0, 8, 9, 9], "paged_kv_indptr[1] is 8, must be 2"),
        (
            CASE,
            "paged_kv_last_page_len",
            [0, 1, 1],
            "paged_kv_last_page_len[0] is 0, must be 4",
        ),
        # page 0's own number is its location: what is small is no location of it
        (
            CASE,
            "page_table",
            [[3, 1], [2, 7], [3, 4]],
            "page_table[0, 0] is 3, must be 0: a page of request 2",
        ),
        # the page of request 1 stands one entry later, behind one that is nobody's
        (
            decode(3, 3, page_size=3),
            "paged_kv_indices",
            [0, 3, 1],
            "paged_kv_indices[1] (page 0 of request 1) is 3, must be 1",
        ),
        (decode(2, 2, page_size=2), "paged_kv_indices", [0, 2], "is 2, must be 1"),
        (decode(9), "page_table", [[0, 2, 2]], "page_table[0, 1] is 2, must be 1: its page 2"),
        (
            decode(4, 30),
            "page_table",
            [[0] * 8, [4, 5, 6, 7, 8, 9, 10, 11]],
            "is 4, must be 1: a token location, not a page number (divide it by the page size 4)",
        ),
    ],
)
def test_a_cause_is_claimed_only_where_it_alone_explains_all(
    case: Case, name: str, values: list[Any], sentence: str
) -> None:
    found = [s for s in sentences(case, **{name: values}) if "columns" not in s]
    assert len(found) == 1
    assert found[0].endswith(sentence)
