"""The pool before and after a step, the page table, and custom masks."""

# torch and numpy leave the results of tolist, unique and concatenate without types.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from cases.model import Case, Heads, KernelRequest, Layout, Mask, Request, Step
from cases.tensors import LARGE, materialise

REQUESTS = (Request(cached_len=5, extend_len=2, uid=0), Request(cached_len=0, extend_len=3, uid=1))
CASE = Case((Step(REQUESTS),), page_size=4, heads=Heads(2, 2), placement="scattered", seed=2)


def slot_major(pool: torch.Tensor, layout: Layout) -> torch.Tensor:
    """`[layers, slots, heads, dim]`."""
    return (pool.transpose(2, 3) if layout == "HND" else pool).flatten(1, 2)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("nan", [True, False])
def test_the_pool_holds_tokens_and_poison(layout: Layout, which: str, nan: bool) -> None:
    built = materialise(replace(CASE, layout=layout))
    step = built.steps[0]
    rows = step.k_all if which == "k" else step.v_all
    before, after = (slot_major(built.pool(0, which, nan=nan, after=a), layout) for a in (False, True))
    assert torch.equal(after[:, step.slots], rows)
    stored = [0, 1, 2, 3, 4]
    assert step.stored.tolist() == stored
    assert torch.equal(before[:, step.slots[stored]], rows[:, stored])
    free = torch.ones(before.shape[1], dtype=torch.bool)
    free[step.slots] = False
    poison = after[:, free]
    assert poison.numel()
    if nan:
        assert poison.isnan().all()
        assert before[:, step.slots[step.new]].isnan().all()
    else:
        assert (poison == (0.0 if which == "k" else LARGE["float16"])).all()


def test_the_page_table_holds_slots_and_then_valid_ones_of_nobody() -> None:
    built = materialise(CASE)
    table, step = built.page_table(0).numpy(), built.steps[0]
    assert table.dtype == np.int32
    assert table.shape == (3, CASE.table_width)
    owned = set(step.slots.tolist())
    for row, slots in zip(step.placed.rows, step.placed.slots, strict=True):
        assert table[row, : len(slots)].tolist() == slots.tolist()
        rest = set(table[row, len(slots) :].tolist())
        assert not rest & owned
        assert all(0 <= slot < built.plan.num_pages * 4 for slot in rest)


def test_new_tokens_and_their_slots() -> None:
    step = materialise(CASE).steps[0]
    assert step.new.tolist() == [5, 6, 7, 8, 9]
    assert step.out_loc.dtype == torch.int32
    assert step.out_loc.tolist() == step.slots[step.new].tolist()
    assert torch.equal(step.new_kv[0], step.k_all[:, step.new])


def test_tensors_are_contiguous_even_without_elements() -> None:
    case = Case(
        (Step((KernelRequest(1, 0),)),), level="kernel", num_layers=1, values="one_hot_v", dtype="float32"
    )
    for one in (case, replace(case, steps=(Step((KernelRequest(1, 3),)),))):
        step = materialise(one).steps[0]
        for tensor in (step.q, step.k_all, step.v_all):
            assert tensor.stride(-1) == 1
            assert tensor.is_contiguous()


def test_fp8_pools() -> None:
    case = Case(
        (Step((KernelRequest(1, 3),)),),
        level="kernel",
        num_layers=1,
        kv_dtype="float8_e4m3fn",
        k_scale=0.5,
        v_scale=2.0,
    )
    built = materialise(case)
    pool = built.pool(0, "k", nan=True, after=True)
    assert pool.dtype == torch.float8_e4m3fn
    stored = pool.view(torch.uint8).flatten(1, 2)[:, built.steps[0].slots]
    assert torch.equal(stored, built.steps[0].k_all.view(torch.uint8))


def test_custom_masks_leave_every_row_a_key() -> None:
    requests = (KernelRequest(3, 5, 0), KernelRequest(2, 0, 1), KernelRequest(0, 4, 2))
    case = Case((Step(requests),), level="kernel", num_layers=1, mask=Mask(causal=False, custom=4))
    masks = materialise(case).steps[0].custom
    assert masks is not None
    assert [tuple(m.shape) for m in masks] == [(3, 5), (2, 0), (0, 4)]
    assert masks[0].any(1).all()
    again = materialise(case).steps[0].custom
    assert again is not None
    assert torch.equal(masks[0], again[0])
