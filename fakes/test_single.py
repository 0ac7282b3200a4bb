"""Single requests, which no planner cuts ahead, against the contract's dense arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fakes import flashinfer, releases
from fakes.contract.check import dense
from fakes.contract.paged_fi import LN2
from fakes.flashinfer.kernels import SENTINEL

Pair = tuple[torch.Tensor, torch.Tensor]
SHAPES = ((1, 1), (1, 20), (5, 20), (5, 0), (9, 4), (70, 300))
"""Rows and keys; where there are fewer keys, causal rows see none."""
OPTIONS = ((-1, 0.0), (-1, 1.5), (0, 0.0), (1, 1.5), (7, 0.0), (100, 0.0))
"""Windows and soft caps."""
over_heads = pytest.mark.parametrize("heads", [(4, 4), (6, 2)])


@pytest.fixture(autouse=True, params=["0.6.6", "0.7.4"])
def release(request: pytest.FixtureRequest) -> Iterator[str]:
    with releases.select(flashinfer=request.param):
        yield request.param


def _qkv(rows: int, keys: int, heads: tuple[int, int] = (8, 2), dim: int = 64) -> tuple[torch.Tensor, ...]:
    random = torch.Generator().manual_seed(rows * 1000 + keys)
    shapes = ((rows, heads[0], dim), (keys, heads[1], dim), (keys, heads[1], dim))
    return tuple(torch.randn(shape, generator=random).to(torch.float16) for shape in shapes)


def _same(got: Pair, expected: Pair, *, averaged: bool = False) -> None:
    """A row without keys is 0, or with `averaged` a mean of values; the LSE that stands for none is -inf from 0.7.2."""
    out, lse = got[0].double(), got[1].double()
    empty = expected[1].isneginf()
    there = ~empty if averaged else torch.ones_like(empty)
    torch.testing.assert_close(out[there], expected[0][there], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close((lse * LN2)[~empty], expected[1][~empty], rtol=0, atol=1e-5)
    none = -math.inf if releases.at_least("flashinfer", "0.7.2") else SENTINEL
    assert averaged or (lse[empty] == none).all()


def _prefill(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Pair:
    return flashinfer.single_prefill_with_kv_cache(q, k, v, return_lse=True, **options)


@over_heads
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_decode(use_tensor_cores: bool, layout: str, heads: tuple[int, int]) -> None:
    for keys, (window, cap) in itertools.product((0, 1, 2, 20, 300), OPTIONS):
        q, k, v = _qkv(1, keys, heads)
        given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
        out, lse = flashinfer.single_decode_with_kv_cache(
            q[0],
            *given,
            layout,
            use_tensor_cores=use_tensor_cores,
            window_left=window,
            logits_soft_cap=cap or None,
            return_lse=True,
        )
        _same((out[None], lse[None]), dense(q, k, v, window_left=window, soft_cap=cap))


@over_heads
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_prefill(backend: str, causal: bool, heads: tuple[int, int], release: str) -> None:
    averaged = backend == "fa3" and causal and release == "0.6.6"
    for shape, (window, cap) in itertools.product(SHAPES, OPTIONS):
        q, k, v = _qkv(*shape, heads)
        got = _prefill(
            q, k, v, causal=causal, window_left=window, logits_soft_cap=cap or None, backend=backend
        )
        expected = dense(q, k, v, causal=causal, window_left=window, soft_cap=cap)
        _same(got, expected, averaged=averaged)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_custom_masks_go_before_causal_and_within_the_window(causal: bool, packed: bool) -> None:
    for (rows, keys), (window, cap) in itertools.product(SHAPES, OPTIONS):
        if not keys:
            continue
        q, k, v = _qkv(rows, keys)
        mask = torch.rand(rows, keys, generator=torch.Generator().manual_seed(0)) < 0.5
        mask[rows // 2] = False  # a row without keys
        bits = torch.from_numpy(np.packbits(mask.reshape(-1).numpy(), bitorder="little"))
        got = _prefill(
            q,
            k,
            v,
            causal=causal,
            custom_mask=None if packed else mask,
            packed_custom_mask=bits if packed else None,
            window_left=window,
            logits_soft_cap=cap or None,
        )
        own = torch.arange(rows)[:, None] + keys - rows
        seen = mask & (torch.arange(keys) >= own - window) if window >= 0 else mask
        _same(got, dense(q, k, v, mask=seen, soft_cap=cap))


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_a_nan_that_is_seen_is_a_nan(backend: str) -> None:
    for (rows, keys), (window, _) in itertools.product(((1, 20), (5, 20), (70, 300)), OPTIONS):
        q, k, v = _qkv(rows, keys)
        v[-1] = math.nan
        out, _ = _prefill(q, k, v, window_left=window, backend=backend)
        assert out.isnan().all()
        for use_tensor_cores in (False, True):
            one = flashinfer.single_decode_with_kv_cache(
                q[0], k, v, use_tensor_cores=use_tensor_cores, window_left=window
            )
            assert one.isnan().all()
