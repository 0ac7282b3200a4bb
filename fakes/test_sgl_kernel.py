"""`fakes.sgl_kernel.flash_attn`: numbers, refusals, findings, records. Measured facts are in the contract."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fakes.sgl_kernel
from fakes import cuda, modes, recorder
from fakes.contract import paged_fa
from fakes.contract.check import Requests, requests
from fakes.contract.rule import Lab
from fakes.sgl_kernel import flash_attn
from fakes.sgl_kernel.masking import Visible, visible

LAB = Lab(fakes.sgl_kernel)


@pytest.fixture
def strict() -> Iterator[recorder.Recorder]:
    with recorder.recording("strict") as record:
        yield record


@pytest.fixture
def faithful() -> Iterator[recorder.Recorder]:
    with recorder.recording("faithful") as record:
        yield record


def said(record: recorder.Recorder) -> list[tuple[str, int | None]]:
    return [(finding.rule.removeprefix("sgl_kernel."), finding.request) for finding in record.findings]


def table(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def small(kv_lens: list[int], qo_lens: list[int], page_size: int = 4, **more: Any) -> Requests:
    """Requests in float32, which strict mode takes: results are exact to rounding."""
    given = {"heads": (4, 2), "dim": 16, "dtype": torch.float32} | more
    return requests(kv_lens, qo_lens, page_size=page_size, poison=torch.nan, **given)


@pytest.mark.parametrize("seed", range(12))
def test_numbers_over_masks_page_sizes_and_lengths(seed: int, strict: recorder.Recorder) -> None:
    draw = np.random.default_rng(seed)
    kv_lens = draw.integers(0, 20, 4).tolist()
    qo_lens = draw.integers(0, 6, 4).tolist()
    qo_lens[0] = 1
    heads = [(4, 2), (5, 1), (3, 3)][seed % 3]
    r = small(kv_lens, qo_lens, page_size=int(draw.integers(1, 9)), heads=heads)
    window = [-1, 0, 3][int(draw.integers(3))]
    causal = bool(draw.integers(2)) or window >= 0
    cap = float(draw.integers(2))
    got, lse = paged_fa.attend(
        LAB, r, causal=causal, window_size=(window, 0 if causal else -1), softcap=cap, softmax_scale=0.3
    )
    expected, expected_lse = r.expected(causal=causal, window_left=window, soft_cap=cap, scale=0.3)
    torch.testing.assert_close(got.double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=1e-6)
    assert got.is_contiguous()
    assert not strict.findings
    exact = strict.exact_of(got)
    assert exact is not None
    np.testing.assert_allclose(exact, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_record_holds_what_the_library_reads(strict: recorder.Recorder) -> None:
    r = small([5, 6], [2, 1])
    paged_fa.attend(LAB, r)
    call = strict.calls[-1]
    assert (call.library, call.name, call.op) == ("sgl_kernel", "flash_attn_with_kvcache", "attend")
    assert call.arguments["page_table"].values.tolist() == paged_fa.page_table(r).tolist()
    assert call.arguments["causal"] is True
    attended = call.attended
    assert attended is not None
    assert (attended.layout, attended.page_size, attended.causal) == ("NHD", 4, True)
    assert [(span.q_start, span.q_end) for span in attended.spans] == [(0, 2), (2, 3)]
    first, second = r.pages[0]
    assert attended.spans[0].slots.tolist() == [*range(4 * first, 4 * first + 4), 4 * second]
    assert attended.k.data_ptr() == r.k_cache.data_ptr()


def test_positional_arguments_stand_where_the_real_ones_do(strict: recorder.Recorder) -> None:
    r = small([5], [1])
    got = flash_attn.flash_attn_with_kvcache(
        r.q, r.k_cache, r.v_cache, None, None, None, None, None, ints(5), None, None, paged_fa.page_table(r),
        ints(0, 1), None, 1,
    )  # fmt: skip
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got.double(), r.expected()[0], rtol=1e-6, atol=1e-6)


def test_four_dimensional_queries_over_pages_and_over_a_dense_cache(strict: recorder.Recorder) -> None:
    r = small([6, 9], [2, 2])
    expected, expected_lse = r.expected(causal=True)
    q = r.q.unflatten(0, (2, 2))
    out, lse = paged_fa.attend(LAB, r, q=q, cu_seqlens_q=None, max_seqlen_q=None)
    assert (out.shape, lse.shape) == ((2, 2, 4, 16), (2, 2, 4))
    torch.testing.assert_close(out.flatten(0, 1).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.flatten(0, 1).double(), expected_lse, rtol=1e-6, atol=1e-6)
    k_cache, v_cache = (torch.full((3, 10, 2, 16), torch.nan) for _ in range(2))
    for row, index in ((2, 0), (0, 1)):
        k_cache[row, : len(r.k[index])], v_cache[row, : len(r.v[index])] = r.k[index], r.v[index]
    dense, _ = paged_fa.attend(
        LAB,
        r,
        q=q,
        cu_seqlens_q=None,
        max_seqlen_q=None,
        page_table=None,
        k_cache=k_cache,
        v_cache=v_cache,
        cache_batch_idx=ints(2, 0),
    )
    torch.testing.assert_close(dense, out)
    by_row, _ = paged_fa.attend(LAB, r, page_table=paged_fa.page_table(r).flip(0), cache_batch_idx=ints(1, 0))
    torch.testing.assert_close(by_row.unflatten(0, (2, 2)), out)
    assert not strict.findings


def test_out_is_written_and_surplus_rows_are_not(faithful: recorder.Recorder) -> None:
    r = requests([5, 6], [2, 1], page_size=4)
    surplus = torch.cat([r.q, r.q[:1]])
    kept = torch.full_like(surplus, 7.0)
    out, lse = paged_fa.attend(LAB, r, q=surplus, out=kept)
    assert out is kept or out.data_ptr() == kept.data_ptr()
    assert (kept[3] == 7.0).all()
    assert lse[3].isnan().all()
    fresh, _ = paged_fa.attend(LAB, r, q=surplus)
    assert fresh[3].isnan().all()
    assert torch.equal(fresh[:3], kept[:3])


def test_split_buffers_are_handed_out_with_the_lse(strict: recorder.Recorder) -> None:
    r = small([5, 6], [2, 1])
    given: dict[str, Any] = {
        "page_table": paged_fa.page_table(r),
        "cache_seqlens": ints(5, 6),
        "cu_seqlens_q": ints(0, 2, 3),
        "max_seqlen_q": 2,
        "return_softmax_lse": True,
    }
    whole = flash_attn.flash_attn_with_kvcache(r.q, r.k_cache, r.v_cache, **given)
    assert [part is None for part in whole] == [False, False, True, True]
    split = flash_attn.flash_attn_with_kvcache(r.q, r.k_cache, r.v_cache, num_splits=2, **given)
    assert [tuple(part.shape) for part in split if part is not None] == [
        (3, 4, 16),
        (4, 3),
        (2, 4, 3, 16),
        (2, 4, 3),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_table": table([0, 1]).long()}, "page_table must have dtype torch.int32"),
        ({"page_table": table([0, 0], [1, 0]).T[:1]}, "page_table must have dtype torch.int32"),
        ({"cu_seqlens_q": ints(0, 1).long()}, "cu_seqlens_q must have dtype torch.int32"),
        ({"cu_seqlens_q": ints(0, 1, 1)}, "batch_size must be equal to batch_size_k"),
        ({"max_seqlen_q": None}, "max_seqlen_q must be provided if cu_seqlens_q is provided"),
        ({"cache_seqlens": torch.tensor([5])}, "seqused_k must have dtype int32"),
        ({"cache_seqlens": ints(5, 5)}, r"seqused_k must have shape \(batch_size\)"),
        ({"q": torch.zeros(1, 4, 64, dtype=torch.bfloat16)}, "query and key must have the same dtype"),
        ({"q": torch.zeros(1, 3, 64, dtype=torch.float16)}, "Number of heads in key/value must divide"),
        (
            {"q": torch.zeros(1, 4, 32, dtype=torch.float16)},
            "If V headdim is different from Q/K dim|k must have",
        ),
        (
            {"q": torch.zeros(1, 1, 4, 64, dtype=torch.float16)},
            r"q must have shape \(total_q, num_heads, head_size\)",
        ),
        (
            {"v_cache": torch.zeros(2, 8, 2, 64, dtype=torch.float16)},
            r"v must have shape \(num_pages, page_size",
        ),
        ({"out": torch.zeros(1, 4, 64)}, "output must have the same dtype as inputs"),
        ({"out": torch.zeros(2, 4, 64, dtype=torch.float16)}, r"out must have shape \(total_q"),
        ({"num_splits": 257}, "num_splits > 256 not supported"),
        ({"sinks": torch.zeros(4)}, "sinks must have dtype bfloat16"),
        ({"sinks": torch.zeros(3, dtype=torch.bfloat16)}, r"sinks must have shape \(num_heads\)"),
        ({"k": torch.zeros(1, 1, 2, 64, dtype=torch.float16)}, "v_new must also be passed in"),
        ({"rotary_cos": torch.zeros(8, 8)}, "If rotary cos/sin are provided"),
        ({"scheduler_metadata": ints(0, 0)}, r"scheduler_metadata must have shape \(metadata_size\)"),
    ],
)
def test_refusals_in_the_librarys_words(changes: dict[str, Any], message: str) -> None:
    r = requests([5], [1], heads=(4, 2), dim=64, dtype=torch.float16, page_size=4)
    if changes.get("page_table", ints(0)).dtype == torch.int32 and "page_table" in changes:
        changes = {
            "page_table": torch.zeros(2, 2, dtype=torch.int64).T[:1]
        }  # strided columns are copied first
    with pytest.raises(RuntimeError, match=message):
        paged_fa.attend(LAB, r, **changes)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"v_cache": None}, ValueError, "v_cache must be provided"),
        ({"k_cache": None}, ValueError, "k_cache can only be None when only_qv=True"),
        ({"qv": torch.zeros(1)}, NotImplementedError, "does not compute qv"),
        ({"cache_leftpad": ints(0)}, NotImplementedError, "does not compute cache_leftpad"),
        ({"attention_chunk": 4}, NotImplementedError, "does not compute attention_chunk"),
    ],
)
def test_other_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        paged_fa.attend(LAB, requests([5], [1], page_size=4), **changes)


def test_arguments_without_effect_are_taken() -> None:
    r = requests([5], [1], page_size=4)
    plain, _ = paged_fa.attend(LAB, r)
    tuned, _ = paged_fa.attend(
        LAB,
        r,
        attention_chunk=0,
        pack_gqa=True,
        sm_margin=8,
        rotary_interleaved=False,
        cu_seqlens_k_new=ints(0, 5),
    )
    assert torch.equal(plain, tuned)


def test_float32_is_strict_modes_own_extension(faithful: recorder.Recorder) -> None:
    r = small([5], [1])
    with pytest.raises(RuntimeError, match="only supports fp16, bf16, and fp8_e4m3"):
        paged_fa.attend(LAB, r)
    with recorder.recording("strict"):
        paged_fa.attend(LAB, r)


@pytest.mark.parametrize(
    ("changes", "rules"),
    [
        ({"page_table": table([0, 41], [2, 3])}, [("fa.page_table.range", 0)]),
        ({"page_table": table([0, 1], [-1, 3])}, [("fa.page_table.range", 1)]),
        ({"page_table": table([0], [1])}, [("fa.page_table.narrow", 0), ("fa.page_table.narrow", 1)]),
        ({"cache_seqlens": ints(5, -2)}, [("fa.lengths.negative", 1)]),
        ({"cu_seqlens_q": ints(1, 2, 3)}, [("fa.cu_seqlens_q.start", None)]),
        ({"cu_seqlens_q": ints(0, 2, 1)}, [("fa.cu_seqlens_q.falls", 1), ("fa.cu_seqlens_q.rows", None)]),
        ({"cu_seqlens_q": ints(0, 1, 2)}, [("fa.cu_seqlens_q.rows", None)]),
        ({"max_seqlen_q": 1}, [("fa.max_seqlen_q.short", None)]),
        ({"k_descale": torch.full((2, 2), 0.5)}, [("ignored_argument", None)]),
        ({"k_descale": torch.ones(2, 2)}, []),
        ({"score_mod": max}, [("ignored_argument", None)]),
        ({"ver": 4}, [("ignored_argument", None)]),
    ],
)
def test_findings(changes: dict[str, Any], rules: list[tuple[str, int | None]]) -> None:
    r = requests([5, 6], [2, 1], heads=(4, 2), dim=64, page_size=4)
    with recorder.recording("faithful") as record:
        paged_fa.attend(LAB, r, **changes)
        assert not record.findings
    with recorder.recording("strict") as record:
        paged_fa.attend(LAB, r, **changes)
        paged_fa.attend(LAB, r, **changes)
    assert said(record) == rules
    assert {finding.kind for finding in record.findings} <= {"arrays"}


def test_a_token_location_is_told_from_a_bad_page(strict: recorder.Recorder) -> None:
    r = requests([5, 5], page_size=4)
    assert len(r.k_cache) == 7
    out, lse = paged_fa.attend(LAB, r, page_table=table([0, 24], [1, 41]))
    assert [finding.message for finding in strict.findings] == [
        (
            "page_table[0, 1] is 24, the pool has 7 pages: it looks like a token location; "
            "divide by page_size 4 to get page 6"
        ),
        "page_table[1, 1] is 41, the pool has 7 pages: it must be 0 to 6",
    ]
    assert out.isnan().all()
    assert lse.isneginf().all()


def test_a_short_row_reads_on_in_memory(faithful: recorder.Recorder) -> None:
    r = requests([6, 3], page_size=4)
    first, second = r.pages[0]
    wide = table([first, second], [r.pages[1][0], 0])
    right, _ = paged_fa.attend(LAB, r, page_table=wide)
    sliced, _ = paged_fa.attend(LAB, r, page_table=wide[:, :1])  # the rest of the row lies behind its view
    assert torch.equal(sliced, right)
    packed, _ = paged_fa.attend(LAB, r, page_table=table([first], [second]))  # the next row lies there
    assert torch.equal(packed[0], right[0])
    spans = faithful.calls[-1].attended
    assert spans is not None
    assert spans.spans[0].slots.tolist()[4:] == [second * 4, second * 4 + 1]
    last, lse = paged_fa.attend(
        LAB, requests([6], page_size=4), page_table=table([first])
    )  # nothing lies there
    assert last.isnan().all()
    assert lse.isneginf().all()


def test_a_long_table_is_read_by_request(strict: recorder.Recorder) -> None:
    lens = [1] * 63 + [3000]
    r = requests(lens, heads=(1, 1), dim=8, dtype=torch.float32, page_size=1)
    out, _ = paged_fa.attend(LAB, r, page_table=paged_fa.page_table(r, padding=-1))
    torch.testing.assert_close(out.double(), r.expected(causal=True)[0], rtol=1e-6, atol=1e-6)
    assert not strict.findings


def test_a_batch_of_nobody_and_of_nothing(strict: recorder.Recorder) -> None:
    r = small([0, 0], [1, 2])
    out, lse = paged_fa.attend(LAB, r, page_table=table([], []))
    assert (out == 0).all()
    assert lse.isneginf().all()
    nobody, _ = paged_fa.attend(
        LAB,
        r,
        q=r.q[:0],
        page_table=table([]).reshape(0, 1),
        cu_seqlens_q=ints(0),
        cache_seqlens=ints(),
        max_seqlen_q=0,
    )
    assert tuple(nobody.shape) == (0, 4, 16)
    assert not strict.findings


def test_rows_beyond_q_are_undefined() -> None:
    r = requests([5, 6], [2, 1], page_size=4)
    with pytest.raises(modes.UndefinedRead, match="request 1 the rows 2 to 4, q has 3"):
        paged_fa.attend(LAB, r, cu_seqlens_q=ints(0, 2, 5))


def test_lengths_beyond_a_dense_cache_are_found(strict: recorder.Recorder) -> None:
    cache = torch.randn(2, 8, 2, 16)
    out = flash_attn.flash_attn_with_kvcache(torch.randn(2, 1, 4, 16), cache, cache, cache_seqlens=ints(8, 9))
    assert isinstance(out, torch.Tensor)
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    assert said(strict) == [("fa.lengths.capacity", 1)]


def test_new_keys_are_appended_ragged_and_nothing_else_is_touched(strict: recorder.Recorder) -> None:
    r = small([9, 6], [3, 1])
    k_cache, v_cache = r.k_cache.clone(), r.v_cache.clone()
    for pages, positions in ((r.pages[0], (6, 7, 8)), (r.pages[1], (5,))):
        for position in positions:
            k_cache[pages[position // 4], position % 4] = torch.nan
            v_cache[pages[position // 4], position % 4] = torch.nan
    out, _ = paged_fa.attend(
        LAB,
        r,
        k_cache=k_cache,
        v_cache=v_cache,
        k=torch.cat([r.k[0][6:], r.k[1][5:]]),
        v=torch.cat([r.v[0][6:], r.v[1][5:]]),
        cu_seqlens_k_new=ints(0, 3, 4),
        cache_seqlens=ints(6, 5),
    )
    assert torch.equal(k_cache.nan_to_num(), r.k_cache.nan_to_num())
    assert torch.equal(v_cache.nan_to_num(), r.v_cache.nan_to_num())
    torch.testing.assert_close(out.double(), r.expected(causal=True)[0], rtol=1e-6, atol=1e-6)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        paged_fa.attend(
            LAB, r, page_table=table([9999] * 3, [9999] * 3), k=r.k[0][:4], v=r.v[0][:4],
            cu_seqlens_k_new=ints(0, 2, 4), cache_seqlens=ints(2, 2),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("told", "runs"),
    [
        ({}, Visible(True, -1, 0)),
        ({"causal": False}, Visible(False, -1, -1)),
        ({"window": (3, 0)}, Visible(False, 3, 0)),
        ({"window": (3, 5)}, Visible(False, 3, 0)),
        ({"window": (63, 0)}, Visible(True, -1, 0)),
        ({"causal": False, "window": (7, -1)}, Visible(False, 7, 4)),
        ({"causal": False, "window": (7, 2)}, Visible(False, 7, 2)),
        ({"causal": False, "window": (-1, 0)}, Visible(True, -1, 0)),
        ({"seqlen_q": 1}, Visible(False, -1, -1)),
        ({"seqlen_q": 1, "head_dim": 128}, Visible(True, -1, 0)),
        ({"seqlen_q": 1, "head_dim": 128, "paged": False}, Visible(False, -1, -1)),
        ({"seqlen_q": 1, "window": (3, 0)}, Visible(False, 3, 0)),
    ],
)
def test_the_mask_is_simplified_by_the_lengths_told(told: dict[str, Any], runs: Visible) -> None:
    given = {"causal": True, "window": (-1, -1), "seqlen_q": 5, "seqlen_k": 64, "head_dim": 64, "paged": True}
    assert visible(**(given | told)) == runs


def test_scheduler_metadata_is_taken_while_it_fits(strict: recorder.Recorder) -> None:
    r = small([9, 6], [3, 1])
    shape: dict[str, Any] = {
        "batch_size": 2,
        "max_seqlen_q": 3,
        "max_seqlen_k": 16,
        "num_heads": 4,
        "num_heads_k": 2,
        "headdim": 16,
        "page_size": 4,
        "causal": True,
    }
    metadata = flash_attn.get_scheduler_metadata(cache_seqlens=ints(9, 6), **shape)
    assert tuple(metadata.shape) == (1 + 4 * 4,)
    plain, _ = paged_fa.attend(LAB, r)
    planned, _ = paged_fa.attend(LAB, r, scheduler_metadata=metadata)
    assert torch.equal(plain, planned)
    assert not strict.findings
    stale = flash_attn.get_scheduler_metadata(cache_seqlens=ints(8, 6), **shape)
    paged_fa.attend(LAB, r, scheduler_metadata=stale)
    assert [(f.rule, f.kind) for f in strict.findings] == [
        ("sgl_kernel.fa.scheduler_metadata.stale", "order")
    ]
    assert [call.op for call in strict.calls if call.name == "get_scheduler_metadata"] == ["plan", "plan"]
    strict.findings.clear()
    eight = flash_attn.get_scheduler_metadata(cache_seqlens=ints(9, 6), num_splits=8, **shape)
    paged_fa.attend(LAB, r, scheduler_metadata=eight, num_splits=8)
    assert not strict.findings
    paged_fa.attend(LAB, r, scheduler_metadata=eight, num_splits=2)
    assert [f.rule for f in strict.findings] == ["sgl_kernel.fa.scheduler_metadata.splits"]
    shape["causal"] = False
    plain_mask = flash_attn.get_scheduler_metadata(cache_seqlens=ints(9, 6), **shape)
    with pytest.raises(RuntimeError, match="scheduler_metadata must have shape"):
        paged_fa.attend(LAB, r, scheduler_metadata=plain_mask)


def test_sinks_weigh_like_a_key_without_value(strict: recorder.Recorder) -> None:
    r = small([5], [1], heads=(2, 2))
    sinks = torch.tensor([1.0, -2.0], dtype=torch.bfloat16)
    out, lse = paged_fa.attend(LAB, r, sinks=sinks)
    plain, plain_lse = r.expected(causal=True)
    weight = torch.exp(plain_lse) / (torch.exp(plain_lse) + torch.exp(sinks.double()))
    torch.testing.assert_close(out.double(), plain * weight[..., None], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse.double(), plain_lse - torch.log(weight), rtol=1e-6, atol=1e-6)


def test_results_are_on_the_simulated_device() -> None:
    r = requests([5, 6], [2, 1], page_size=4)
    with cuda.simulated_cuda():
        given: dict[str, Any] = {name: value.to("cuda") for name, value in _tensors(r).items()}
        out, lse, *_ = flash_attn.flash_attn_with_kvcache(
            **given, max_seqlen_q=2, causal=True, return_softmax_lse=True
        )
        assert out is not None
        assert lse is not None
        assert (out.is_cuda, lse.is_cuda) == (True, True)
        for name, said_so in (
            ("q", "q must be on CUDA"),
            ("k_cache", "k must be on CUDA"),
            ("page_table", "page_table must be on CUDA"),
            ("cu_seqlens_q", "cu_seqlens_q must be on CUDA"),
            ("cache_seqlens", "seqused_k must be on CUDA"),
        ):
            with pytest.raises(RuntimeError, match=said_so):
                flash_attn.flash_attn_with_kvcache(**{**given, name: given[name].cpu()}, max_seqlen_q=2)


def _tensors(r: Requests) -> dict[str, torch.Tensor]:
    return {
        "q": r.q,
        "k_cache": r.k_cache,
        "v_cache": r.v_cache,
        "page_table": paged_fa.page_table(r),
        "cache_seqlens": torch.tensor(r.kv_lens, dtype=torch.int32),
        "cu_seqlens_q": paged_fa.running_sum(r.qo_lens),
    }
