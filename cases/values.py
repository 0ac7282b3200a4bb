"""How q, k and v are filled, so that a fault in the metadata shows in the output.

K and V of a token depend on (seed, uid, position, layer) alone, q on those and on the keys it is aimed at: the same
token has the same values whatever its batch, page or chunk. All of it is read out of one table of normal noise at
hashed offsets, which costs a gather and no random numbers per case.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cases import noise
from cases.model import AnyRequest, Case, Mask, Step

_EXTREME_SCORE = 300.0
_LOW_PRODUCT = 16384
"""-q . k of the highest "low" key at most; the lowest has twice that. Decode kernels of FlashInfer 0.6.6 begin with
-50000 as the largest score in base 2: with a scale of 1, -32768 is -47274 there."""
_LOW_STEPS = 64
"""Positions after which "low" keys begin anew."""
_LARGEST = np.float32(65504)
"""Of float16: a small scale would have a query go beyond it."""
_LEAST_NORM = np.float32(1e-30)


class TokenIds:
    """Tokens of one step, all requests one after the other.

    `uid`, `position`: int64 `[num_tokens]`, of the token's owner (a borrowed prefix is its lender's).
    `start`: int64 `[num_requests + 1]`, where each request begins. `new`: int64 `[num_rows]`, the tokens that an
    engine computes in this step. `origins`: those of a session's step (`cases.placement.Placed`).
    """

    def __init__(self, step: Step, origins: Sequence[Sequence[tuple[int, int]]] | None = None) -> None:
        lens = np.array(step.kv_lens, dtype=np.int64)
        self.start: NDArray[np.int64] = np.concatenate(([0], np.cumsum(lens)))
        first: NDArray[np.int64] = np.repeat(self.start[:-1], lens)
        self.position: NDArray[np.int64] = np.arange(int(self.start[-1]), dtype=np.int64) - first
        self.uid: NDArray[np.int64] = np.repeat(
            np.array([r.uid for r in step.requests], dtype=np.int64), lens
        )
        if origins is None:
            origins = [() if r.prefix_of is None else ((r.prefix_of, r.prefix_len),) for r in step.requests]
        for begin, lent in zip(self.start, origins, strict=False):
            for uid, end in reversed(lent):
                self.uid[begin : begin + end] = uid
        stored = np.array([r.stored_len for r in step.requests], dtype=np.int64)
        self.new: NDArray[np.int64] = np.flatnonzero(self.position >= np.repeat(stored, lens))

    def of(self, request: int) -> np.ndarray:
        """int64 `[kv_len]`: the tokens of one request."""
        begin, end = int(self.start[request]), int(self.start[request + 1])
        return np.arange(begin, end, dtype=np.int64)

    def pairs(self) -> list[tuple[int, int]]:
        """(uid, position) of every token."""
        uid: list[int] = self.uid.tolist()
        position: list[int] = self.position.tolist()
        return list(zip(uid, position, strict=True))


def keys_and_values(case: Case, tokens: TokenIds) -> tuple[np.ndarray, np.ndarray]:
    """K float32 `[layers, num_tokens, num_kv_heads, head_dim_qk]` and V `[..., head_dim_vo]` of one step."""
    heads = case.heads
    layers = np.arange(case.num_layers)[:, None]
    token = noise.key(case.seed, tokens.uid, tokens.position)
    shape = (case.num_layers, len(tokens.uid), heads.num_kv_heads)
    if case.values == "low":
        k = _signs(case)[:, None] * (2 - tokens.position % _LOW_STEPS / _LOW_STEPS)[:, None, None]
        k = k.astype(np.float32)
    else:
        k = noise.rows(noise.salted(token, 4 * layers + 1), heads.num_kv_heads * heads.head_dim_qk)
    if case.values == "constant_v":
        v = np.ones((*shape, heads.head_dim_vo), dtype=np.float32)
        v *= (1 + layers[..., None, None]).astype(np.float32)
    elif case.values == "one_hot_v":
        hot: np.ndarray = tokens.position[:, None, None] % heads.head_dim_vo == np.arange(heads.head_dim_vo)
        v = np.broadcast_to(hot, (*shape, heads.head_dim_vo)).astype(np.float32)
    else:
        v = noise.rows(noise.salted(token, 4 * layers + 2), heads.num_kv_heads * heads.head_dim_vo)
    return k.reshape(*shape, heads.head_dim_qk), v.reshape(*shape, heads.head_dim_vo)


def _signs(case: Case) -> np.ndarray:
    """Where all "low" keys of a head point: 1 and -1, `[layers, num_kv_heads, head_dim_qk]`."""
    salt = 4 * np.arange(case.num_layers) + 3
    shape = (case.num_layers, case.heads.num_kv_heads, case.heads.head_dim_qk)
    numbers = noise.rows(noise.salted(noise.key(case.seed), salt), shape[1] * shape[2])
    return np.where(numbers < 0, -1.0, 1.0).reshape(shape)


class RowIds:
    """Query rows of one step. `request`, `position`: int64 `[num_rows]` (a position below 0 sees no key)."""

    def __init__(self, step: Step) -> None:
        qo = np.array(step.qo_lens, dtype=np.int64)
        kv = np.array(step.kv_lens, dtype=np.int64)
        self.request: NDArray[np.int64] = np.repeat(np.arange(len(qo)), qo)
        first = np.concatenate(([0], np.cumsum(qo)))[:-1]
        self.position: NDArray[np.int64] = np.arange(len(self.request)) + np.repeat(kv - qo - first, qo)


def queries(case: Case, step: Step, tokens: TokenIds, rows: RowIds, k: np.ndarray) -> np.ndarray:
    """Q float32 `[layers, num_rows, num_qo_heads, head_dim_qk]` of one step; `k` as `keys_and_values` gives it."""
    q = _queries(case, case.mask, step, tokens, rows, k)
    if case.mask.window_layers is not None:
        others = sorted(set(range(case.num_layers)) - set(case.mask.window_layers))
        q[others] = _queries(case, case.mask.of_layer(others[0]), step, tokens, rows, k)[others]
    return q


def _queries(case: Case, mask: Mask, step: Step, tokens: TokenIds, rows: RowIds, k: np.ndarray) -> np.ndarray:
    """The same, aimed at the borders of one mask in all layers."""
    heads = case.heads
    shape = (case.num_layers, len(rows.request), heads.num_qo_heads, heads.head_dim_qk)
    if case.values == "zero_q" or not len(tokens.uid) or not len(rows.request):
        return np.zeros(shape, dtype=np.float32)
    layers = np.arange(case.num_layers)[:, None, None]
    head = np.arange(heads.num_qo_heads)
    if case.values == "low":
        bits = (_LOW_PRODUCT // heads.head_dim_qk).bit_length() - 1  # a power of two: float32 sums are exact
        aimed = _signs(case)[:, head // heads.group_size] * -(1 << bits)
        return np.broadcast_to(aimed[:, None], shape).astype(np.float32)
    uid = np.array([r.uid for r in step.requests], dtype=np.int64)[rows.request]
    who = noise.salted(noise.key(case.seed, uid, rows.position + (1 << 32))[:, None], 8192 * layers + head)
    if case.values == "random":
        return noise.rows(who, heads.head_dim_qk)
    borders = _borders(mask, case.page_size, step.requests, rows)
    pick = (who % np.uint64(borders.shape[1])).astype(np.int64)
    needle = borders[np.arange(len(rows.request))[:, None], pick]
    needle += tokens.start[rows.request][:, None]
    needle = np.minimum(needle, len(tokens.uid) - 1)
    aimed = k[layers, needle, head // heads.group_size]
    norm = np.vecdot(aimed, aimed) * np.float32(case.k_scale * case.scale)
    if case.values == "extreme":
        sign = np.where((who >> np.uint64(32)) % np.uint64(4) == 0, -1, 1)
        score = (_EXTREME_SCORE * sign).astype(np.float32)
    else:
        visible = np.maximum(rows.position + 1, 2)
        if mask.window is not None:
            visible = np.minimum(visible, mask.window)
        score = np.maximum(np.log(visible), 1.0).astype(np.float32)[:, None]
    aimed = aimed * (score / np.maximum(norm, _LEAST_NORM))[..., None]
    return np.clip(aimed, -_LARGEST, _LARGEST) if case.dtype == "float16" else aimed


def _borders(mask: Mask, page_size: int, requests: tuple[AnyRequest, ...], rows: RowIds) -> np.ndarray:
    """int64 `[num_rows, candidates]`: positions at which a fault would show, for each row's needle.

    First and last key, page edges, prefix end, both sides of the window's edge, the first key that causality hides,
    and two that move with the row. A hidden key is aimed at on purpose: if it is read after all, it outweighs the rest.
    """
    last = np.array([r.kv_len for r in requests], dtype=np.int64)[rows.request] - 1
    stored = np.array([min(r.stored_len, r.kv_len) for r in requests], dtype=np.int64)[rows.request]
    p = rows.position
    page = p // page_size * page_size
    columns = [np.zeros_like(p), p, p, page, page - 1, stored - 1, p + 1, p * 7 // 11, p * 5 // 13]
    if mask.window is not None:
        columns += [p - mask.window + 1, p - mask.window + 1, p - mask.window]
    if not mask.causal:
        columns += [last, last // 2]
    return np.clip(np.stack(columns, axis=1), 0, np.maximum(last, 0)[:, None])
