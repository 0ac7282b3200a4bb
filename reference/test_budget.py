from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cases.model import Mask
from reference import library
from reference.attention import paged_attention
from reference.budget import (
    Budget,
    error_budget,
    exact_tolerance,
    exceeds,
    lse_budget,
    rounding_step,
    surely_within,
)
from reference.problems import Problem, make_problem
from reference.twin import low_precision

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def budget_of(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, Budget]:
    oracle = paged_attention(*problem.tensors, **problem.options)
    twin = low_precision(*problem.tensors, **problem.options, dtype=dtype)
    return oracle.out, error_budget(oracle, twin, dtype=dtype, max_score=oracle.max_score, max_v=oracle.max_v)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_surely_within_is_within_the_budget(dtype: torch.dtype) -> None:
    problem = make_problem([3, 1], [40, 9], heads=(4, 2), dims=(64, 64), dtype=dtype)
    oracle = paged_attention(*problem.tensors, **problem.options)
    least = error_budget(oracle, oracle, dtype=dtype, max_score=oracle.max_score, max_v=oracle.max_v)
    random = torch.Generator().manual_seed(1)
    seen: set[tuple[bool, bool]] = set()
    for scale in [0.0, *(2.0**n for n in range(-4, 12))]:
        step = rounding_step(oracle.out, dtype) * scale
        off = oracle.out + step * (torch.rand(step.shape, generator=random, dtype=torch.float64) - 0.5)
        result = off.to(dtype)
        surely = surely_within(
            result.double().numpy(),
            oracle.out.numpy(),
            dtype=dtype,
            max_score=oracle.max_score,
            max_v=oracle.max_v,
        )
        within = not exceeds(result, oracle.out, least).failed
        assert within or not surely
        seen.add((surely, within))
    assert {(True, True), (False, False)} <= seen


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_surely_within(bad: float) -> None:
    good, wrong = np.ones((2, 1, 3)), np.full((2, 1, 3), bad)
    for result, oracle in ((good, good), (wrong, good), (good, np.full((2, 1, 3), math.nan))):
        within = surely_within(result, oracle, dtype=torch.float16, max_score=1.0, max_v=1.0)
        assert within == (result is good and oracle is good)


def tiled(problem: Problem, dtype: torch.dtype, tile: int) -> torch.Tensor:
    """A 16-bit kernel: base 2, last tile first, running maximum, divided by the sum of the rounded weights."""
    (qo_len,), (kv_len,) = problem.qo_lens, problem.kv_lens
    q, k, v = (x.to(torch.float32) for x in (problem.q, *(c[problem.slots] for c in problem.tensors[1:])))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    top = torch.full(q.shape[:2], -1e30)
    total = torch.zeros(q.shape[:2])
    acc = torch.zeros(*q.shape[:2], v.shape[2])
    for lo in reversed(range(0, kv_len, tile)):
        keys = torch.arange(lo, min(lo + tile, kv_len))
        scores = torch.einsum("qhd,khd->qhk", q, k[keys]) * (problem.scale / math.log(2.0))
        seen = keys <= torch.arange(kv_len - qo_len, kv_len)[:, None]
        scores = scores.masked_fill(~seen[:, None], -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        weights = torch.exp2(scores - new_top[..., None]).to(dtype).to(torch.float32)
        keep = torch.exp2(top - new_top)
        total = total * keep + weights.sum(-1)
        acc = acc * keep[..., None] + torch.einsum("qhk,khd->qhd", weights, v[keys])
        top = new_top
    return (acc / total[..., None]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.1, 1.0, 50.0])
def test_other_low_precision_kernels_stay_within(dtype: torch.dtype, spread: float) -> None:
    for seed in range(25):
        kv_len = (1, 3, 17, 40)[seed % 4]
        problem = make_problem(
            [min(4, kv_len)], [kv_len], dtype=dtype, dims=(16, 16), spread=spread, seed=seed
        )
        oracle, budget = budget_of(problem, dtype)
        for tile in (4, 16, 64):
            excess = exceeds(tiled(problem, dtype, tile), oracle, budget)
            assert not excess.failed, (seed, tile, excess.max_error, excess.mean_error)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dropped_key_is_beyond(dtype: torch.dtype) -> None:
    for num_keys in (2, 16, 40):
        problem = make_problem([1], [num_keys], dtype=dtype, dims=(16, 16))
        oracle, budget = budget_of(problem, dtype)
        fewer = problem._replace(slots=problem.slots[1:], kv_lens=[num_keys - 1])
        wrong = low_precision(*fewer.tensors, **fewer.options, dtype=dtype).out
        assert exceeds(wrong, oracle, budget).failed


