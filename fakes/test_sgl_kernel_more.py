"""`fakes.sgl_kernel`: ragged attention, merging, FlashMLA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fakes import cuda, modes, recorder
from fakes.contract import paged_fa
from fakes.contract.check import Requests, dense, requests
from fakes.sgl_kernel import attention, flash_attn, flash_mla


@pytest.fixture
def strict() -> Iterator[recorder.Recorder]:
    with recorder.recording("strict") as record:
        yield record


def said(record: recorder.Recorder) -> list[tuple[str, int | None]]:
    return [(finding.rule.removeprefix("sgl_kernel."), finding.request) for finding in record.findings]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def ragged(r: Requests, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE `[rows, heads]` of a causal ragged call."""
    given = {
        "q": r.q,
        "k": torch.cat(r.k),
        "v": torch.cat(r.v),
        "cu_seqlens_q": paged_fa.running_sum(r.qo_lens),
        "cu_seqlens_k": paged_fa.running_sum(r.kv_lens),
        "max_seqlen_q": max(r.qo_lens),
        "max_seqlen_k": max(r.kv_lens),
        "causal": True,
    } | changes
    out, lse, *_ = flash_attn.flash_attn_varlen_func(**given, return_softmax_lse=True)
    assert out is not None
    assert lse is not None
    return out, lse.T


def small(kv_lens: list[int], qo_lens: list[int]) -> Requests:
    return requests(kv_lens, qo_lens, heads=(4, 2), dim=16, dtype=torch.float32)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)


def test_ragged_attention(strict: recorder.Recorder) -> None:
    r = small([9, 0, 4], [3, 2, 6])
    out, lse = ragged(r)
    expected, expected_lse = r.expected(causal=True)
    close(out, expected)
    close(lse, expected_lse)
    assert not strict.findings
    attended = strict.calls[-1].attended
    assert attended is not None
    assert attended.layout == "ragged"
    assert [span.slots.tolist() for span in attended.spans] == [list(range(9)), [], list(range(9, 13))]


def test_used_lengths_shorten_requests(strict: recorder.Recorder) -> None:
    r = small([9, 4], [3, 2])
    out, lse = ragged(r, seqused_k=ints(7, 4), seqused_q=ints(2, 2))
    first, first_lse = dense(r.q[:2], r.k[0][:7], r.v[0][:7], causal=True)
    close(out[:2], first)
    close(lse[:2], first_lse)
    assert out[2].isnan().all()


def test_no_key_in_the_whole_batch_skips_the_launch(strict: recorder.Recorder) -> None:
    out, lse = ragged(small([0, 0], [2, 1]))
    assert (out == 0).all()
    assert lse.isposinf().all()


def test_ragged_refusals_and_findings(strict: recorder.Recorder) -> None:
    r = small([9, 4], [3, 2])
    with pytest.raises(ValueError, match="max_seqlen_q and max_seqlen_k are required for FA3"):
        ragged(r, max_seqlen_k=None)
    with pytest.raises(RuntimeError, match=r"cu_seqlens_k must have dtype torch\.int32"):
        ragged(r, cu_seqlens_k=ints(0, 9, 13).long())
    with pytest.raises(RuntimeError, match="cu_seqlens_q must be contiguous"):
        ragged(r, cu_seqlens_q=ints(0, 7, 3, 7, 5)[::2])
    with pytest.raises(RuntimeError, match="batch_size must be equal to batch_size_k"):
        ragged(r, cu_seqlens_k=ints(0, 9, 13, 13))
    with pytest.raises(RuntimeError, match=r"k must have shape \(total_k, num_heads_k, head_size\)"):
        ragged(r, k=r.k_cache, v=r.v_cache, page_table=paged_fa.page_table(r))
    assert said(strict) == [("ignored_argument", None)]
    strict.findings.clear()
    out, _ = ragged(r, cu_seqlens_k=ints(0, 9, 14))
    k, v = (torch.cat((t, torch.zeros_like(t[:1]))) for t in (r.k[1], r.v[1]))  # what loads find behind k
    close(out[:3], r.expected(causal=True)[0][:3])
    close(out[3:], dense(r.q[3:], k, v, causal=True)[0])
    assert said(strict) == [("fa.cu_seqlens_k.rows", None)]


def states(r: Requests, cut: int) -> list[torch.Tensor]:
    parts = [dense(r.q, r.k[0][part], r.v[0][part]) for part in (slice(0, cut), slice(cut, None))]
    return [t.to(torch.float32).contiguous() for part in parts for t in part]


def test_merging_equals_attending_at_once(strict: recorder.Recorder) -> None:
    r = small([9], [3])
    v_a, s_a, v_b, s_b = states(r, 4)
    out, lse = attention.merge_state_v2(v_a, s_a, v_b, s_b)
    expected, expected_lse = r.expected()
    close(out, expected)
    close(lse, expected_lse)
    into, lse_into = torch.empty_like(v_a), torch.empty_like(s_a)
    again, _ = attention.merge_state_v2(v_a, s_a, v_b, s_b, into, lse_into)
    assert again.data_ptr() == into.data_ptr()
    assert torch.equal(into, out)
    assert torch.equal(lse_into, lse)
    assert not strict.findings
    assert {call.op for call in strict.calls} == {"merge"}


