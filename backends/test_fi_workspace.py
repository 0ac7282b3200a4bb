"""The float workspace of the FlashInfer backends holds what any plan of their engine takes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from backends.fi_workspace import RECOMMENDED_BYTES, float_workspace
from backends.test_support import small_engine
from fakes import cuda
from fakes.cuda.claims import real_gpu
from fakes.flashinfer.schedule import check_scratch, plan_prefill

pytestmark = pytest.mark.skipif(real_gpu(), reason="the simulated device stands aside for a real GPU")


@given(
    group=st.integers(1, 64),
    num_kv_heads=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([64, 128, 256]),
    captured=st.booleans(),
    lens=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 4000)), min_size=1, max_size=8),
)
def test_no_plan_overflows_the_workspace(
    group: int, num_kv_heads: int, head_dim: int, *, captured: bool, lens: list[tuple[int, int]]
) -> None:
    qo_lens = [1 if captured else qo_len for qo_len, _ in lens]
    schedule = plan_prefill(
        qo_lens,
        [pages for _, pages in lens],
        num_qo_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=16,
        total_rows=sum(qo_lens),
        graph=captured,
        window_left=-1,
        fixed_split=-1,
        disable_split=False,
    )
    check_scratch(schedule, _workspace_bytes(group * num_kv_heads, num_kv_heads, head_dim))


def test_a_group_of_nineteen_needs_more_than_is_recommended() -> None:
    # seen on an H200: "size 164364288 and alignment 16, but only 134217728 bytes available"
    assert _workspace_bytes(19, 1, 128) >= 164364288 > RECOMMENDED_BYTES
    assert _workspace_bytes(4, 1, 128) == RECOMMENDED_BYTES


def _workspace_bytes(num_qo_heads: int, num_kv_heads: int, head_dim: int) -> int:
    with cuda.simulated_cuda("light"):
        table = torch.zeros(8, 32, dtype=torch.int32, device="cuda")
        engine = small_engine(
            table, num_pages=2, num_qo_heads=num_qo_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        assert engine.max_batch >= 8
        return float_workspace(engine).numel()
