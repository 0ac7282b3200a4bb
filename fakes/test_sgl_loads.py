"""Which keys FlashAttention 3 loads: a NaN in one key of V spoils the rows of every tile that loads it.

Measured on an H200 with sglang-kernel 0.4.6, float16, pages of 16, one request, causal.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fakes.sgl_kernel import flash_attn

pytestmark = pytest.mark.cpu


class Shape(NamedTuple):
    head_dim: int
    kv_len: int
    rows: int
    heads: tuple[int, int]
    window_left: int


SPOILT: list[tuple[Shape, dict[int, tuple[int, int] | None]]] = [
    # a window: a tile begins at its first row's first key, not at a tile of keys
    (Shape(64, 61, 1, (6, 2), 4), {47: None, 55: None, 56: (0, 0), 60: (0, 0)}),
    (Shape(64, 400, 8, (2, 1), 4), {387: None, 388: (0, 7), 392: (0, 7), 399: (0, 7)}),
    # 192 packed rows are 96 rows of a group of two; whole tiles of 128 keys are loaded from there on
    (
        Shape(64, 700, 300, (2, 1), 4),
        {
            395: None,
            396: (0, 95),
            490: (0, 95),
            495: (0, 191),
            500: (0, 191),
            600: (96, 287),
            699: (192, 299),
        },
    ),
    (
        Shape(128, 700, 300, (1, 1), 4),
        {395: None, 396: (0, 127), 500: (0, 127), 600: (0, 255), 699: (128, 299)},
    ),
    # none: from the first key on
    (Shape(64, 400, 8, (2, 1), -1), {0: (0, 7), 300: (0, 7), 399: (0, 7)}),
    (Shape(64, 700, 300, (2, 1), -1), {100: (0, 299), 500: (0, 299), 527: (96, 299), 699: (192, 299)}),
    (Shape(128, 700, 300, (1, 1), -1), {100: (0, 299), 600: (0, 299), 699: (128, 299)}),
]


def _attend(shape: Shape, key: int, *, of_k: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and LSE `[rows, heads]` with NaN in one key of K or V."""
    generator = torch.Generator().manual_seed(0)
    pages = -(-shape.kv_len // 16)
    qo, kv = shape.heads
    q = torch.randn(shape.rows, qo, shape.head_dim, generator=generator).half()
    k, v = (torch.randn(pages, 16, kv, shape.head_dim, generator=generator).half() for _ in "kv")
    (k if of_k else v)[key // 16, key % 16] = torch.nan
    out, lse, *_ = flash_attn.flash_attn_with_kvcache(
        q,
        k,
        v,
        page_table=torch.arange(pages, dtype=torch.int32)[None],
        cache_seqlens=torch.tensor([shape.kv_len], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, shape.rows], dtype=torch.int32),
        max_seqlen_q=shape.rows,
        causal=True,
        window_size=(shape.window_left, 0) if shape.window_left >= 0 else (-1, -1),
        return_softmax_lse=True,
    )
    assert out is not None
    assert lse is not None
    return out, lse.T


@pytest.mark.parametrize(("shape", "measured"), SPOILT)
def test_a_nan_value_spoils_the_tiles_that_load_it(
    shape: Shape, measured: dict[int, tuple[int, int] | None]
) -> None:
    clean, _ = _attend(shape, 0, of_k=True) if shape.window_left >= 0 else (None, None)  # seen by no row
    for key, rows in measured.items():
        out, lse = _attend(shape, key, of_k=False)
        spoilt = out.isnan().flatten(1).any(1)
        expected = torch.zeros(shape.rows, dtype=torch.bool)
        if rows is not None:
            expected[rows[0] : rows[1] + 1] = True
        assert torch.equal(spoilt, expected), key
        assert lse.isfinite().all()
        if clean is not None:
            assert torch.equal(out[~spoilt], clean[~spoilt])


@pytest.mark.parametrize(("key", "rows"), [(387, ()), (388, (0,)), (392, (0, 1, 2, 3, 4)), (397, (5, 6, 7))])
def test_a_nan_key_counts_for_the_rows_that_see_it(key: int, rows: tuple[int, ...]) -> None:
    out, lse = _attend(Shape(64, 400, 8, (2, 1), 4), key, of_k=True)
    assert tuple(out.isnan().flatten(1).any(1).nonzero().flatten().tolist()) == rows
    assert tuple(lse.isneginf().any(1).nonzero().flatten().tolist()) == rows
