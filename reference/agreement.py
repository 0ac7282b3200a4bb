"""Comparisons that the oracle must survive and that each of its mutants must fail.

Each function raises AssertionError when the oracle disagrees with something independent of it. They call the
oracle through its module, so that a fault put in place of one of its parts is what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from cases.model import Mask
from reference import attention, merge
from reference.budget import exact_tolerance
from reference.problems import Problem, make_problem
from reference.state import AttentionState
from reference.threeloop import three_loops

PROBLEMS: dict[str, Callable[[], Problem]] = {
    "causal prefill": lambda: make_problem([5, 1, 3], [5, 7, 9]),
    "decode": lambda: make_problem([1, 1, 1, 1], [1, 4, 9, 16]),
    "not causal": lambda: make_problem([4, 2], [6, 3], mask=Mask(causal=False)),
    "window": lambda: make_problem([6, 1, 4], [6, 9, 11], mask=Mask(window=4)),
    "window of one": lambda: make_problem([3, 1], [5, 4], mask=Mask(window=1)),
    "window, not causal": lambda: make_problem([6, 2], [6, 9], mask=Mask(causal=False, window=3)),
    "soft cap": lambda: make_problem([4, 1], [6, 8], mask=Mask(soft_cap=1.5), spread=3.0),
    "soft cap and window": lambda: make_problem(
        [4, 1], [6, 8], mask=Mask(window=3, soft_cap=2.0), spread=3.0
    ),
    "custom": lambda: make_problem([4, 3, 2], [6, 5, 1], mask=Mask(causal=False, custom=1)),
    "rows without keys": lambda: make_problem([5, 3, 2], [2, 4, 0]),
    "rows without keys, window": lambda: make_problem([5, 3], [2, 0], mask=Mask(window=2)),
    "empty requests": lambda: make_problem([0, 2, 0, 1], [3, 4, 0, 0], mask=Mask(causal=False)),
    "no request": lambda: make_problem([], []),
    "groups of five": lambda: make_problem([3, 1], [4, 6], heads=(10, 2)),
    "groups of seven": lambda: make_problem([2, 1], [4, 6], heads=(7, 1)),
    "wide qk": lambda: make_problem([3, 1], [4, 6], dims=(12, 5)),
    "wide vo": lambda: make_problem([3, 1], [4, 6], dims=(3, 7)),
    "float16": lambda: make_problem([3, 1], [4, 6], dtype=torch.float16),
    "bfloat16": lambda: make_problem([3, 1], [4, 6], dtype=torch.bfloat16),
    "float32": lambda: make_problem([3, 1], [4, 6], dtype=torch.float32),
    "e4m3 cache": lambda: make_problem(
        [3, 1], [4, 6], dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, k_scale=0.5, v_scale=2.0
    ),
    "e5m2 cache": lambda: make_problem(
        [3, 1], [4, 6], dtype=torch.bfloat16, kv_dtype=torch.float8_e5m2, k_scale=0.25, v_scale=3.0
    ),
    "own scale": lambda: make_problem([3, 1], [4, 6], scale=1.7),
    "long": lambda: make_problem([70, 3], [150, 40], heads=(2, 1), dims=(4, 4)),
    "long, window": lambda: make_problem([90], [120], heads=(2, 1), dims=(4, 4), mask=Mask(window=30)),
    "long, rows without keys": lambda: make_problem([90], [50], heads=(2, 1), dims=(4, 4)),
    "extreme logits": lambda: make_problem([3, 1], [9, 12], spread=300.0),
}


def assert_close(got: AttentionState, out: torch.Tensor, lse: torch.Tensor, what: str) -> None:
    """Out and lse are float64, of the given shape, and equal up to `exact_tolerance`; -inf only where wanted."""
    for name, a, b, size in (("out", got.out, out, got.max_v), ("lse", got.lse, lse, 1.0)):
        assert a.dtype == torch.float64, f"{what}: {name} is {a.dtype}, must be torch.float64"
        assert a.shape == b.shape, f"{what}: {name} is {tuple(a.shape)}, must be {tuple(b.shape)}"
        tolerance = exact_tolerance(got.max_score, size)
        close = (a == b) | ((a - b).abs() <= tolerance)
        assert close.all(), f"{what}: {name} differs by {(a - b).abs().max():.3g}, allowed is {tolerance:.3g}"


def agrees_with_three_loops(problem: Problem) -> None:
    """Equal to the plain Python version."""
    got = attention.paged_attention(*problem.tensors, **problem.options)
    out, lse = three_loops(*problem.tensors, **problem.options)
    shape = (problem.q.shape[0], problem.q.shape[1], problem.v_cache.shape[2])
    wanted_out = torch.tensor(out, dtype=torch.float64).reshape(shape)
    assert_close(got, wanted_out, torch.tensor(lse, dtype=torch.float64).reshape(shape[:2]), "three loops")


def agrees_with_sdpa(problem: Problem) -> None:
    """Out equal to torch's own attention, request by request, with an explicit mask; no soft cap, no empty rows."""
    got = attention.paged_attention(*problem.tensors, **problem.options)
    row = key = 0
    for qo_len, kv_len in zip(problem.qo_lens, problem.kv_lens, strict=True):
        own = problem.slots[key : key + kv_len]
        q, k, v = problem.q[row : row + qo_len], problem.k_cache[own], problem.v_cache[own]
        q, k, v = (x.to(torch.float64).transpose(0, 1)[None] for x in (q, k, v))
        distance = torch.arange(kv_len - qo_len, kv_len)[:, None] - torch.arange(kv_len)
        seen = distance >= 0 if problem.mask.causal else torch.ones(qo_len, kv_len, dtype=torch.bool)
        if problem.mask.window is not None:
            seen &= distance < problem.mask.window
        wanted = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen, scale=problem.scale, enable_gqa=True
        )[0].transpose(0, 1)
        out = got.out[row : row + qo_len]
        tolerance = exact_tolerance(got.max_score, got.max_v)
        assert (out - wanted).abs().max() <= tolerance, f"SDPA differs by {(out - wanted).abs().max():.3g}"
        row, key = row + qo_len, key + kv_len


