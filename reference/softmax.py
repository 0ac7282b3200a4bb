"""The scores of one block, and the running softmax that blocks of keys are folded into.

Arrays belong to a `reference.library.Library`, `lib`. A *line* is one row of one query head of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from reference.library import Library

NEG_INF = float("-inf")

PLAIN_SCORE = 256.0
"""Below this, weights are exp(score) as it is: float64 holds them, their sums and their inverses to full precision."""


def block_scores(q: Any, k: Any, soft_cap: float | None, hidden: Any, lib: Library) -> Any:
    """Scores of scaled queries: products, soft cap, mask, in this order.

    q: `[num_kv_heads, lines, dim]`. k: `[num_kv_heads, keys, dim]`. hidden: bool `[rows, keys]`; None: every row sees
    every key.
    """
    scores = cap(products(q, k), soft_cap, lib)
    return scores if hidden is None else hide(scores, hidden, lib)


def products(q: Any, k: Any) -> Any:
    return q @ k.swapaxes(1, 2)


def cap(scores: Any, soft_cap: float | None, lib: Library) -> Any:
    """The soft cap of Gemma 2: c * tanh(score / c)."""
    return scores if soft_cap is None else lib.tanh(scores / soft_cap) * soft_cap


def hide(scores: Any, hidden: Any, lib: Library) -> Any:
    """Write -inf where a row does not see a key, in every head of its group."""
    num_rows, num_keys = hidden.shape
    by_row = scores.reshape(scores.shape[0], num_rows, -1, num_keys)
    lib.fill(by_row, NEG_INF, hidden[:, None])
    return scores


def kept(old_top: Any, top: Any, lib: Library) -> Any:
    """What earlier weights are multiplied by when the largest score moves to `top`."""
    return lib.exp(old_top - top)


def natural_log(x: Any, lib: Library) -> Any:
    return lib.log(x)


@dataclass(slots=True)
class RunningSoftmax:
    """Of every line: the largest score so far, sum(exp(score - largest)), and the sum of V weighted the same.

    `top` starts at the smallest finite number instead of -inf, so that a line without keys needs no special case:
    exp(-inf - top) is 0, and its lse is top + log(0) = -inf. As long as all scores are known to be small it is 0, and
    nothing is looked for or subtracted.

    Args:
        top, total: `[num_kv_heads, lines]`. acc: `[num_kv_heads, lines, head_dim_vo]`.
        rounded_total: the total of the rounded weights; `total` itself where none are rounded.
        round_weights: rounds weights before they meet V; None: not at all.
        plain: every block so far was `small`.
    """

    lib: Library
    top: Any
    total: Any
    acc: Any
    rounded_total: Any
    round_weights: Callable[[Any], Any] | None
    plain: bool

    @classmethod
    def start(
        cls,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        lib: Library,
        round_weights: Callable[[Any], Any] | None = None,
    ) -> RunningSoftmax:
        """A softmax that has seen no key. shape: that of `acc`."""
        top = lib.zeros(shape[:2], dtype)
        top += torch.finfo(dtype).min
        total = lib.zeros(shape[:2], dtype)
        rounded_total = total if round_weights is None else lib.zeros(shape[:2], dtype)
        plain = round_weights is None and dtype == torch.float64
        return cls(lib, top, total, lib.zeros(shape, dtype), rounded_total, round_weights, plain)

    def fold(self, lines: slice, scores: Any, v: Any, *, first: bool, small: bool = False) -> None:
        """Take in a block of keys.

        scores: `[num_kv_heads, lines, keys]`, overwritten. v: `[num_kv_heads, keys, head_dim_vo]`.
        first: these lines have seen no key before. small: no score is beyond `PLAIN_SCORE` or NaN; -inf may be.
        """
        lib = self.lib
        if self.plain and small:
            weights = lib.exp(scores, out=scores)
            total, acc = weights.sum(-1), weights @ v
            if first:
                self.top[:, lines], self.total[:, lines], self.acc[:, lines] = 0.0, total, acc
            else:
                self.total[:, lines] += total
                self.acc[:, lines] += acc
            return
        self.plain = False
        old_top = self.top[:, lines]
        top = lib.maximum(old_top, lib.amax(scores, -1))
        scores -= top[..., None]
        weights = lib.exp(scores, out=scores)
        total = weights.sum(-1)
        rounded = weights if self.round_weights is None else self.round_weights(weights)
        acc = rounded @ v
        rounded_total = total if rounded is weights else rounded.sum(-1)
        if not first:
            keep = kept(old_top, top, lib)
            total = total + keep * self.total[:, lines]
            rounded_total = rounded_total + keep * self.rounded_total[:, lines]
            acc += keep[..., None] * self.acc[:, lines]
        self.top[:, lines] = top
        self.total[:, lines] = total
        self.acc[:, lines] = acc
        if self.rounded_total is not self.total:
            self.rounded_total[:, lines] = rounded_total

    def finish(self) -> tuple[Any, Any]:
        """Out `[num_kv_heads, lines, head_dim_vo]` (0 / 0 without keys), lse `[num_kv_heads, lines]`."""
        return self.acc / self.total[..., None], self.top + natural_log(self.rounded_total, self.lib)
