from __future__ import annotations

import math

import pytest
import torch

from cases.model import Mask
from reference.attention import paged_attention
from reference.problems import Problem, make_problem
from reference.twin import low_precision

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def assert_near(a: torch.Tensor, b: torch.Tensor, *, rtol: float, atol: float) -> None:
    assert a.dtype == b.dtype
    assert torch.allclose(a, b, rtol=rtol, atol=atol), (a.double() - b.double()).abs().max()


def one_by_one(problem: Problem, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of one causal request, written out."""
    q, k, v = (x.to(torch.float32) for x in (problem.q, *(c[problem.slots] for c in problem.tensors[1:])))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("qhd,khd->qhk", q * problem.scale, k.repeat_interleave(group, 1))
    (qo_len,), (kv_len,) = problem.qo_lens, problem.kv_lens
    seen = torch.ones(qo_len, kv_len, dtype=torch.bool).tril(kv_len - qo_len)
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    rounded = weights.to(dtype).to(torch.float32)
    out = torch.einsum("qhk,khd->qhd", rounded, v.repeat_interleave(group, 1)) / weights.sum(-1, keepdim=True)
    return out.to(dtype), scores.amax(-1) + rounded.sum(-1).log()


@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_the_same_steps_written_out(dtype: torch.dtype) -> None:
    problem = make_problem([5], [70], dims=(16, 16), dtype=dtype)
    twin = low_precision(*problem.tensors, **problem.options, dtype=dtype)
    out, lse = one_by_one(problem, dtype)
    assert (twin.out.dtype, twin.lse.dtype) == (dtype, torch.float32)
    assert_near(twin.lse, lse, rtol=0, atol=4e-6)
    assert_near(twin.out, out, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_errs_as_much_as_its_dtype(dtype: torch.dtype) -> None:
    problem = make_problem([20], [300], dims=(64, 64), dtype=dtype)
    oracle = paged_attention(*problem.tensors, **problem.options)
    twin = low_precision(*problem.tensors, **problem.options, dtype=dtype)
    eps = torch.finfo(dtype).eps
    error = float((twin.out.to(torch.float64) - oracle.out).abs().max())
    assert eps / 20 < error < 4 * eps
    assert float((twin.lse - oracle.lse).abs().max()) < 8 * eps


def test_rounds_the_weights() -> None:
    """Two keys, the second of weight x that bfloat16 does not hold: V makes the weight visible."""
    x = 1.0 + 2.0**-8 - 1.0  # exp(score) of the second key is 2 ** -8 + 2 ** -16
    weight = x + 2.0**-16
    problem = make_problem([1], [2], heads=(1, 1), dims=(1, 1), dtype=torch.float32, scale=1.0)
    q, k, v = (y.clone() for y in problem.tensors)
    q[...] = 1.0
    k[problem.slots, 0, 0] = torch.tensor([0.0, math.log(weight)])
    v[problem.slots, 0, 0] = torch.tensor([0.0, 1.0])
    exact = low_precision(q, k, v, **problem.options, dtype=torch.float32)
    rounded = low_precision(q, k, v, **problem.options, dtype=torch.bfloat16)
    assert float(exact.out) == pytest.approx(weight / (1 + weight), rel=1e-6)
    assert float(rounded.out) == float(torch.tensor(x / (1 + weight)).to(torch.bfloat16))
    assert float(exact.lse) == pytest.approx(math.log(1 + weight), rel=1e-4)
    assert float(rounded.lse) == pytest.approx(math.log(1 + x), rel=1e-4)


def test_zero_queries_leave_the_lse_exact() -> None:
    problem = make_problem([1], [200], dtype=torch.bfloat16, mask=Mask(window=77))
    zero = torch.zeros_like(problem.q)
    twin = low_precision(zero, *problem.tensors[1:], **problem.options, dtype=torch.bfloat16)
    assert_near(twin.lse, torch.full((1, 4), math.log(77.0)), rtol=2e-7, atol=0)


def test_rows_without_keys_and_custom_masks() -> None:
    problem = make_problem([3, 2], [1, 4], dtype=torch.float16)
    twin = low_precision(*problem.tensors, **problem.options, dtype=torch.float16)
    assert not twin.out[:2].any()
    assert (twin.lse[:2] == -math.inf).all()
    custom = make_problem([3, 2], [5, 4], dtype=torch.float16, mask=Mask(causal=False, custom=0))
    oracle = paged_attention(*custom.tensors, **custom.options)
    twin = low_precision(*custom.tensors, **custom.options, dtype=torch.float16)
    assert (twin.out.to(torch.float64) - oracle.out).abs().max() < 4e-3


@pytest.mark.parametrize("chunk_bytes", [1, 4096])
def test_chunks_change_it_by_rounding_only(chunk_bytes: int) -> None:
    problem = make_problem([4, 1], [30, 50], dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, v_scale=0.5)
    whole = low_precision(*problem.tensors, **problem.options, dtype=torch.bfloat16)
    parts = low_precision(*problem.tensors, **problem.options, dtype=torch.bfloat16, chunk_bytes=chunk_bytes)
    assert_near(parts.out, whole.out, rtol=2**-7, atol=2**-8)
    assert_near(parts.lse, whole.lse, rtol=0, atol=2**-8)
