"""fi, fi-paged, fa and hybrids on the fakes: the values that their models print, and dense attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from backends import libraries
from backends.contract import Batch, Capabilities, EngineContext, Refused
from backends.refusal import refuse_undeclared
from backends.registry import resolve
from backends.test_support import Sequences, make_batch, small_engine
from cases.model import Phase
from fakes import cuda
from fakes.cuda.claims import real_gpu
from fakes.recorder import Recorder, recording

pytestmark = pytest.mark.skipif(real_gpu(), reason="the simulated device stands aside for a real GPU")

ENGINE_BACKENDS = ["fi", "fi-paged", "fa", "fa,fi", "fi-paged,fa"]
A_PREFIX_HIT_AND_ONE_LAST_TOKEN = [(3, 5), (5, 6)]


class At(NamedTuple):
    """The record's mark: the fakes tell a stale plan by its batch."""

    batch: int
    layer: int


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    libraries.use("fake", ["flashinfer", "sgl_kernel"])
    with cuda.simulated_cuda():
        yield


@pytest.fixture(autouse=True)
def recorder() -> Iterator[Recorder]:
    """The record of a test; no test here may break a rule of a library."""
    with recording("strict") as recorder:
        yield recorder
    assert not recorder.findings


def on_cuda(rows: list[list[int]], width: int = 32) -> torch.Tensor:
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32).to("cuda")


def two_requests() -> torch.Tensor:
    return on_cuda([list(range(16, 32)), list(range(40, 56))])


def scattered(page_size: int, rows: int, pages_a_row: int) -> torch.Tensor:
    """Locations of every row, its pages drawn at random from a pool of rows * pages_a_row."""
    pages = torch.randperm(rows * pages_a_row, generator=torch.Generator().manual_seed(page_size))
    locations = pages.view(rows, -1, 1) * page_size + torch.arange(page_size)
    return locations.flatten(1).int().to("cuda")


def answer(
    name: str, engine: EngineContext, lengths: list[tuple[int, int]], phase: Phase = "prefill"
) -> tuple[list[torch.Tensor], list[torch.Tensor], Batch]:
    """Outputs and expected output of every layer."""
    sequences = Sequences(engine, lengths)
    sequences.store_cached()
    batch = make_batch(engine, lengths, phase)
    backend = resolve(name).factory(engine)
    backend.prepare_metadata(batch)
    outs = [backend.forward(*sequences.new(), layer, batch).cpu() for layer in range(engine.num_layers)]
    return outs, [sequences.expected()[0]] * engine.num_layers, batch


def close(outs: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(bool(((a - b).abs() < 1e-6).all()) for a, b in zip(outs, expected, strict=True))


def test_flashinfer_metadata_is_the_models(recorder: Recorder) -> None:
    engine = small_engine(two_requests(), num_qo_heads=16, num_kv_heads=8, head_dim=128)
    outs, expected, batch = answer("fi", engine, A_PREFIX_HIT_AND_ONE_LAST_TOKEN)
    metadata = batch.attn_metadata
    assert metadata.cu_seqlens_q_cpu.tolist() == [0, 2, 3]
    assert metadata.cu_seqlens_k_cpu.tolist() == [0, 5, 11]
    assert metadata.indices.tolist() == [16, 17, 18, 19, 20, 40, 41, 42, 43, 44, 45]
    assert metadata.last_page_len_cpu.tolist() == [1, 1]
    assert metadata.seq_lens_cpu.tolist() == [5, 6]
    assert metadata.get_last_indices(2).tolist() == [1, 2]
    assert [call.op for call in recorder.calls if call.op != "create"] == ["plan", "attend", "attend"]
    assert close(outs, expected)


def test_flash_attention_metadata_is_the_models(recorder: Recorder) -> None:
    engine = small_engine(
        two_requests(), page_size=4, num_pages=16, num_qo_heads=16, num_kv_heads=8, head_dim=128
    )
    outs, expected, batch = answer("fa", engine, A_PREFIX_HIT_AND_ONE_LAST_TOKEN)
    metadata = batch.attn_metadata
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 3]
    assert metadata.cu_seqlens_k.tolist() == [0, 5, 11]
    assert metadata.cache_seqlens.tolist() == [5, 6]
    assert metadata.page_table.tolist() == [[4, 5], [10, 11]]
    assert metadata.get_last_indices(2).tolist() == [1, 2]
    assert (metadata.max_seqlen_q, metadata.max_seqlen_k) == (2, 6)
    assert [call.op for call in recorder.calls] == ["attend", "attend"]
    assert close(outs, expected)