def test_merging_carries_unrounded_values(strict: recorder.Recorder) -> None:
    r = small([9], [3])
    parts = [
        ragged(small_part(r, part), causal=False, cu_seqlens_k=ints(0, len(r.k[0][part])))
        for part in (slice(0, 4), slice(4, 9))
    ]
    (v_a, s_a), (v_b, s_b) = ((out, lse.contiguous()) for out, lse in parts)
    merged, _ = attention.merge_state_v2(v_a, s_a, v_b, s_b)
    exact = strict.exact_of(merged)
    assert exact is not None
    assert abs(exact - r.expected()[0].numpy()).max() < 1e-6  # the LSE copy is float32


def small_part(r: Requests, part: slice) -> Requests:
    keys, values = r.k[0][part], r.v[0][part]
    return Requests(r.q, r.k_cache, r.v_cache, r.pages, [keys], [values], r.qo_lens, [len(keys)], r.page_size)


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_an_empty_state_weighs_nothing_and_two_give_nan(empty: float, strict: recorder.Recorder) -> None:
    r = small([9], [3])
    v, s, *_ = states(r, 9)
    nothing, none = torch.zeros_like(v), torch.full_like(s, empty)
    out, lse = attention.merge_state_v2(v, s, nothing, none)
    assert torch.equal(out, v)
    assert torch.equal(lse, s)
    assert not strict.findings
    out, lse = attention.merge_state_v2(nothing, none, nothing, none)
    assert out.isnan().all()
    assert lse.isnan().all()
    assert said(strict) == [("merge.empty", None)]


def test_a_state_of_another_dtype_is_read_by_its_bytes(strict: recorder.Recorder) -> None:
    v_a, s = torch.ones(2, 2, 8, dtype=torch.bfloat16), torch.zeros(2, 2)
    v_b = torch.full((2, 2, 8), 2.0, dtype=torch.float16)
    out, _ = attention.merge_state_v2(v_a, s, v_b, s)
    misread = v_b.view(torch.bfloat16).double()
    close(out, ((v_a.double() + misread) / 2).to(torch.bfloat16).double())
    assert said(strict) == [("merge.dtype", None)]
    with pytest.raises(modes.UndefinedRead, match=r"v_b is torch\.bfloat16 and read as torch\.float32"):
        attention.merge_state_v2(torch.ones(2, 2, 8), s, v_a, s)


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (0, torch.ones(2, 4, 2)[:, :, 0], "v_a must be contiguous"),
        (0, torch.ones(2, 8), "v_a must be a 3D tensor"),
        (1, torch.zeros(2, 2).T[:1].T, "s_a must be contiguous"),
        (1, torch.zeros(3, 2), "s_a.size"),
        (2, torch.ones(2, 2, 4), "v_a.size"),
    ],
)
def test_merge_refusals(index: int, tensor: torch.Tensor, message: str) -> None:
    given = [torch.ones(2, 2, 8), torch.zeros(2, 2), torch.ones(2, 2, 8), torch.zeros(2, 2)]
    given[index] = tensor
    with pytest.raises(RuntimeError, match=message):
        attention.merge_state_v2(*given)


def test_more_merge_refusals() -> None:
    narrow = torch.ones(2, 2, 4, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="headsize must be multiple of pack_size:8"):
        attention.merge_state_v2(narrow, torch.zeros(2, 2), narrow, torch.zeros(2, 2))
    tiny = torch.ones(2, 2, 16).to(torch.float8_e4m3fn)
    with pytest.raises(RuntimeError, match="Unsupported data type of O"):
        attention.merge_state_v2(tiny, torch.zeros(2, 2), tiny, torch.zeros(2, 2))
    with cuda.simulated_cuda():
        v, s = torch.ones(2, 2, 8, device="cuda"), torch.zeros(2, 2, device="cuda")
        with pytest.raises(RuntimeError, match="s_b must be a CUDA tensor"):
            attention.merge_state_v2(v, s, v, s.cpu())
        assert all(t.is_cuda for t in attention.merge_state_v2(v, s, v, s))


def latent(kv_lens: list[int], rows: int = 1) -> dict[str, Any]:
    r = requests(kv_lens, [rows] * len(kv_lens), heads=(2, 1), dim=576, page_size=64, poison=torch.nan)
    return {
        "q": r.q.unflatten(0, (-1, rows)),
        "k_cache": r.k_cache,
        "block_table": paged_fa.page_table(r, padding=-1),
        "cache_seqlens": torch.tensor(kv_lens, dtype=torch.int32),
        "head_dim_v": 512,
        "causal": True,
    }


