"""Every validity rule of the record, broken once; and what the record says about itself."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cases import Case, Heads, KernelRequest, Mask, Request, Step

ONE = Request()
STEP = Step((ONE,))
KERNEL = {"steps": (Step((KernelRequest(2, 3),)),), "level": "kernel"}

BROKEN: dict[str, tuple[type, dict[str, Any]]] = {
    "num_qo_heads 5 is not a multiple of num_kv_heads 2": (Heads, {"num_qo_heads": 5, "num_kv_heads": 2}),
    "a custom mask stands alone: causal must be false and window null": (Mask, {"custom": 1}),
    "window_layers without a window": (Mask, {"window_layers": (0,)}),
    "window_layers [1, 0] do not rise": (Mask, {"window": 2, "window_layers": (1, 0)}),
    "window_layers names layer 2, num_layers is 2": (
        Case,
        {"steps": (STEP,), "mask": Mask(window=2, window_layers=(2,))},
    ),
    "window_layers names every layer: leave it out": (
        Case,
        {"steps": (STEP,), "mask": Mask(window=2, window_layers=(0, 1))},
    ),
    "window_layers is for a case of level engine": (
        Case,
        KERNEL | {"mask": Mask(window=2, window_layers=(0,)), "num_layers": 2},
    ),
    "phase decode does not go with kind mixed": (
        Step,
        {"requests": (ONE,), "phase": "decode", "kind": "mixed"},
    ),
    "phase prefill does not go with kind decode": (Step, {"requests": (ONE,), "kind": "decode"}),
    "uid 0 stands twice in one step": (Step, {"requests": (ONE, Request(1, 2))}),
    "every extend_len must be 1": (
        Step,
        {"requests": (Request(0, 2),), "phase": "decode", "kind": "decode"},
    ),
    "every qo_len must be 1": (
        Step,
        {"requests": (KernelRequest(0, 2),), "phase": "decode", "kind": "decode"},
    ),
    "a verify step checks equally many draft tokens per request": (
        Step,
        {"requests": (Request(4, 2), Request(4, 3, 1)), "kind": "verify"},
    ),
    "max_seq_len 2 is below the longest kv_len 3": (
        Case,
        {"steps": (Step((Request(0, 3),)),), "max_seq_len": 2},
    ),
    "kv_len 1048577 is above the limit of 1048576 tokens": (
        Case,
        {"steps": (Step((Request(1 << 20, 1),)),)},
    ),
    "kv_dtype bfloat16 is neither dtype float16 nor an fp8 type": (
        Case,
        {"steps": (STEP,), "kv_dtype": "bfloat16"},
    ),
    "step 1 is too large: its tensors hold 51540688897 numbers, must be at most 4294967296": (
        Case,
        {"steps": (STEP, Step((Request(0, 1 << 20),))), "heads": Heads(4, 4, 2048, 2048), "num_layers": 1},
    ),
    "k_scale and v_scale belong to an fp8 KV cache": (Case, {"steps": (STEP,), "v_scale": 2.0}),
    "a case of level engine is causal": (Case, {"steps": (STEP,), "mask": Mask(causal=False)}),
    "a case of level kernel holds KernelRequests only": (Case, {"steps": (STEP,), "level": "kernel"}),
    "a case of level engine holds Requests only": (Case, {"steps": KERNEL["steps"]}),
    "cached_len 4 is more than the 3 tokens it had before": (
        Case,
        {"steps": (Step((Request(0, 3),)), Step((Request(4, 1),)))},
    ),
    "prefix_len without prefix_of": (Case, {"steps": (Step((Request(4, 1, 0, None, 2),)),)}),
    "prefix_of 7 is no other request of this step": (
        Case,
        {"steps": (Step((Request(4, 1, 0, 7, 2),)),)},
    ),
    "prefix_of 0 is no other request of this step": (
        Case,
        {"steps": (Step((Request(4, 1, 0, 0, 2),)),)},
    ),
    "prefix_of 1 borrows itself; name the owner": (
        Case,
        {"steps": (Step((Request(4, 1), Request(4, 1, 1, 0, 2), Request(4, 1, 2, 1, 2))),)},
    ),
    "prefix_len 3 is no positive multiple of page_size 2": (
        Case,
        {"steps": (Step((Request(4, 1), Request(4, 1, 1, 0, 3))),), "page_size": 2},
    ),
    "prefix_len 4 exceeds what both requests have stored": (
        Case,
        {"steps": (Step((Request(3, 1), Request(4, 1, 1, 0, 4))),), "page_size": 2},
    ),
}


@pytest.mark.parametrize(("sentence", "broken"), BROKEN.items(), ids=list(BROKEN))
def test_broken_rule(sentence: str, broken: tuple[type, dict[str, Any]]) -> None:
    record, fields = broken
    with pytest.raises(ValidationError) as caught:
        record(**fields)
    assert sentence in caught.value.errors()[0]["msg"]


def test_records_are_frozen_and_hashable() -> None:
    case = Case((STEP,))
    with pytest.raises(AttributeError, match="cannot assign to field"):
        case.page_size = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert len({case, Case((STEP,))}) == 1


def test_derived_lengths() -> None:
    step = Step((Request(4, 3), Request(0, 6, 1)))
    assert (step.num_rows, step.qo_lens, step.kv_lens) == (9, (3, 6), (7, 6))
    assert [r.stored_len for r in step.requests] == [4, 0]
    assert KernelRequest(2, 5).stored_len == 5


def test_derived_settings() -> None:
    case = Case((Step((Request(4, 3),)),), page_size=4)
    assert (case.table_width, case.scale, case.cache_dtype) == (11, 0.125, "float16")
    fixed = Case((STEP,), max_seq_len=32, sm_scale=0.5, kv_dtype="float8_e5m2", k_scale=0.5)
    assert (fixed.table_width, fixed.scale, fixed.cache_dtype) == (32, 0.5, "float8_e5m2")
    assert fixed.stored_as_fp8
    assert not case.stored_as_fp8


def test_a_request_may_be_rewound() -> None:
    """Rejected drafts: the next step starts behind fewer tokens than stood there."""
    case = Case((Step((Request(4, 3),), kind="verify"), Step((Request(5, 3),), kind="verify")))
    assert [step.kv_lens for step in case.steps] == [(7,), (8,)]
