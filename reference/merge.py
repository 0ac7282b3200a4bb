"""Exact combination of attention over disjoint sets of keys (cascade, split KV, context parallelism).

With lse = log sum exp(score), the union of two key sets has lse = log(exp(lse_a) + exp(lse_b)) and its output is the
mean of both outputs weighted by exp(lse_a) and exp(lse_b). (0, -inf) is neutral.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import reduce
from typing import Literal

import torch

from reference.state import AttentionState

Base = Literal["e", "2"]


def merge(a: AttentionState, b: AttentionState) -> AttentionState:
    """Attention over the union of two disjoint key sets. Two empty states give an empty one, (0, -inf)."""
    lse = combined_lse(a.lse, b.lse)
    out = share(a.lse, lse) * a.out + share(b.lse, lse) * b.out
    return AttentionState(out, lse, max(a.max_score, b.max_score), max(a.max_v, b.max_v))


def combined_lse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """log(exp(a) + exp(b)) without overflow; -inf where both are."""
    return torch.logaddexp(a, b)


def share(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Weight `[rows, heads, 1]` of a key set in a union that contains it; 0 for an empty one, whatever the union."""
    weight = torch.exp(part - whole)
    return torch.where(part == -torch.inf, torch.zeros_like(weight), weight)[..., None]


def merge_all(states: Iterable[AttentionState]) -> AttentionState:
    """Attention over the union of any number of disjoint key sets.

    Raises:
        ValueError: `states` is empty: there is no shape to give the neutral element.
    """
    parts = list(states)
    if not parts:
        raise ValueError("merge_all needs at least one state")
    return reduce(merge, parts)


def to_base(lse: torch.Tensor, base: Base) -> torch.Tensor:
    """A natural-log LSE in the given base: FlashInfer speaks "2", FlashAttention "e"."""
    return lse / math.log(2.0) if base == "2" else lse


def from_base(lse: torch.Tensor, base: Base) -> torch.Tensor:
    """The natural-log LSE of one in the given base."""
    return lse * math.log(2.0) if base == "2" else lse
