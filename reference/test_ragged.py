from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.model import Mask
from reference.attention import paged_attention
from reference.problems import make_problem
from reference.ragged import Ragged, chunks, pieces

PROBLEM = make_problem([2, 1], [3, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": PROBLEM.slots[:-1]}, r"slots is \(6,\), must be \[sum\(kv_lens\)\] = \(7,\)"),
        ({"slots": PROBLEM.slots - 20}, r"slots holds -\d+ .. -\d+, the cache has slots 0 .. 10"),
        ({"slots": PROBLEM.slots + 5}, r"slots holds \d+ .. \d+, the cache has slots 0 .. 10"),
        ({"qo_lens": [2, 2]}, "q has 3 rows, qo_lens sum to 4"),
        ({"qo_lens": [3]}, "qo_lens names 1 requests and kv_lens 2"),
        ({"qo_lens": [4, -1]}, "must not be negative"),
        ({"mask": Mask(causal=False, custom=1)}, "custom must hold one bool"),
        (
            {"custom": [torch.ones(2, 3, dtype=torch.bool)]},
            "custom holds 1 masks, must hold one for each of 2",
        ),
        (
            {"custom": [torch.ones(2, 3, dtype=torch.bool), torch.ones(4, 1, dtype=torch.bool)]},
            r"custom mask of request 1 is torch.bool \(4, 1\), must be torch.bool \(1, 4\)",
        ),
        (
            {"custom": [torch.ones(2, 3), torch.ones(1, 4)]},
            r"custom mask of request 0 is torch.float32 \(2, 3\)",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        paged_attention(*PROBLEM.tensors, **(PROBLEM.options | change))


@pytest.mark.parametrize(
    ("index", "tensor", "message"),
    [
        (0, PROBLEM.q[0], r"q is \(4, 8\), must be \[tokens, heads, dim\]"),
        (0, PROBLEM.q[..., :5], "head_dim_qk is 5 in q and 8 in k_cache"),
        (0, PROBLEM.q[:, :3], "q has 3 heads, must be a multiple of the 2 of k_cache"),
        (2, PROBLEM.v_cache[:, :1], r"is \(11, 2\) in k_cache and \(11, 1\) in v_cache"),
    ],
)
def test_tensors_that_do_not_fit_are_named(index: int, tensor: torch.Tensor, message: str) -> None:
    tensors = list(PROBLEM.tensors)
    tensors[index] = tensor
    with pytest.raises(ValueError, match=message):
        paged_attention(*tensors, **PROBLEM.options)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("max_scores", [1, 14, 1000])
@pytest.mark.parametrize("join", [False, True])
def test_pieces_cover_every_pair_of_row_and_key_once(size: int, max_scores: int, join: bool) -> None:
    qo_lens, kv_lens = [2, 0, 3, 4, 1], [3, 5, 0, 6, 2]
    batch = Ragged(torch.arange(16), qo_lens, kv_lens, Mask(), None)
    counts = torch.zeros(10, 16, dtype=torch.int64)
    seen_before = torch.zeros(10, dtype=torch.bool)
    for chunk in chunks(16, size):
        for piece in pieces(batch, chunk, num_qo_heads=2, max_scores=max_scores, join=join):
            rows, keys = slice(*piece.rows), slice(*piece.keys)
            assert chunk[0] <= piece.keys[0] < piece.keys[1] <= chunk[1]
            num_rows, num_keys = piece.rows[1] - piece.rows[0], piece.keys[1] - piece.keys[0]
            assert num_rows == 1 or 2 * num_rows * num_keys <= max_scores
            counts[rows, keys] += 1
            if piece.first:
                assert not seen_before[rows].any()
            seen_before[rows] = True
    own = torch.zeros(10, 16, dtype=torch.bool)
    own[0:2, 0:3] = own[5:9, 8:14] = own[9:10, 14:16] = True
    assert (counts[own] == 1).all()
    assert join or not counts[~own].any()


def test_small_requests_are_joined_and_large_ones_are_not() -> None:
    batch = Ragged(torch.arange(0), [1] * 6, [8, 9, 4000, 3, 4, 5], Mask(), None)
    joined = pieces(batch, (0, 4029), num_qo_heads=4, max_scores=1 << 20, join=True)
    assert [piece.rows for piece in joined] == [(0, 2), (2, 3), (3, 6)]
