"""Windows that some layers have and others have not: each layer's answer, and each layer's fault, is its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from backends.contract import Capabilities, EngineContext
from backends.fa import FlashAttentionBackend
from backends.registry import BackendSpec
from cases.model import Case, Mask, Request, Step
from cases.wanted import Variant
from conformance.examine import examine
from conformance.question import Question
from conformance.render import setting
from conformance.session import Session
from conformance.support import unsupported

MIXED = Case(
    (Step((Request(9, 2, 0), Request(0, 6, 1))),),
    num_layers=3,
    page_size=4,
    mask=Mask(window=3, window_layers=(0, 2)),
)
DECLARED = FlashAttentionBackend.capabilities


def test_each_layer_is_answered_by_its_own_mask() -> None:
    question = Question(MIXED)
    for layer, mask in enumerate((Mask(window=3), Mask(), Mask(window=3))):
        one = Question(replace(MIXED, mask=mask), question.tensors)
        got, want = question.answer(0, layer), one.answer(0, layer)
        assert torch.allclose(got.state.out, want.state.out, rtol=0, atol=1e-13)
        assert torch.allclose(got.state.lse, want.state.lse, rtol=0, atol=1e-13)
        budgets = (asked.budget(0, layer).mean_abs for asked in (question, one))
        assert next(budgets) == pytest.approx(
            next(budgets), rel=0.02
        )  # it grows with the largest score of all layers


def test_only_who_declares_them_is_asked() -> None:
    assert unsupported(MIXED, DECLARED) is None
    undeclared = replace(DECLARED, layer_windows=False)
    assert unsupported(MIXED, undeclared) == "a window in some layers alone"
    assert unsupported(MIXED, Capabilities()) == "a sliding window"


def test_kernels_for_both_masks_must_be_compiled() -> None:
    plain, windowed = Variant(), Variant(window=True)
    only = replace(DECLARED, variants=(windowed,))
    assert unsupported(MIXED, only) == "settings that no compiled variant has"
    assert unsupported(MIXED, replace(DECLARED, variants=(plain, windowed))) is None


def test_the_layer_that_has_the_wrong_window_is_named() -> None:
    class WindowInTheMiddle(FlashAttentionBackend):
        def __init__(self, engine: EngineContext) -> None:
            windows = [*engine.windows[:1], 3, *engine.windows[2:]]
            super().__init__(replace(engine, windows=tuple(windows)))

    spec = BackendSpec("middle", WindowInTheMiddle, DECLARED)
    with Session(["fa"]) as session:
        (correct,) = session.askers
        assert not examine(Question(MIXED), correct).findings
        verdict = examine(Question(MIXED), replace(correct, spec=spec))
    found: list[Any] = [f for f in verdict.findings if f.check in ("metadata", "values")]
    assert {f.check for f in found} == {"metadata", "values"}
    assert {f.layer for f in found} == {1}
    assert found[0].field == "window"
    assert "is 3, must be none" in found[0].message


def test_the_setting_says_which_layers() -> None:
    assert "window 3 in layers 0, 2 alone" in setting(MIXED)
    assert "window 3," in setting(replace(MIXED, mask=Mask(window=3)))