def test_paged_flashinfer_counts_pages() -> None:
    lengths = [(0, 37), (0, 16), (0, 5)]
    engine = small_engine(
        on_cuda([list(range(48)), list(range(48, 64)), list(range(64, 80))], 48), page_size=16, num_pages=5
    )
    outs, expected, batch = answer("fi-paged", engine, lengths)
    metadata = batch.attn_metadata
    assert metadata.cu_seqlens_q_cpu.tolist() == [0, 37, 53, 58]
    assert metadata.cu_seqlens_k_cpu.tolist() == [0, 3, 4, 5]
    assert metadata.indices.tolist() == [0, 1, 2, 3, 4]
    assert metadata.last_page_len_cpu.tolist() == [5, 16, 5]
    assert close(outs, expected)


@pytest.mark.parametrize("name", ENGINE_BACKENDS)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_lengths_around_a_page(name: str, page_size: int) -> None:
    p = page_size
    lengths = [(0, 1), (0, p), (p - 1, p), (p, p + 1), (0, 2 * p), (p, 3 * p)]
    engine = small_engine(scattered(p, 6, 4), page_size=p, num_pages=24)
    outs, expected, batch = answer(name, engine, lengths)
    assert close(outs, expected)
    if name == "fi-paged":
        assert batch.attn_metadata.last_page_len_cpu.tolist() == [1, p, p, 1, p, p]
        assert batch.attn_metadata.cu_seqlens_k_cpu.tolist() == [0, 1, 2, 3, 5, 7, 10]


