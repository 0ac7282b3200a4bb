"""The FlashInfer fake beyond the contract: its record, findings, buffers, and what it does not compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fakes import cuda, flashinfer, modes, recorder, releases
from fakes.contract.check import Requests, requests
from fakes.contract.paged_fi import LN2, arrays, caches, ints, make, plan, workspace
from fakes.contract.rule import Lab
from fakes.flashinfer import paged_run

LAB = Lab(flashinfer)


@pytest.fixture
def strict() -> Iterator[recorder.Recorder]:
    with recorder.recording("strict") as record:
        yield record


def _run(kernel: Any, r: Requests, **planning: Any) -> Any:
    wrapper = make(LAB, kernel)
    plan(LAB, wrapper, kernel, r, **planning)
    return wrapper.run(r.q, caches(LAB, r), return_lse=True)


def _exact(record: recorder.Recorder, tensor: torch.Tensor) -> np.ndarray:
    kept = record.exact_of(tensor)
    assert kept is not None
    return kept


def test_spans_are_recorded_as_the_kernel_reads_them(strict: recorder.Recorder) -> None:
    r = requests([20, 5], [3, 2])
    _run("fa2", r, window_left=7, logits_soft_cap=30.0, sm_scale=0.5)
    create, planned, run = strict.calls
    assert (create.op, planned.op, run.op) == ("create", "plan", "attend")
    assert create.owner == planned.owner == run.owner != 0
    assert run.plan == planned.index
    assert planned.name == "BatchPrefillWithPagedKVCacheWrapper.plan"
    assert planned.arguments["qo_indptr"].values.tolist() == [0, 3, 5]
    attended = run.attended
    assert attended is not None
    assert [(s.q_start, s.q_end) for s in attended.spans] == [(0, 3), (3, 5)]
    first = [page * 16 + offset for page in r.pages[0] for offset in range(16)][:20]
    assert attended.spans[0].slots.tolist() == first
    assert (attended.layout, attended.page_size, attended.causal) == ("NHD", 16, True)
    assert (attended.window_left, attended.window_right) == (7, -1)
    assert (attended.soft_cap, attended.scale) == (30.0, 0.5)
    assert not strict.findings


def test_results_keep_their_unrounded_values(strict: recorder.Recorder) -> None:
    r = requests([20, 5], [3, 2])
    out, lse = _run("fa2", r)
    expected, expected_lse = r.expected(causal=True)
    np.testing.assert_allclose(_exact(strict, out), expected.numpy(), rtol=1e-11)
    np.testing.assert_allclose(_exact(strict, lse), expected_lse.numpy() / LN2, rtol=1e-11)


def test_merging_goes_on_from_unrounded_values(strict: recorder.Recorder) -> None:
    r = requests([20, 20], [3, 3])
    r.q[3:] = r.q[:3]
    out, lse = _run("fa2", r, causal=False)
    merged, merged_lse = flashinfer.merge_state(out[:3], lse[:3], out[3:], lse[3:])
    k, v = torch.cat(r.k), torch.cat(r.v)
    whole = flashinfer.single_prefill_with_kv_cache(r.q[:3], k, v, return_lse=True, backend="fa2")
    for got, wanted in ((merged, whole[0]), (merged_lse, whole[1])):
        np.testing.assert_allclose(_exact(strict, got), _exact(strict, wanted), rtol=1e-11)


@pytest.mark.parametrize(
    ("name", "at", "value", "rule", "words"),
    [
        (
            "last_page_len",
            1,
            0,
            "fi.last-page-range",
            "last_page_len[1] is 0, must be 1..16: request 1's length is a multiple",
        ),
        ("last_page_len", 0, 20, "fi.last-page-range", "last_page_len[0] is 20, must be 1..16"),
        ("indptr", 0, 1, "fi.indptr-start", "indptr[0] is 1, must be 0"),
        ("indptr", 2, 9, "fi.indices-short", "indices has 3 entries, indptr[-1] is 9"),
    ],
)
def test_findings_name_array_request_and_cause(
    strict: recorder.Recorder, name: str, at: int, value: int, rule: str, words: str
) -> None:
    r = requests([20, 16])
    spoilt = arrays(r)[name].clone()
    spoilt[at] = value
    wrapper = make(LAB, "cuda_core")
    plan(LAB, wrapper, "cuda_core", r, given={name: spoilt})
    found = next(f for f in strict.findings if f.rule == rule)
    assert words in found.message
    assert (found.kind, found.argument) == ("arrays", words.partition("[")[0].partition(" ")[0])
    assert found.call == strict.calls[-1].index
    assert found.request == (1 if at == 1 or rule == "fi.indices-short" else 0)


def test_a_page_id_that_looks_like_a_token_location_is_explained(strict: recorder.Recorder) -> None:
    r = requests([20, 16])
    locations = arrays(r)["indices"] * 16
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _run("fa2", r, given={"indices": locations})
    assert any("is it a token location?" in f.message for f in strict.findings)


def test_findings_are_recorded_once_per_batch_not_per_layer(strict: recorder.Recorder) -> None:
    r = requests([20, 16])
    wrapper = make(LAB, "cuda_core")
    strict.at = 0
    plan(LAB, wrapper, "cuda_core", r)
    strict.at = 1
    for _ in range(3):
        wrapper.run(r.q, caches(LAB, r))
    assert [f.rule for f in strict.findings] == ["fi.stale-plan"]


def test_faithful_mode_records_calls_and_finds_nothing() -> None:
    r = requests([20, 16])
    with recorder.recording("faithful") as record:
        _run("cuda_core", r, given={"last_page_len": ints([4, 0])})
    assert [c.op for c in record.calls] == ["create", "plan", "attend"]
    assert not record.findings


def test_float32_is_an_extension_of_strict_mode(strict: recorder.Recorder) -> None:
    r = requests([20, 16], [3, 2], dtype=torch.float32)
    out, _ = _run("fa3", r)
    torch.testing.assert_close(out.double(), r.expected(causal=True)[0], rtol=0, atol=1e-6)
    with recorder.recording("faithful"), pytest.raises(KeyError, match="float32"):
        _run("fa3", r)


def test_rows_beyond_the_plan_stay_poisoned_in_strict_mode_only(strict: recorder.Recorder) -> None:
    r = requests([20, 16], [3, 2])
    wrapper = make(LAB, "fa2")
    plan(LAB, wrapper, "fa2", r)
    longer = torch.cat((r.q, r.q))
    assert wrapper.run(longer, caches(LAB, r))[5:].isnan().all()
    with recorder.recording("faithful"):
        assert (wrapper.run(longer, caches(LAB, r))[5:] == 0).all()
    out = torch.full((10, 8, 128), 7.0, dtype=r.q.dtype)
    wrapper.run(longer, caches(LAB, r), out=out)
    assert (out[5:] == 7).all()


def test_a_plan_reads_device_arrays_again_and_host_arrays_once() -> None:
    r = requests([20, 16])
    with cuda.simulated_cuda("light"):
        lab = Lab(flashinfer, "cuda")
        index = {name: t.to("cuda") if name == "indices" else t for name, t in arrays(r).items()}
        wrapper = make(lab, "cuda_core")
        wrapper.plan(
            index["indptr"], index["indices"], index["last_page_len"], 8, 2, 128, 16, q_data_type=r.q.dtype
        )
        before = wrapper.run(r.q.to("cuda"), caches(lab, r)).cpu()
        index["indptr"].zero_()
        index["last_page_len"].zero_()
        assert torch.equal(wrapper.run(r.q.to("cuda"), caches(lab, r)).cpu(), before)
        index["indices"].copy_(index["indices"].flip(0))
        assert not torch.equal(wrapper.run(r.q.to("cuda"), caches(lab, r)).cpu(), before)
        assert wrapper.run(r.q.to("cuda"), caches(lab, r)).is_cuda


def test_graph_wrappers_fill_the_buffers_they_were_given() -> None:
    r = requests([20, 16], [3, 2])
    sizes = {
        "qo_indptr_buf": 3,
        "paged_kv_indptr_buf": 3,
        "paged_kv_indices_buf": 8,
        "paged_kv_last_page_len_buf": 2,
    }
    buffers: dict[str, Any] = {name: torch.zeros(n, dtype=torch.int32) for name, n in sizes.items()}
    wrapper = make(LAB, "fa2", use_cuda_graph=True, **buffers)
    plan(LAB, wrapper, "fa2", r)
    a = arrays(r)
    assert torch.equal(buffers["qo_indptr_buf"], a["qo_indptr"])
    assert torch.equal(buffers["paged_kv_indices_buf"][:3], a["indices"])
    assert wrapper._paged_kv_indptr_buf is buffers["paged_kv_indptr_buf"]
    assert wrapper.is_cuda_graph_enabled
    assert wrapper._fixed_batch_size == 2


def test_a_graph_wrapper_computes_what_its_plan_cut() -> None:
    """Lengths that grow in the buffers without a plan are reached as far as the planned chunks go."""
    r = requests([300], dim=64)
    buffers = indptr, indices, last = [torch.zeros(n, dtype=torch.int32) for n in (2, 32, 1)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(LAB), indptr, indices, last)
    pages = ints(r.pages[0])
    wrapper.plan(ints([0, 1]), pages[:1], ints([5]), 8, 2, 64, 16, q_data_type=r.q.dtype)
    for buffer, now in zip(buffers, (ints([0, 19]), pages, ints([12])), strict=True):
        buffer[: len(now)] = now
    with recorder.recording("faithful") as record:
        wrapper.run(r.q, caches(LAB, r))
    attended = record.calls[-1].attended
    assert attended is not None
    assert len(attended.spans[0].slots) == 128


def test_a_captured_run_follows_the_latest_plan_of_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    kernel = paged_run.paged_kernel
    monkeypatch.setattr(paged_run, "paged_kernel", lambda *args: (launched.append(args), kernel(*args)))
    buffers = [torch.zeros(n, dtype=torch.int32) for n in (3, 64, 2, 4, 64, 3)]
    wrapper = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(LAB), *buffers[:3])  # pyright: ignore[reportArgumentType]
    r = requests([300, 20], dim=64)
    with recorder.recording("strict") as record:
        plan(LAB, wrapper, "cuda_core", requests([1, 1], dim=64))
        out = wrapper.run(r.q, caches(LAB, r))
        plan(LAB, wrapper, "cuda_core", r)
        kernel(*launched[0])  # what a replayed graph does
    assert (out.double() - r.expected()[0]).abs().max() < 0.01
    ran = [c for c in record.calls if c.op == "attend"]
    assert [record.calls[c.plan].op for c in ran if c.plan is not None] == ["plan"]
    assert ran[0].plan == max(c.index for c in record.calls if c.op == "plan")
    assert not record.findings
    other = flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(LAB), *buffers[3:])  # pyright: ignore[reportArgumentType]
    other._int_workspace_buffer = wrapper._int_workspace_buffer
    plan(LAB, other, "cuda_core", requests([1, 1, 1], dim=64))
    kernel(*launched[0])
    assert out.isnan().all(), "another batch size's plan lies in the workspace"


def test_a_ragged_mask_sticks() -> None:
    r = requests([5, 7], [2, 3])
    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(LAB), backend="fa2")
    qo, kv = ints([0, 2, 5]), ints([0, 5, 12])
    mask = torch.zeros(31, dtype=torch.bool)
    mask[::2] = True
    wrapper.plan(qo, kv, 8, 2, 128, custom_mask=mask, q_data_type=r.q.dtype)
    k, v = torch.cat(r.k), torch.cat(r.v)
    masked = wrapper.run(r.q, k, v)
    with recorder.recording("strict") as record:
        wrapper.plan(qo, kv, 8, 2, 128, causal=True, q_data_type=r.q.dtype)
        assert torch.equal(wrapper.run(r.q, k, v), masked)
    assert [f.rule for f in record.findings] == ["fi.sticky-mask"]


def test_ragged_fp8_scales_are_ignored_before_074() -> None:
    r = requests([5, 7], [2, 3], kv_dtype=torch.float8_e4m3fn)
    k, v = torch.cat(r.k), torch.cat(r.v)

    def run() -> torch.Tensor:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace(LAB))
        wrapper.plan(
            ints([0, 2, 5]), ints([0, 5, 12]), 8, 2, 128, q_data_type=r.q.dtype, kv_data_type=k.dtype
        )
        return wrapper.run(r.q, k, v, v_scale=2.0)

    plain = run()
    with releases.select(flashinfer="0.7.4"):
        assert torch.equal(run(), plain * 2)


@pytest.mark.parametrize("release", ["0.6.6", "0.7.4"])
def test_auto_prefill_is_fa3_where_it_can_be(release: str) -> None:
    with releases.select(flashinfer=release):
        for r, mask, kernel in (
            (requests([90], [70]), None, "fa3"),
            (requests([90], [70]), torch.ones(70 * 90, dtype=torch.bool), "fa2"),
            (requests([90], [70], kv_dtype=torch.float8_e4m3fn), None, "fa2"),
            (requests([90], [7]), None, "fa3" if release == "0.6.6" else "fa2"),
        ):
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace(LAB))
            plan(LAB, wrapper, "fa2", r, custom_mask=mask)
            assert wrapper._backend == kernel


def test_fa3_computes_with_the_lengths_of_the_plan() -> None:
    """It never reads last_page_len on the device: seq_lens and the planned page size count."""
    r = requests([20, 16], [3, 2])
    with recorder.recording("faithful") as record:
        _run("fa3", r, given={"seq_lens": ints([18, 9])})
    attended = record.calls[-1].attended
    assert attended is not None
    assert [len(s.slots) for s in attended.spans] == [18, 9]


def test_what_is_not_computed_is_named() -> None:
    r = requests([20])
    wrapper = make(LAB, "cuda_core")
    with pytest.raises(NotImplementedError, match="pos_encoding_mode='ROPE_LLAMA'"):
        plan(LAB, wrapper, "cuda_core", r, pos_encoding_mode="ROPE_LLAMA")
    with pytest.raises(NotImplementedError, match="backend='trtllm-gen'"):
        make(LAB, "cuda_core", backend="trtllm-gen")
    with pytest.raises(NotImplementedError, match="jit_args"):
        make(LAB, "fa2", jit_args=["name"])
    with pytest.raises(KeyError, match="Invalid kv_layout NDH"):
        make(LAB, "cuda_core", "NDH")
    with pytest.raises(AttributeError, match=r"the fake of flashinfer 0\.6\.6 has no rmsnorm"):
        _ = flashinfer.rmsnorm


def test_reads_past_an_array_name_it() -> None:
    r = requests([40])
    wrapper = make(LAB, "cuda_core")
    plan(LAB, wrapper, "cuda_core", r, given={"indices": arrays(r)["indices"][:2]})
    with pytest.raises(
        modes.UndefinedRead, match=r"paged_kv_indices\[2\] is read for request 0, but the array has 2"
    ):
        wrapper.run(r.q, caches(LAB, r))


def test_host_tensors_are_not_for_kernels() -> None:
    r = requests([20])
    with cuda.simulated_cuda("light"):
        lab = Lab(flashinfer, "cuda")
        wrapper = make(lab, "cuda_core")
        plan(lab, wrapper, "cuda_core", r)
        with pytest.raises(RuntimeError, match=r"illegal memory access.*q is on the CPU"):
            wrapper.run(r.q, caches(lab, r))


def test_merge_in_place_leaves_masked_rows_and_other_dtypes_alone(strict: recorder.Recorder) -> None:
    v, s = torch.ones(2, 1, 4, dtype=torch.float16), torch.zeros(2, 1)
    flashinfer.merge_state_in_place(
        v, s, 3 * torch.ones_like(v), torch.zeros(2, 1), torch.tensor([True, False])
    )
    assert v[:, 0, 0].tolist() == [2.0, 1.0]
    assert s[:, 0].tolist() == [1.0, 0.0]
    half = torch.zeros(2, 1, dtype=torch.float16)
    flashinfer.merge_state_in_place(v, half, v.clone(), torch.zeros(2, 1))
    assert half.tolist() == [[0.0], [0.0]]
    assert [f.rule for f in strict.findings] == ["fi.merge-dtype"]


def test_single_requests() -> None:
    r = requests([20], [5])
    k, v = r.k[0], r.v[0]
    out, lse = flashinfer.single_prefill_with_kv_cache_return_lse(r.q, k, v, causal=True)
    expected, expected_lse = r.expected(causal=True)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(lse.double() * LN2, expected_lse, rtol=0, atol=1e-4)
    one, one_lse = flashinfer.single_decode_with_kv_cache(
        r.q[-1], k.transpose(0, 1), v.transpose(0, 1), "HND", return_lse=True
    )
    torch.testing.assert_close(one, out[-1])
    torch.testing.assert_close(one_lse, lse[-1])


def test_releases_are_selected_for_a_block() -> None:
    assert flashinfer.__version__ == "0.6.6"
    with releases.select(flashinfer="0.7.4"):
        assert flashinfer.__version__ == "0.7.4"
        assert releases.at_least("flashinfer", "0.7.2")
        assert not hasattr(make(LAB, "fa2"), "end_forward")
    assert not releases.at_least("flashinfer", "0.7.2")
    with (
        pytest.raises(
            ValueError, match=r"no fake of flashinfer 0\.1; known releases: 0\.6\.6, 0\.7\.2, 0\.7\.4"
        ),
        releases.select(flashinfer="0.1"),
    ):
        pass
