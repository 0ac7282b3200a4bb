"""The torch backend on the plain CPU against a dense computation, and the values that its model prints."""

from __future__ import annotations

import pytest
import torch

from backends.test_support import Sequences, make_batch, small_engine
from backends.torch_sdpa import TorchBackend

A_PREFIX_HIT_AND_A_DECODE = [(0, 6), (4, 7), (8, 9)]


def table() -> torch.Tensor:
    table = torch.zeros(3, 16, dtype=torch.int32)
    table[0, :6] = torch.arange(6)
    table[1, :7] = torch.tensor([40, 41, 42, 43, 20, 21, 22])
    table[2, :9] = torch.arange(50, 59)
    return table


def test_mixed_batch_has_the_metadata_of_the_model() -> None:
    engine = small_engine(table(), num_qo_heads=16, num_kv_heads=8, head_dim=128)
    batch = make_batch(engine, A_PREFIX_HIT_AND_A_DECODE)
    TorchBackend(engine).prepare_metadata(batch)
    metadata = batch.attn_metadata
    assert metadata.cu_seqlens_q.tolist() == [0, 6, 9, 10]
    assert metadata.cache_seqlens.tolist() == [6, 7, 9]
    assert metadata.page_table.tolist() == [
        [0, 1, 2, 3, 4, 5, 0, 0, 0],
        [40, 41, 42, 43, 20, 21, 22, 0, 0],
        [50, 51, 52, 53, 54, 55, 56, 57, 58],
    ]
    assert batch.out_loc.tolist() == [0, 1, 2, 3, 4, 5, 20, 21, 22, 58]
    assert metadata.get_last_indices(3).tolist() == [5, 8, 9]
    assert metadata.max_seqlen_q == 6
    for tensor in (metadata.cu_seqlens_q, metadata.cache_seqlens, metadata.page_table):
        assert tensor.dtype == torch.int32


def test_mixed_batch_equals_dense_attention() -> None:
    engine = small_engine(table(), num_qo_heads=16, num_kv_heads=8, head_dim=128)
    sequences = Sequences(engine, A_PREFIX_HIT_AND_A_DECODE)
    sequences.store_cached()
    batch = make_batch(engine, A_PREFIX_HIT_AND_A_DECODE)
    backend = TorchBackend(engine)
    backend.prepare_metadata(batch)
    expected, _ = sequences.expected()
    for layer in range(engine.num_layers):
        out = backend.forward(*sequences.new(), layer, batch)
        assert out.shape == (10, 16, 128)
        assert (out - expected).abs().max() < 1e-6


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lengths_around_a_page_at_every_dtype(page_size: int, dtype: torch.dtype) -> None:
    lengths = [(0, 1), (0, page_size), (page_size, page_size + 1), (page_size, 3 * page_size)]
    pages = torch.randperm(32, generator=torch.Generator().manual_seed(3)).view(4, 8)
    rows = pages[:, :, None] * page_size + torch.arange(page_size)
    engine = small_engine(rows.flatten(1).int(), page_size=page_size, num_pages=32, dtype=dtype)
    sequences = Sequences(engine, lengths)
    sequences.store_cached()
    batch = make_batch(engine, lengths)
    backend = TorchBackend(engine)
    backend.prepare_metadata(batch)
    out = backend.forward(*sequences.new(), 1, batch)
    expected, _ = sequences.expected()
    assert out.dtype == dtype
    # Computed in float32 and rounded once: half a step of the output's dtype, and float32's own noise.
    allowed = expected.abs() * torch.finfo(dtype).eps / 2 + 1e-6
    assert ((out.double() - expected).abs() <= allowed).all()