def same_for_every_chunk_size(problem: Problem) -> None:
    """One chunk for all keys, one key at a time, and sizes between."""
    whole = attention.paged_attention(*problem.tensors, **problem.options)
    key_bytes = 8 * (problem.k_cache[0].numel() + problem.v_cache[0].numel())
    for keys in (1, 2, 3, 7):
        part = attention.paged_attention(*problem.tensors, **problem.options, chunk_bytes=keys * key_bytes)
        assert_close(part, whole.out, whole.lse, f"chunks of {keys} keys")


def same_when_rows_are_cut(problem: Problem) -> None:
    """All rows at once, and in pieces of which each sees other keys; for problems of more than 2,048 scores a head."""
    whole = attention.paged_attention(*problem.tensors, **problem.options)
    for scores in (3000, 7000):
        chunk_bytes = 8 * scores * problem.q.shape[1]
        part = attention.paged_attention(*problem.tensors, **problem.options, chunk_bytes=chunk_bytes)
        assert_close(part, whole.out, whole.lse, f"pieces of {scores} scores a head")


def split_equals_whole(problem: Problem) -> None:
    """Attention over the first k keys merged with attention over the others, for every k; one request."""
    (kv_len,) = problem.kv_lens
    problem = problem._replace(mask=Mask(causal=False))
    whole = attention.paged_attention(*problem.tensors, **problem.options)
    for k in range(kv_len + 1):
        keys = ((problem.slots[:k], k), (problem.slots[k:], kv_len - k))
        parts = [problem._replace(slots=slots, kv_lens=[length]) for slots, length in keys]
        states = [attention.paged_attention(*part.tensors, **part.options) for part in parts]
        assert_close(merge.merge(*states), whole.out, whole.lse, f"split at {k}")
