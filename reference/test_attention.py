from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.model import Mask
from reference import agreement, attention, library, softmax
from reference.agreement import PROBLEMS, assert_close
from reference.attention import paged_attention
from reference.problems import make_problem

FINITE = [
    "causal prefill",
    "decode",
    "not causal",
    "window",
    "window, not causal",
    "groups of five",
    "wide vo",
    "long",
    "long, window",
]


@pytest.fixture(params=["numpy", "torch"])
def library_in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both libraries, on CPU tensors: the torch one is what a GPU gets."""
    if request.param == "torch":
        monkeypatch.setattr(library, "NUMPY", library.torch_on(torch.device("cpu")))
    return request.param


@pytest.mark.usefixtures("library_in_use")
@pytest.mark.parametrize("name", PROBLEMS)
def test_equals_three_loops(name: str) -> None:
    agreement.agrees_with_three_loops(PROBLEMS[name]())


@pytest.mark.usefixtures("library_in_use")
@pytest.mark.parametrize("name", PROBLEMS)
def test_same_for_every_chunk_size(name: str) -> None:
    agreement.same_for_every_chunk_size(PROBLEMS[name]())


@pytest.mark.usefixtures("library_in_use")
@pytest.mark.parametrize("name", PROBLEMS)
def test_weights_of_small_scores_are_those_of_any(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    problem = PROBLEMS[name]()
    plain = paged_attention(*problem.tensors, **problem.options)
    monkeypatch.setattr(attention, "PLAIN_SCORE", -1.0)
    usual = paged_attention(*problem.tensors, **problem.options)
    assert_close(plain, usual.out, usual.lse, "with the largest score subtracted")


@pytest.mark.parametrize("turn", [0, 1])
def test_large_scores_may_follow_small_ones_and_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch, turn: int
) -> None:
    problem = PROBLEMS["decode"]()
    usual = paged_attention(*problem.tensors, **problem.options)
    turns = itertools.count(turn)
    fold = softmax.RunningSoftmax.fold

    def in_turns(running: softmax.RunningSoftmax, *block: Any, first: bool, small: bool) -> None:
        assert small
        fold(running, *block, first=first, small=bool(next(turns) % 2))

    monkeypatch.setattr(softmax.RunningSoftmax, "fold", in_turns)
    other = paged_attention(*problem.tensors, **problem.options, chunk_bytes=400)
    assert next(turns) > turn + 3
    assert_close(other, usual.out, usual.lse, "small and large in turns")


@pytest.mark.usefixtures("library_in_use")
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name.startswith("long")])
def test_same_when_rows_are_cut(name: str) -> None:
    agreement.same_when_rows_are_cut(PROBLEMS[name]())


@pytest.mark.parametrize("name", FINITE)
def test_equals_sdpa(name: str) -> None:
    agreement.agrees_with_sdpa(PROBLEMS[name]())


def test_equals_sdpa_over_a_long_context() -> None:
    agreement.agrees_with_sdpa(make_problem([1, 3], [8192, 2049], dims=(64, 64)))


lengths = st.integers(0, 6)


@settings(deadline=None, max_examples=60)
@given(
    lens=st.lists(st.tuples(lengths, lengths), max_size=4),
    mask=st.one_of(
        st.builds(
            Mask,
            causal=st.booleans(),
            window=st.none() | st.integers(1, 7),
            soft_cap=st.none() | st.floats(0.5, 50.0),
        ),
        st.builds(Mask, causal=st.just(False), custom=st.integers(0, 9), soft_cap=st.none() | st.just(2.0)),
    ),
    heads=st.sampled_from([(1, 1), (2, 2), (3, 1), (6, 2)]),
    dims=st.sampled_from([(4, 4), (6, 3), (1, 2)]),
    seed=st.integers(0, 1000),
)
def test_equals_three_loops_on_anything(
    lens: list[tuple[int, int]], mask: Mask, heads: tuple[int, int], dims: tuple[int, int], seed: int
) -> None:
    problem = make_problem(
        [qo for qo, _ in lens], [kv for _, kv in lens], mask=mask, heads=heads, dims=dims, seed=seed
    )
    agreement.agrees_with_three_loops(problem)
    agreement.same_for_every_chunk_size(problem)


def test_order_of_keys_does_not_matter_without_a_mask() -> None:
    problem = make_problem([3], [11], mask=Mask(causal=False))
    whole = paged_attention(*problem.tensors, **problem.options)
    moved = problem._replace(slots=problem.slots.flip(0))
    assert_close(paged_attention(*moved.tensors, **moved.options), whole.out, whole.lse, "flipped")


def test_order_of_requests_does_not_matter() -> None:
    problem = make_problem([3, 1, 2], [5, 9, 2])
    whole = paged_attention(*problem.tensors, **problem.options)
    order = [(3, 4), (4, 6), (0, 3)]
    keys = [(5, 14), (14, 16), (0, 5)]
    moved = problem._replace(
        q=torch.cat([problem.q[a:b] for a, b in order]),
        slots=torch.cat([problem.slots[a:b] for a, b in keys]),
        qo_lens=[1, 2, 3],
        kv_lens=[9, 2, 5],
    )
    state = paged_attention(*moved.tensors, **moved.options)
    rows = torch.cat([torch.arange(a, b) for a, b in order])
    assert_close(state, whole.out[rows], whole.lse[rows], "requests in another order")


def test_adding_a_constant_to_every_score_moves_only_the_lse() -> None:
    problem = make_problem([3], [9], mask=Mask(causal=False), dims=(4, 6), scale=1.0)
    q, k = problem.q.clone(), problem.k_cache.clone()
    q[..., 0], k[..., 0] = 1.0, 0.0
    before = paged_attention(q, k, problem.v_cache, **problem.options)
    k[problem.slots, :, 0] = 5.0
    after = paged_attention(q, k, problem.v_cache, **problem.options)
    assert_close(after, before.out, before.lse + 5.0, "scores + 5")


def test_zero_queries_count_the_visible_keys() -> None:
    problem = make_problem([5], [8], mask=Mask(window=6))
    state = paged_attention(torch.zeros_like(problem.q), problem.k_cache, problem.v_cache, **problem.options)
    counts = torch.tensor([4.0, 5.0, 6.0, 6.0, 6.0], dtype=torch.float64)
    assert_close(state, state.out, counts.log()[:, None].expand(5, 4), "zero q")


def test_strides_and_slot_types_do_not_matter() -> None:
    problem = make_problem([3, 1], [5, 9], dtype=torch.bfloat16)
    wanted = paged_attention(*problem.tensors, **problem.options)
    fused = torch.stack([problem.q, problem.q * 3], dim=2)[:, :, 0]
    heads_first = [c.transpose(0, 1).contiguous().transpose(0, 1) for c in problem.tensors[1:]]
    assert not fused.is_contiguous()
    assert not heads_first[0].is_contiguous()
    for slots in (problem.slots, problem.slots.to(torch.int32), problem.slots.numpy()):
        state = paged_attention(fused, *heads_first, **(problem.options | {"slots": slots}))
        assert_close(state, wanted.out, wanted.lse, "strided")


def test_inputs_are_left_alone() -> None:
    problem = make_problem([3, 1], [5, 9], mask=Mask(causal=False, custom=3), k_scale=0.5, v_scale=2.0)
    assert problem.custom is not None
    kept = [x.clone() for x in (*problem.tensors, problem.slots, *problem.custom)]
    paged_attention(*problem.tensors, **problem.options)
    for before, after in zip(kept, (*problem.tensors, problem.slots, *problem.custom), strict=True):
        assert torch.equal(before.nan_to_num(), after.nan_to_num())


@pytest.mark.usefixtures("library_in_use")
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_in_a_listed_slot_shows(bad: float) -> None:
    problem = make_problem([1, 1], [4, 5])
    k, v = problem.k_cache.clone(), problem.v_cache.clone()
    k[problem.slots[2]] = bad
    with_k = paged_attention(problem.q, k, problem.v_cache, **problem.options)
    assert not with_k.out[0].isfinite().all()
    assert with_k.out[1].isfinite().all()
    v[problem.slots[2], 0] = bad
    with_v = paged_attention(problem.q, problem.k_cache, v, **problem.options)
    assert not with_v.out[0, :2].isfinite().any()
    assert with_v.out[0, 2:].isfinite().all()
    assert math.isfinite(with_k.max_score)
    assert math.isfinite(with_v.max_v)


@pytest.mark.usefixtures("library_in_use")
def test_a_row_whose_keys_all_score_minus_infinity_is_not_an_empty_row() -> None:
    problem = make_problem([1], [3], heads=(1, 1))
    q, k = problem.q.clone(), problem.k_cache.clone()
    q[...] = -1.0
    k[problem.slots] = math.inf
    for chunk_bytes in (1, 1 << 20):
        state = paged_attention(q, k, problem.v_cache, **problem.options, chunk_bytes=chunk_bytes)
        assert state.out.isnan().all()
        assert (state.lse == -math.inf).all()


def test_max_score_bounds_every_score_and_max_v_every_value() -> None:
    problem = make_problem(
        [3, 1], [5, 9], kv_dtype=torch.float8_e4m3fn, dtype=torch.float16, k_scale=0.5, v_scale=2.0
    )
    state = paged_attention(*problem.tensors, **problem.options)
    k, v = (c[problem.slots].to(torch.float64) for c in (problem.k_cache, problem.v_cache))
    q = problem.q.to(torch.float64)
    norms = [float((x * x).sum(-1).max()) ** 0.5 for x in (q, 0.5 * k)]
    assert state.max_score == pytest.approx(problem.scale * norms[0] * norms[1])
    assert state.max_v == float((2.0 * v).abs().max())
    scores = problem.scale * torch.einsum("qhd,khd->qkh", q, (0.5 * k).repeat_interleave(2, 1))
    assert float(scores.abs().max()) <= state.max_score


def test_chunks_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from reference import attention

    problem = make_problem([40, 1], [300, 700], heads=(4, 2), dims=(16, 16))
    sizes: list[int] = []
    gathered, block_scores = attention.gathered, attention.block_scores

    def gathered_and_measured(*args: object) -> np.ndarray:
        taken = gathered(*args)  # type: ignore[arg-type]
        sizes.append(2 * taken.nbytes)
        return taken

    def scored_and_measured(*args: object) -> np.ndarray:
        scores = block_scores(*args)  # type: ignore[arg-type]
        sizes.append(scores.nbytes)
        return scores

    monkeypatch.setattr(attention, "gathered", gathered_and_measured)
    monkeypatch.setattr(attention, "block_scores", scored_and_measured)
    paged_attention(*problem.tensors, **problem.options, chunk_bytes=50_000)
    assert 25_000 < max(sizes) <= 50_000
