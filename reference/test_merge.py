from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference import agreement
from reference.agreement import assert_close
from reference.merge import from_base, merge, merge_all, to_base
from reference.problems import make_problem
from reference.state import AttentionState

ROWS, HEADS, DIM = 3, 2, 4


@st.composite
def states(draw: st.DrawFn) -> AttentionState:
    """Any state: some rows empty, LSEs far apart."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    out = torch.randn(ROWS, HEADS, DIM, generator=random, dtype=torch.float64)
    spread = draw(st.sampled_from([1.0, 30.0, 1000.0]))
    lse = spread * torch.randn(ROWS, HEADS, generator=random, dtype=torch.float64)
    for row in draw(st.sets(st.integers(0, ROWS - 1))):
        out[row], lse[row] = 0.0, -math.inf
    return AttentionState(
        out, lse, float(lse[lse.isfinite()].abs().amax()) if lse.isfinite().any() else 0.0, 5.0
    )


def empty() -> AttentionState:
    return AttentionState(
        torch.zeros(ROWS, HEADS, DIM, dtype=torch.float64),
        torch.full((ROWS, HEADS), -math.inf, dtype=torch.float64),
    )


@settings(deadline=None, max_examples=40)
@given(states())
def test_the_empty_state_is_neutral(a: AttentionState) -> None:
    for merged in (merge(a, empty()), merge(empty(), a)):
        assert torch.equal(merged.out, a.out)
        assert torch.equal(merged.lse, a.lse)
        assert (merged.max_score, merged.max_v) == (a.max_score, a.max_v)


@settings(deadline=None, max_examples=40)
@given(states(), states(), states())
def test_merging_commutes_and_associates(a: AttentionState, b: AttentionState, c: AttentionState) -> None:
    whole = merge(merge(a, b), c)
    for other in (merge(a, merge(b, c)), merge(merge(c, b), a), merge_all([b, c, a])):
        assert_close(other, whole.out, whole.lse, "another order")


@settings(deadline=None, max_examples=20)
@given(states())
def test_merging_with_itself_doubles_the_mass(a: AttentionState) -> None:
    assert_close(merge(a, a), a.out, a.lse + math.log(2.0), "a with a")


def test_empty_with_empty_is_empty() -> None:
    merged = merge_all([empty(), empty(), empty()])
    assert torch.equal(merged.out, empty().out)
    assert torch.equal(merged.lse, empty().lse)


def test_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one state"):
        merge_all([])


@pytest.mark.parametrize("spread", [1.0, 200.0])
def test_split_equals_whole(spread: float) -> None:
    agreement.split_equals_whole(make_problem([3], [9], spread=spread))


def test_bases() -> None:
    lse = torch.tensor([[math.log(8.0), -math.inf, 0.0]], dtype=torch.float64)
    assert to_base(lse, "2").numpy().tolist() == [[pytest.approx(3.0), -math.inf, 0.0]]
    assert torch.equal(to_base(lse, "e"), lse)
    assert torch.allclose(from_base(to_base(lse, "2"), "2"), lse, rtol=1e-15)
    assert torch.equal(from_base(lse, "e"), lse)
