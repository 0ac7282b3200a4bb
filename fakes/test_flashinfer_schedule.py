"""How the planners cut a batch, against cuts made by hand."""

from __future__ import annotations

import pytest

from fakes.flashinfer.schedule import Schedule, check_scratch, needs_no_split, plan_decode, plan_prefill

COMMON = {
    "num_kv_heads": 2,
    "head_dim": 128,
    "page_size": 16,
    "graph": False,
    "window_left": -1,
    "fixed_split": -1,
    "disable_split": False,
}


def _prefill(qo: list[int], pages: list[int], **changed: object) -> Schedule:
    given = COMMON | {"num_qo_heads": 8, "total_rows": sum(qo)} | changed
    return plan_prefill(qo, pages, **given)  # pyright: ignore[reportArgumentType]


def test_short_requests_are_not_split() -> None:
    cut = _prefill([1, 5], [8, 3])
    assert cut.chunk_tokens is None
    assert cut.scratch == ()
    assert cut.tile_rows == 16  # 24 packed rows over two requests
    assert cut.tiles == [1, 2]
    assert needs_no_split([8, 3], 16)
    assert not needs_no_split([9], 16)


def test_a_long_request_is_split_over_the_grid() -> None:
    cut = _prefill([1], [8192])
    # 2 blocks on each of 132 multiprocessors, 2 KV heads: 132 chunks at most, so 63 pages in one
    assert cut.chunk_tokens == 63 * 16
    assert cut.chunks == [131]
    assert cut.scratch[0] == ("batch_prefill_tmp_v", 8 * 131 * 16 * 128 * 4)
    with pytest.raises(
        RuntimeError, match="batch_prefill_tmp_v with size 8585216 and alignment 16, but only 1024 bytes"
    ):
        check_scratch(cut, 1024)
    check_scratch(cut, 1 << 24)


def test_splitting_is_a_choice() -> None:
    assert _prefill([1], [8192], disable_split=True).chunk_tokens is None
    assert _prefill([1], [100], fixed_split=10).chunks == [10]


def test_a_window_is_what_is_split() -> None:
    assert _prefill([1], [8192], window_left=100).chunk_tokens is None


def test_decode_splits_by_pages() -> None:
    cut = plan_decode([8192], num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=16, graph=False)
    assert cut.chunk_tokens == 16 * 16  # 528 chunks at most
    assert cut.chunks == [512]
    short = plan_decode([8, 0, 3], num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=16, graph=False)
    assert short.chunk_tokens is None
    graph = plan_decode([8, 0, 3], num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=16, graph=True)
    assert graph.chunk_tokens == 128
    assert graph.chunks == [1, 1, 1]
