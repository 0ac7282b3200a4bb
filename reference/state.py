"""What attention over some set of keys comes to: the output and the log-sum-exp of every row and head."""

from __future__ import annotations

from typing import NamedTuple

import torch


class AttentionState(NamedTuple):
    """Attention of every row and query head over one set of keys.

    A row that sees no key is (0, -inf), the neutral element of `reference.merge`.

    Args:
        out: `[rows, num_qo_heads, head_dim_vo]`.
        lse: `[rows, num_qo_heads]`, the log-sum-exp of the scores, natural logarithm.
        max_score: an upper bound of every |score|: scale times the largest norm of a query times that of a key. It is
            the size that rounding errors of q . k grow with, also where the products cancel. 0.0 without keys.
        max_v: largest |element| of V (after `v_scale`). Both ignore NaN and Inf, so that tolerances stay finite.
    """

    out: torch.Tensor
    lse: torch.Tensor
    max_score: float = 0.0
    max_v: float = 0.0
