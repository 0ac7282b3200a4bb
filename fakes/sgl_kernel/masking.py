"""How FlashAttention 3 simplifies causal and window before it runs."""

from __future__ import annotations

from typing import NamedTuple


class Visible(NamedTuple):
    """The mask that runs: `left`, `right` are keys visible beside the row's own, -1 for all."""

    causal: bool
    left: int
    right: int

    @property
    def local(self) -> bool:
        return not self.causal and (self.left >= 0 or self.right >= 0)


def visible(
    causal: bool, window: tuple[int, int], *, seqlen_q: int, seqlen_k: int, head_dim: int, paged: bool
) -> Visible:
    """The mask that runs, by the lengths that the caller *tells*, right or not.

    Told of one row, the operator drops the causal mask, since that row sees every key (not for head dims 65
    to 128 over pages, where another tile suits it better); a left window alone gets `seqlen_q - 1` keys on
    the right.
    """
    left, right = window
    if left >= seqlen_k - 1:
        left = -1
    if right >= seqlen_q - 1:
        right = -1
    if seqlen_q == 1 and left == -1 and right == -1 and not (paged and 64 < head_dim <= 128):
        causal = False
    if causal:
        right = 0
    causal = left < 0 and right == 0
    if left >= 0 > right:
        right = seqlen_q - 1
    return Visible(causal, max(left, -1), max(right, -1))