@pytest.mark.parametrize("name", ENGINE_BACKENDS)
@pytest.mark.parametrize(("num_qo_heads", "num_kv_heads"), [(4, 4), (4, 2), (6, 2), (8, 2), (5, 1), (14, 2)])
def test_decode_at_every_group_size(name: str, num_qo_heads: int, num_kv_heads: int) -> None:
    engine = small_engine(
        scattered(4, 3, 5), page_size=4, num_pages=15, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads
    )
    outs, expected, batch = answer(name, engine, [(0, 1), (7, 8), (16, 17)], "decode")
    assert close(outs, expected)
    if name.startswith("fi") and "," not in name:
        assert batch.attn_metadata.cu_seqlens_q_cpu.tolist() == [0, 1, 2, 3]
        (run,) = batch.attn_metadata.runs
        assert run.wrapper.use_tensor_cores == (num_qo_heads // num_kv_heads >= 4)


@pytest.mark.parametrize("name", ENGINE_BACKENDS)
@pytest.mark.parametrize(("window", "soft_cap"), [(4, None), (1, None), (None, 1.0), (5, 30.0)])
def test_window_and_soft_cap(name: str, window: int | None, soft_cap: float | None) -> None:
    engine = small_engine(scattered(4, 3, 5), page_size=4, num_pages=15, window=window, soft_cap=soft_cap)
    batches: dict[Phase, list[tuple[int, int]]] = {
        "prefill": [(0, 9), (8, 12), (3, 4)],
        "decode": [(8, 9), (4, 5), (0, 1)],
    }
    for phase, lengths in batches.items():
        outs, expected, _ = answer(name, engine, lengths, phase)
        assert close(outs, expected)


@pytest.mark.parametrize("name", ["fi", "fi-paged", "fa", "fi-paged,fi"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_lse_in_the_declared_base(name: str, phase: Phase) -> None:
    lengths = [(2, 3), (6, 7)] if phase == "decode" else [(0, 3), (4, 7)]
    engine = small_engine(scattered(4, 2, 5), page_size=4, num_pages=10)
    sequences = Sequences(engine, lengths)
    sequences.store_cached()
    batch = make_batch(engine, lengths, phase)
    spec = resolve(name)
    backend = spec.factory(engine)
    backend.prepare_metadata(batch)
    out, lse = backend.forward_return_lse(*sequences.new(), 0, batch)
    expected, natural = sequences.expected()
    assert close([out.cpu()], [expected])
    assert lse.dtype == torch.float32
    assert lse.shape == natural.shape
    scale = math.log(2) if spec.capabilities.lse == "2" else 1.0
    assert ((lse.cpu().double() * scale - natural).abs() < 1e-5).all()


def test_paged_flashinfer_reads_heads_first_pages() -> None:
    engine = small_engine(scattered(4, 3, 5), page_size=4, num_pages=15, layout="HND")
    outs, expected, _ = answer("fi-paged", engine, [(0, 9), (8, 12), (3, 4)])
    assert close(outs, expected)


@pytest.mark.parametrize("name", ["fi", "fi-paged"])
def test_one_plan_per_batch_for_one_backend_object(name: str, recorder: Recorder) -> None:
    engine = small_engine(scattered(4, 2, 5), page_size=4, num_pages=10, num_layers=3)
    backend = resolve(name).factory(engine)
    batches: list[tuple[Phase, list[tuple[int, int]]]] = [
        ("prefill", [(0, 5), (0, 8)]),
        ("decode", [(5, 6), (8, 9)]),
        ("prefill", [(6, 9), (9, 10)]),
    ]
    for number, (phase, lengths) in enumerate(batches):
        recorder.at = At(number, -1)
        sequences = Sequences(engine, lengths)
        sequences.store_cached()
        batch = make_batch(engine, lengths, phase)
        backend.prepare_metadata(batch)
        (run,) = batch.attn_metadata.runs
        assert not run.initialized, "the plan waits for the first layer"
        for layer in range(3):
            recorder.at = At(number, layer)
            out = backend.forward(*sequences.new(), layer, batch)
            assert close([out.cpu()], [sequences.expected()[0]])
        ops = [(call.op, call.at.layer) for call in recorder.calls if call.at and call.at.batch == number]
        assert ops == [("plan", 0), ("attend", 0), ("attend", 1), ("attend", 2)]


def test_prefill_without_prefix_hit_shares_one_indptr() -> None:
    engine = small_engine(scattered(4, 2, 5), page_size=4, num_pages=10)
    batch = make_batch(engine, [(0, 5), (0, 8)])
    resolve("fi").factory(engine).prepare_metadata(batch)
    assert batch.attn_metadata.cu_seqlens_q_cpu is batch.attn_metadata.cu_seqlens_k_cpu
    resolve("fa").factory(engine).prepare_metadata(batch)
    assert batch.attn_metadata.cu_seqlens_q is batch.attn_metadata.cu_seqlens_k


@pytest.mark.parametrize("name", ENGINE_BACKENDS)
@pytest.mark.parametrize("windows", [(4, None, 4), (None, 2, 3)])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_window_in_some_layers(name: str, windows: tuple[int | None, ...], phase: Phase) -> None:
    lengths = [(8, 9), (4, 5), (0, 1)] if phase == "decode" else [(0, 9), (8, 12), (3, 4)]
    engine = small_engine(scattered(4, 3, 5), page_size=4, num_pages=15, num_layers=3)
    outs, _, _ = answer(name, replace(engine, windows=windows), lengths, phase)
    for out, window in zip(outs, windows, strict=True):
        expected, _ = Sequences(replace(engine, windows=(window,) * 3), lengths).expected()
        assert close([out], [expected])


def test_layers_that_share_a_window_share_a_plan(recorder: Recorder) -> None:
    engine = small_engine(scattered(4, 2, 5), page_size=4, num_pages=10, num_layers=3)
    answer("fi-paged", replace(engine, windows=(4, None, 4)), [(0, 5), (2, 8)])
    ops = [(call.op, call.arguments.get("window_left")) for call in recorder.calls if call.op == "plan"]
    assert ops == [("plan", 3), ("plan", -1)]


def test_windows_that_differ_are_refused_where_they_are_not_declared() -> None:
    engine = replace(small_engine(scattered(4, 2, 5), page_size=4, num_pages=10), windows=(4, None))
    with pytest.raises(Refused, match="the layers' windows differ: 4, None"):
        refuse_undeclared(engine, Capabilities(window=True))
