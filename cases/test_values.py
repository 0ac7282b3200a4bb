"""What q, k and v hold: the same token the same, whatever its batch; each row aimed at a key of its request."""

# torch and numpy leave the results of tolist, unique and concatenate without types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from cases.model import (
    MAX_SCALE,
    MAX_UID,
    MIN_SCALE,
    Case,
    DType,
    Heads,
    KernelRequest,
    Mask,
    Request,
    Step,
    ValueKind,
)
from cases.tensors import StepTensors, materialise

KINDS: tuple[ValueKind, ...] = get_args(ValueKind)
HEADS = Heads(num_qo_heads=4, num_kv_heads=2)
ONE = Request(cached_len=20, extend_len=3, uid=7)
TWO = Request(cached_len=2, extend_len=1, uid=8)


def tensors(case: Case) -> StepTensors:
    return materialise(case).steps[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_has_the_same_values_in_any_batch(kind: ValueKind) -> None:
    alone = Case((Step((ONE,)),), heads=HEADS, values=kind, seed=3)
    a, b = tensors(alone), tensors(replace(alone, steps=(Step((TWO, ONE)),), placement="scattered"))
    assert torch.equal(a.q, b.q[:, 1:])
    assert torch.equal(a.k_all, b.k_all[:, 3:])
    assert torch.equal(a.v_all, b.v_all[:, 3:])


def test_other_seeds_layers_and_requests_have_other_values() -> None:
    case = Case((Step((ONE, replace(ONE, uid=9))),), heads=HEADS)
    a, b = tensors(case), tensors(replace(case, seed=1))
    assert not torch.equal(a.k_all, b.k_all)
    assert not torch.equal(a.k_all[0], a.k_all[1])
    assert not torch.equal(a.k_all[:, :23], a.k_all[:, 23:])
    assert not torch.equal(a.k_all[..., 0, :], a.k_all[..., 1, :])


def test_a_borrowed_prefix_has_the_lenders_values() -> None:
    borrower = Request(cached_len=16, extend_len=1, uid=8, prefix_of=7, prefix_len=16)
    t = tensors(Case((Step((ONE, borrower)),), page_size=16))
    assert torch.equal(t.k_all[:, :16], t.k_all[:, 23:39])
    assert not torch.equal(t.k_all[:, 16], t.k_all[:, 39])


def test_needles_take_about_half_of_the_weight() -> None:
    requests = tuple(KernelRequest(1, 500, uid) for uid in range(40))
    step = Step(requests, "decode", "decode")
    t = tensors(Case((step,), level="kernel", num_layers=1, heads=HEADS, dtype="float32", page_size=16))
    keys = t.k_all[0].view(40, 500, 2, 64).repeat_interleave(2, 2)
    weights = (torch.einsum("rhd,rkhd->rhk", t.q[0], keys) / 8).softmax(-1)
    heaviest = weights.max(-1).values
    assert heaviest.min() > 0.2
    assert 0.4 < heaviest.mean() < 0.6
    assert len(weights.max(-1).indices.unique()) >= 6  # rows and heads aim at different borders


def test_needles_stay_in_reach_of_the_window_and_just_beyond_it() -> None:
    requests = tuple(KernelRequest(1, 100, uid) for uid in range(60))
    case = Case(
        (Step(requests, "decode", "decode"),),
        level="kernel",
        num_layers=1,
        mask=Mask(window=8),
        dtype="float32",
    )
    t = tensors(case)
    scores = torch.einsum("rhd,rkhd->rhk", t.q[0], t.k_all[0].view(60, 100, 1, 64))
    aimed = set(scores[:, 0].max(-1).indices.tolist())
    assert {99 - 8, 99 - 7} <= aimed


def test_a_layer_without_the_window_has_needles_that_it_alone_reaches() -> None:
    step = Step(tuple(Request(99, 1, uid) for uid in range(60)), "decode", "decode")
    windowed = Case((step,), mask=Mask(window=8), dtype="float32")
    mixed = replace(windowed, mask=Mask(window=8, window_layers=(1,)))
    q = tensors(mixed).q
    assert torch.equal(q[1], tensors(windowed).q[1])
    assert torch.equal(q[0], tensors(replace(windowed, mask=Mask())).q[0])
    t = tensors(mixed)
    scores = torch.einsum("rhd,rkhd->rhk", q[0], t.k_all[0].view(60, 100, 1, 64))
    assert 0 in scores[:, 0].max(-1).indices


@pytest.mark.parametrize("dtype", get_args(DType))
def test_kinds_are_what_they_say(dtype: DType) -> None:
    case = Case((Step((ONE,)),), heads=HEADS, dtype=dtype)
    assert not tensors(replace(case, values="zero_q")).q.any()
    constant = tensors(replace(case, values="constant_v")).v_all
    assert all(len(layer.unique()) == 1 for layer in constant)
    hot = tensors(replace(case, values="one_hot_v")).v_all
    assert torch.equal(hot.sum(-1), torch.ones_like(hot[..., 0]))
    extreme = tensors(replace(case, values="extreme"))
    scores = (
        torch.einsum("lrhd,lkhd->lrhk", extreme.q.float(), extreme.k_all.float().repeat_interleave(2, 2)) / 8
    )
    assert scores.abs().max() > 200
    assert extreme.q.isfinite().all()


@pytest.mark.parametrize("dtype", get_args(DType))
def test_low_scores_rise_with_the_position_and_stay_above_the_libraries_sentinels(dtype: DType) -> None:
    case = Case((Step((Request(130, 3),)),), heads=HEADS, dtype=dtype, values="low", sm_scale=1.0)
    t = tensors(case)
    scores = torch.einsum("lrhd,lkhd->lrhk", t.q.double(), t.k_all.double().repeat_interleave(2, 2))
    assert scores.max() < -1.5e4
    assert scores.min() * 1.4427 > -5e4
    assert (scores[..., :64].diff() > 100).all()


@pytest.mark.parametrize("head_dim", [1, 64])
@pytest.mark.parametrize("kind", ["needles", "extreme", "low"])
def test_queries_are_finite_at_the_ends_of_the_scales(head_dim: int, kind: ValueKind) -> None:
    for scale in (MIN_SCALE, MAX_SCALE):
        for seed in range(8):
            case = Case(
                (Step((Request(9, 5, MAX_UID),)),),
                heads=Heads(1, 1, head_dim, head_dim),
                kv_dtype="float8_e4m3fn",
                sm_scale=scale,
                k_scale=scale,
                values=kind,
                seed=seed,
            )
            assert bool(tensors(case).q.isfinite().all())
