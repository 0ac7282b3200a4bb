from __future__ import annotations

import pytest
import torch

from cases.model import Mask
from reference.masks import key_ranges, visible


def pattern(mask: torch.Tensor) -> list[str]:
    return ["".join("#" if sees else "." for sees in row) for row in mask.numpy().tolist()]


@pytest.mark.parametrize(
    ("qo_len", "kv_len", "mask", "wanted"),
    [
        (3, 5, Mask(), ["###..", "####.", "#####"]),
        (3, 3, Mask(), ["#..", "##.", "###"]),
        (4, 2, Mask(), ["..", "..", "#.", "##"]),
        (2, 3, Mask(causal=False), ["###", "###"]),
        (3, 5, Mask(window=1), ["..#..", "...#.", "....#"]),
        (3, 5, Mask(window=2), [".##..", "..##.", "...##"]),
        (3, 5, Mask(window=4), ["###..", "####.", ".####"]),
        (3, 5, Mask(window=9), ["###..", "####.", "#####"]),
        (2, 4, Mask(causal=False, window=2), [".###", "..##"]),
        (3, 1, Mask(causal=False, window=1), ["#", "#", "#"]),
        (1, 4, Mask(), ["####"]),
        (2, 0, Mask(), ["", ""]),
        (0, 3, Mask(), []),
    ],
)
def test_masks_drawn_by_hand(qo_len: int, kv_len: int, mask: Mask, wanted: list[str]) -> None:
    seen = visible(qo_len, kv_len, mask)
    assert seen.dtype == torch.bool
    assert seen.shape == (qo_len, kv_len)
    assert pattern(seen) == wanted
    for lo in range(kv_len + 1):
        for hi in range(lo, kv_len + 1):
            assert torch.equal(visible(qo_len, kv_len, mask, keys=(lo, hi)), seen[:, lo:hi])
    first, end = (x.tolist() for x in key_ranges([0, 2, qo_len], [3, 4, kv_len], mask))
    for row, keys in enumerate(seen.numpy().tolist()):
        assert [i + 7 for i, sees in enumerate(keys) if sees] == list(range(first[row + 2], end[row + 2]))


def test_custom_replaces_causal_and_window() -> None:
    custom = torch.tensor([[False, True, True], [True, False, False]])
    mask = Mask(window=1)
    assert torch.equal(visible(2, 3, mask, custom), custom)
    assert torch.equal(visible(2, 3, mask, custom, keys=(1, 3)), custom[:, 1:])


def test_custom_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"custom is \(3, 2\), must be \(qo_len, kv_len\) = \(2, 3\)"):
        visible(2, 3, Mask(), torch.ones(3, 2, dtype=torch.bool))


def test_custom_that_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="custom must hold"):
        visible(2, 3, Mask(causal=False, custom=7))
