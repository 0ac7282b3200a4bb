"""Attention in three loops of plain Python, for the tests of the oracle: rows, heads, keys.

It shares nothing with the oracle but the meaning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from cases.model import Mask


def three_loops(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    slots: torch.Tensor,
    qo_lens: Sequence[int],
    kv_lens: Sequence[int],
    mask: Mask,
    scale: float,
    custom: Sequence[torch.Tensor] | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[list[list[list[float]]], list[list[float]]]:
    """The arguments of `paged_attention`, finite; returns out[row][head][dim] and natural-log lse[row][head]."""
    queries, keys, values = (t.to(torch.float64).numpy().tolist() for t in (q, k_cache, v_cache))
    heads_per_kv = q.shape[1] // k_cache.shape[1]
    out: list[list[list[float]]] = []
    lse: list[list[float]] = []
    first_slot = 0
    for request, (qo_len, kv_len) in enumerate(zip(qo_lens, kv_lens, strict=True)):
        own: list[int] = slots[first_slot : first_slot + kv_len].numpy().tolist()
        first_slot += kv_len
        for i in range(qo_len):
            row = len(out)
            out.append([])
            lse.append([])
            for head in range(q.shape[1]):
                scores: list[float] = []
                seen: list[list[float]] = []
                for j, slot in enumerate(own):
                    distance = (kv_len - qo_len + i) - j  # 0: the row's own key; negative: a later one
                    if custom is not None:
                        sees = bool(custom[request][i, j])
                    else:
                        sees = not (mask.causal and distance < 0)
                        sees = sees and not (mask.window is not None and distance >= mask.window)
                    if not sees:
                        continue
                    key = keys[slot][head // heads_per_kv]
                    score = scale * math.fsum(
                        a * (b * k_scale) for a, b in zip(queries[row][head], key, strict=True)
                    )
                    if mask.soft_cap is not None:
                        score = mask.soft_cap * math.tanh(score / mask.soft_cap)
                    scores.append(score)
                    seen.append([x * v_scale for x in values[slot][head // heads_per_kv]])
                if not scores:
                    out[row].append([0.0] * v_cache.shape[2])
                    lse[row].append(-math.inf)
                    continue
                top = max(scores)
                weights = [math.exp(score - top) for score in scores]
                total = math.fsum(weights)
                out[row].append(
                    [
                        math.fsum(w * v[d] for w, v in zip(weights, seen, strict=True)) / total
                        for d in range(len(seen[0]))
                    ]
                )
                lse[row].append(top + math.log(total))
    return out, lse