def test_one_wrong_element_is_named() -> None:
    problem = make_problem([3], [9], dtype=torch.float16)
    oracle, budget = budget_of(problem, torch.float16)
    result = oracle.to(torch.float16)
    result[1, 2, 5] += 0.05
    excess = exceeds(result, oracle, budget)
    assert excess.where.nonzero().numpy().tolist() == [[1, 2, 5]]
    assert excess.max_error == pytest.approx(0.05, rel=0.1)
    assert excess.not_finite == 0


def test_a_bias_within_every_element_is_seen_by_the_mean() -> None:
    problem = make_problem([40], [300], dtype=torch.bfloat16, dims=(64, 64))
    oracle, budget = budget_of(problem, torch.bfloat16)
    assert isinstance(budget.max_abs, torch.Tensor)
    excess = exceeds(oracle + 0.9 * budget.max_abs, oracle, budget)
    assert not excess.where.any()
    assert excess.mean_is_over
    assert excess.failed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_finiteness_comes_first(bad: float) -> None:
    oracle = torch.tensor([1.0, math.nan, math.inf], dtype=torch.float64)
    generous = Budget(math.inf, math.inf)
    assert not exceeds(oracle.to(torch.float32), oracle, generous).failed
    excess = exceeds(torch.tensor([bad, math.nan, math.inf]), oracle, Budget(1e9, 1e9))
    assert excess.where.numpy().tolist() == [True, False, False]
    assert excess.not_finite == 1
    assert exceeds(torch.tensor([1.0, 2.0, 3.0]), oracle, generous).where.numpy().tolist() == [
        False,
        True,
        True,
    ]
    assert exceeds(torch.tensor([1.0, math.inf, -math.inf]), oracle, generous).where.numpy().tolist() == [
        False,
        True,
        True,
    ]


def test_a_value_beyond_the_dtype_may_be_infinite() -> None:
    oracle = torch.tensor([1e5, 1.0], dtype=torch.float64)
    assert not exceeds(torch.tensor([math.inf, 1.0], dtype=torch.float16), oracle, Budget(0.0, 0.0)).failed
    assert exceeds(torch.tensor([6e4, 1.0], dtype=torch.float16), oracle, Budget(0.0, 0.0)).failed


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the result is \(2,\), must be \(3,\)"):
        exceeds(torch.zeros(2), torch.zeros(3), Budget(0.0, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_step_is_the_distance_of_neighbours(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1e-9, 0.3, -0.999, 1.0, 1.5, -2.0, 3000.0], dtype=dtype)
    step = rounding_step(x.to(torch.float64), dtype)
    above = torch.nextafter(x.abs(), torch.full_like(x, math.inf)).to(torch.float64)
    normal = x.abs() >= torch.finfo(dtype).smallest_normal
    assert torch.equal(step[normal], (above - x.abs().to(torch.float64))[normal])
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert (step[~normal] == smallest).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_budget_counts_the_keys_of_zero_queries(dtype: torch.dtype) -> None:
    problem = make_problem([1], [8192], heads=(1, 1), dtype=dtype)
    problem = problem._replace(q=torch.zeros_like(problem.q))
    oracle = paged_attention(*problem.tensors, **problem.options)
    twin = low_precision(*problem.tensors, **problem.options, dtype=dtype)
    budget = lse_budget(oracle, twin, dtype=dtype, max_score=oracle.max_score, num_keys=8192)
    for count, wrong in ((8192, False), (8191, True), (8193, True)):
        lse = torch.full((1, 1), math.log(count))
        assert exceeds(lse, oracle.lse, budget).failed is wrong
    assert exceeds(torch.full((1, 1), -math.inf), oracle.lse, budget).failed


def summed_on_tensor_cores(weights: torch.Tensor) -> float:
    """Float32 sum of 1-d weights, eight at a time, each partial sum cut to 24 bits instead of rounded."""
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(weights), 8):
        mantissa, exponent = torch.frexp(total + weights[start : start + 8].to(torch.float64).sum())
        total = torch.ldexp((mantissa * 2**24).trunc() / 2**24, exponent)
    return float(total)