def mla(given: dict[str, Any], **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    merged: dict[str, Any] = {"tile_scheduler_metadata": flash_mla.FlashMLASchedMeta()} | given | changes
    return flash_mla.flash_mla_with_kvcache(**merged)


def test_mla_schedules_of_both_kinds_give_the_same(strict: recorder.Recorder) -> None:
    given = latent([70, 5], rows=2)
    schedule, num_splits = flash_mla.get_mla_metadata(given["cache_seqlens"], 4, 1)
    assert isinstance(schedule, torch.Tensor)
    assert schedule.shape[1] == 8
    one = mla(given, tile_scheduler_metadata=schedule, num_splits=num_splits)
    kept, none = flash_mla.get_mla_metadata()
    assert none is None
    for _ in range(2):
        other = mla(given, tile_scheduler_metadata=kept)
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not strict.findings
    with pytest.raises(AssertionError, match="inconsistent with FlashMLASchedMeta"):
        mla(given, causal=False, tile_scheduler_metadata=kept)
    mla(given, cache_seqlens=ints(71, 5), tile_scheduler_metadata=kept)
    assert [(f.rule, f.kind) for f in strict.findings] == [
        ("sgl_kernel.mla.tile_scheduler_metadata.stale", "order")
    ]


def test_mla_fp8_is_descaled(strict: recorder.Recorder) -> None:
    given = latent([70])
    plain, _ = mla(given)
    tiny = {name: given[name].nan_to_num().to(torch.float8_e4m3fn) for name in ("q", "k_cache")}
    with pytest.raises(RuntimeError, match="descale is required when input dtype is fp8"):
        mla(given | tiny)
    scaled, _ = mla(given | tiny, descale_q=torch.ones(1), descale_k=torch.ones(1))
    assert scaled.dtype == torch.bfloat16
    assert (scaled - plain).abs().max() < 0.2


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_table": torch.zeros(1, 2, dtype=torch.int64)}, RuntimeError, "block_table must have dtype"),
        ({"cache_seqlens": torch.tensor([70])}, RuntimeError, "seqlens_k must have dtype int32"),
        ({"head_dim_v": 576}, RuntimeError, "Only head_size_v == 512 is supported"),
        (
            {"indices": torch.zeros(1, 1, 1, dtype=torch.int32)},
            NotImplementedError,
            "does not compute indices",
        ),
        ({"is_fp8_kvcache": True}, NotImplementedError, "does not compute is_fp8_kvcache"),
        ({"attn_sink": torch.zeros(2)}, AssertionError, None),
        ({"num_splits": torch.zeros(2, dtype=torch.int32)}, AssertionError, "num_splits must be None"),
    ],
)
def test_mla_refusals(changes: dict[str, Any], error: type[Exception], message: str | None) -> None:
    with pytest.raises(error, match=message):
        mla(latent([70]), **changes)


def test_mla_findings(strict: recorder.Recorder) -> None:
    out, _ = mla(latent([70, 70]), block_table=torch.tensor([[0, 1], [0, 640]], dtype=torch.int32))
    assert out[1].isnan().all()
    assert said(strict) == [("mla.block_table.range", 1)]


@pytest.mark.parametrize(
    ("page_size", "rows", "spoiled"),
    [(128, 63, True), (256, 49, True), (128, 48, False), (64, 63, False)],  # 192 packed rows fill a tile
)
def test_v_behind_the_last_key_shows_where_tiles_are_loaded_whole(
    page_size: int, rows: int, spoiled: bool
) -> None:
    """Measured on an H200: the request with a full page stays right, the one with a tail of NaN becomes NaN."""
    k, v = (torch.zeros(2, page_size, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    v[1, 6:] = torch.nan
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(
        torch.zeros(rows + 1, 4, 64, dtype=torch.bfloat16),
        k,
        v,
        page_table=ints(0, 1)[:, None],
        cache_seqlens=ints(page_size, 6),
        cu_seqlens_q=ints(0, rows, rows + 1),
        max_seqlen_q=rows,
        causal=True,
        return_softmax_lse=True,
    )
    assert out is not None
    assert lse is not None
    assert bool(out[rows].isnan().all()) is spoiled
    assert bool(out[:rows].isfinite().all())
    assert bool(lse.isfinite().all())


def test_only_tiles_that_reach_the_last_key_load_what_is_behind() -> None:
    k, v = (torch.zeros(3, 128, 1, 64, dtype=torch.bfloat16) for _ in range(2))
    v[2, 1:, :, 7] = torch.inf
    out = flash_attn.flash_attn_with_kvcache(
        torch.zeros(200, 2, 64, dtype=torch.bfloat16),
        k,
        v,
        page_table=ints(0, 1, 2)[None],
        cache_seqlens=ints(257),
        cu_seqlens_q=ints(0, 200),
        max_seqlen_q=200,
        causal=True,
    )
    assert isinstance(out, torch.Tensor)
    bad = out.isnan().all(dim=1)
    assert bad[:, 7].nonzero().flatten().tolist() == list(range(192, 200))
    assert not bad[:, :7].any()
