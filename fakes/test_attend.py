"""The fakes' numbers against the contract's dense arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fakes import attend, recorder
from fakes.contract.check import Requests, dense, requests
from fakes.recorder import Span


def _spans(r: Requests) -> list[Span]:
    spans = []
    for i, pages in enumerate(r.pages):
        slots = (np.array(pages, np.int64)[:, None] * r.page_size + np.arange(r.page_size)).reshape(-1)
        spans.append(Span(r.rows(i).start, r.rows(i).stop, slots[: r.kv_lens[i]]))
    return spans


def _attend(r: Requests, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = {"layout": "NHD", "scale": r.q.shape[-1] ** -0.5} | options
    k, v = given.pop("k", r.k_cache), given.pop("v", r.v_cache)
    out, lse = attend.attend(r.q, k, v, _spans(r), **given)
    return torch.from_numpy(out), torch.from_numpy(lse)


def _same(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(got[1], expected[1], rtol=1e-11, atol=1e-12)


BATCH = ([20, 0, 33, 3], [6, 2, 33, 7])


@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (5, 1)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "window_left": 4},
        {"window_left": 2},
        {"causal": True, "soft_cap": 1.5},
    ],
)
def test_masks_caps_and_groups(heads: tuple[int, int], options: dict[str, Any]) -> None:
    r = requests(*BATCH, heads=heads, dim=32, dtype=torch.float32)
    _same(_attend(r, **options), r.expected(**options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_dtypes_of_the_cache(dtype: torch.dtype) -> None:
    r = requests(*BATCH, dim=32, kv_dtype=dtype)
    _same(_attend(r, causal=True), r.expected(causal=True))


def test_head_major_and_stacked_caches() -> None:
    r = requests(*BATCH, dim=32)
    expected = r.expected()
    hnd = {"k": r.k_cache.transpose(1, 2).contiguous(), "v": r.v_cache.transpose(1, 2).contiguous()}
    _same(_attend(r, layout="HND", **hnd), expected)
    stacked = torch.stack((r.k_cache, r.v_cache), dim=1)
    _same(_attend(r, k=stacked[:, 0], v=stacked[:, 1]), expected)
    odd = torch.zeros(r.k_cache.shape[0], r.k_cache[0].numel() + 7, dtype=r.q.dtype)
    views = []
    for cache in (r.k_cache, r.v_cache):
        padded = odd.clone()
        padded[:, : cache[0].numel()] = cache.flatten(1)
        views.append(padded.as_strided(cache.shape, (padded.stride(0), *cache.stride()[1:])))
    _same(_attend(r, k=views[0], v=views[1]), expected)


def test_rows_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    r = requests(*BATCH, dim=32)
    whole = _attend(r, causal=True, window_left=9)
    monkeypatch.setattr(attend, "SCORES_AT_ONCE", 200)
    _same(_attend(r, causal=True, window_left=9), whole)


def test_scores_beyond_the_safe_range() -> None:
    r = requests([20, 9], [4, 9], dim=32, dtype=torch.float32)
    _same(_attend(r, causal=True, scale=90.0), r.expected(causal=True, scale=90.0))


def test_scales_per_request_and_head() -> None:
    r = requests([20, 9], [4, 2], dim=32)
    k_scale, v_scale = np.array([[0.5, 2.0], [1.0, 0.25]]), np.array([[3.0, 1.0], [0.5, 2.0]])
    parts = [
        dense(
            r.q[r.rows(i)],
            r.k[i].double() * torch.tensor(k_scale[i])[:, None],
            r.v[i].double() * torch.tensor(v_scale[i])[:, None],
        )
        for i in (0, 1)
    ]
    got = _attend(r, k_scale=k_scale, v_scale=v_scale)
    _same(got, (torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts])))


def test_a_sink_takes_weight_and_brings_no_value() -> None:
    r = requests([20, 0], [3, 1], dim=32)
    sinks = np.linspace(-1.0, 2.0, 8)
    out, lse = _attend(r, sinks=sinks)
    plain, plain_lse = r.expected()
    total = torch.logaddexp(plain_lse, torch.from_numpy(sinks)[None, :])
    _same((out, lse), (plain * torch.exp(plain_lse - total)[..., None], total))


def test_rows_that_no_span_covers_stay_poisoned() -> None:
    r = requests([20, 9], [4, 2], dim=32)
    out, lse = attend.attend(r.q, r.k_cache, r.v_cache, _spans(r)[1:], layout="NHD", scale=0.2)
    assert np.isnan(out[:4]).all()
    assert np.isnan(lse[:4]).all()
    assert np.isfinite(out[4:]).all()
    free = attend.uncovered(_spans(r)[1:], 6)
    assert free is not None
    assert free.tolist() == [True] * 4 + [False] * 2
    assert attend.uncovered(_spans(r), 6) is None


def test_a_foreign_nan_stays_with_its_request() -> None:
    r = requests([20, 9], [4, 2], dim=32)
    r.v_cache[r.pages[0]] = float("nan")
    out, _ = _attend(r)
    assert out[:4].isnan().all()
    assert out[4:].isfinite().all()


def test_results_keep_their_unrounded_values() -> None:
    exact = np.array([[1.0 + 2.0**-20, 2.0]])
    with recorder.recording() as record:
        result = attend.rounded(exact, torch.bfloat16)
        assert result.tolist() == [[1.0, 2.0]]
        kept = record.exact_of(result[:, :1])
        assert kept is not None
        assert kept[0, 0] == exact[0, 0]
        into = torch.full((1, 2), 7.0)
        attend.rounded(np.array([[3.0, 4.0]]), torch.float32, into, np.array([True]))
        assert into.tolist() == [[7.0, 7.0]]