def test_lse_budget_allows_a_long_sum_that_is_truncated() -> None:
    problem = make_problem([1], [131_072], heads=(1, 1), dims=(8, 8), dtype=torch.float16)
    oracle = paged_attention(*problem.tensors, **problem.options)
    twin = low_precision(*problem.tensors, **problem.options, dtype=torch.float16)
    scores = (problem.q[0, 0].float() @ problem.tensors[1][problem.slots][:, 0].float().T) * problem.scale
    weights = (scores - scores.max()).exp().to(torch.float16)
    lse = torch.tensor([[math.log(summed_on_tensor_cores(weights)) + float(scores.max())]])
    short = lse_budget(oracle, twin, dtype=torch.float32, max_score=oracle.max_score, num_keys=0)
    assert exceeds(lse, oracle.lse, short).failed
    budget = lse_budget(oracle, twin, dtype=torch.float16, max_score=oracle.max_score, num_keys=131_072)
    assert not exceeds(lse, oracle.lse, budget).failed
    assert exceeds(lse - 3e-3, oracle.lse, budget).failed


@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_budget_allows_weights_that_are_rounded_otherwise(dtype: torch.dtype) -> None:
    problem = make_problem([1], [3], heads=(1, 1), dtype=dtype)
    oracle = paged_attention(*problem.tensors, **problem.options)
    budget = lse_budget(oracle, oracle, dtype=dtype, max_score=oracle.max_score, num_keys=3)
    half_a_step = torch.finfo(dtype).eps / 2.0
    assert not exceeds(oracle.lse + half_a_step, oracle.lse, budget).failed
    assert exceeds(oracle.lse + 1.1 * half_a_step + 1e-4, oracle.lse, budget).failed


def test_empty_rows_and_empty_batches_are_exact() -> None:
    for qo_lens, kv_lens in (((2, 1), (0, 0)), ((), ())):
        problem = make_problem(qo_lens, kv_lens, dtype=torch.float16)
        oracle = paged_attention(*problem.tensors, **problem.options)
        twin = low_precision(*problem.tensors, **problem.options, dtype=torch.float16)
        budget = error_budget(oracle, twin, dtype=torch.float16, max_score=0.0, max_v=0.0)
        assert not exceeds(oracle.out.to(torch.float16), oracle.out, budget).failed
        budget = lse_budget(oracle, twin, dtype=torch.float16, max_score=0.0, num_keys=0)
        assert not exceeds(oracle.lse.to(torch.float32), oracle.lse, budget).failed
        if qo_lens:
            assert exceeds(torch.full_like(oracle.lse, -5e4), oracle.lse, budget).where.all()
            assert exceeds(torch.full_like(oracle.lse, math.nan), oracle.lse, budget).where.all()


def direct(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 attention of one request without a mask, by other operations in another order."""
    q, k, v = problem.q, *(c[problem.slots].flip(0) for c in problem.tensors[1:])
    group = q.shape[1] // k.shape[1]
    scores = (q[:, :, None] * k.repeat_interleave(group, 1).transpose(0, 1)).sum(-1) * problem.scale
    weights = scores.softmax(-1)
    return (weights[..., None] * v.repeat_interleave(group, 1).transpose(0, 1)).sum(2), scores.logsumexp(-1)


@pytest.mark.parametrize("num_keys", [1, 2, 16, 300, 8192])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 1000.0])
def test_independent_float64_implementations_agree(
    monkeypatch: pytest.MonkeyPatch, num_keys: int, spread: float
) -> None:
    for seed in range(2 if num_keys > 1000 else 10):
        problem = make_problem(
            [2], [num_keys], mask=Mask(causal=False), dims=(64, 64), heads=(2, 1), spread=spread, seed=seed
        )
        state = paged_attention(*problem.tensors, **problem.options)
        with monkeypatch.context() as patch:
            patch.setattr(library, "NUMPY", library.torch_on(torch.device("cpu")))
            other = paged_attention(
                *problem.tensors, **problem.options, chunk_bytes=1024 * max(1, num_keys // 5)
            )
        for out, lse in ((other.out, other.lse), direct(problem)):
            assert (state.out - out).abs().max() <= exact_tolerance(state.max_score, state.max_v) / 4
            assert (state.lse - lse).abs().max() <= exact_tolerance(state.max_score, 1.0) / 3
