"""A case as tensors: q, k, v of every layer, and the paged pool before and after each step.

A pure function of the case. Everything is built on the CPU in a handful of calls for all layers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch

from cases.bits import from_array, host_bits
from cases.model import Case, Step
from cases.ownership import place_session
from cases.placement import Placed, Plan, place
from cases.values import RowIds, TokenIds, keys_and_values, queries

NAN = float("nan")
LARGE = {"float16": 2.0e4, "bfloat16": 1.0e6, "float32": 1.0e6, "float8_e4m3fn": 240.0, "float8_e5m2": 2.0e4}
"""Finite poison of V by KV dtype. K holds 0 beside it: a key of any size could score so low that it has no weight."""


@dataclass(frozen=True)
class StepTensors:
    """One step. q `[layers, num_rows, num_qo_heads, head_dim_qk]` in the case's dtype; k_all, v_all
    `[layers, num_tokens, num_kv_heads, dim]` in the KV dtype: every key of every request, one request after the other,
    a borrowed prefix repeated."""

    step: Step
    placed: Placed
    tokens: TokenIds
    rows: RowIds
    q: torch.Tensor
    k_all: torch.Tensor
    v_all: torch.Tensor
    custom: tuple[torch.Tensor, ...] | None
    """One bool `[qo_len, kv_len]` per request of a case with a custom mask."""

    @cached_property
    def slots(self) -> np.ndarray:
        """int64 `[num_tokens]`: slot of every token in `k_all`."""
        return np.concatenate(self.placed.slots)

    @property
    def new(self) -> np.ndarray:
        """int64 `[num_new]`: the tokens in `k_all` that an engine computes in this step."""
        return self.tokens.new

    @cached_property
    def stored(self) -> np.ndarray:
        """int64: the tokens in `k_all` that stand in the pool before the step."""
        keep = np.ones(len(self.tokens.uid), dtype=bool)
        keep[self.tokens.new] = False
        return np.flatnonzero(keep)

    @cached_property
    def new_kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """k_all and v_all of the new tokens alone; not to be written to."""
        if len(self.new) == len(self.slots):
            return self.k_all, self.v_all
        return tokens_of(self.k_all, self.new), tokens_of(self.v_all, self.new)

    @cached_property
    def out_loc(self) -> torch.Tensor:
        """int32 `[num_new]`: the slot of each new token."""
        return from_array(self.slots[self.new].astype(np.int32))

    @cached_property
    def words(self) -> dict[str, np.ndarray]:
        """The bits of `k_all` ("k") and `v_all` ("v")."""
        return {"k": host_bits(self.k_all), "v": host_bits(self.v_all)}


@dataclass(frozen=True)
class CaseTensors:
    """All steps of a case and the pool's geometry."""

    case: Case
    plan: Plan
    steps: tuple[StepTensors, ...]

    @cached_property
    def _pools(self) -> dict[tuple[int, str, bool, bool], torch.Tensor]:
        return {}

    def pool(self, step: int, which: str, *, nan: bool, after: bool) -> torch.Tensor:
        """What K ("k") or V ("v") of all layers must hold before or after a step: the tokens that stand there by then,
        poison in every other slot. Made once; not to be written to."""
        key = (step, which, nan, after)
        if key not in self._pools:
            s = self.steps[step]
            if after:
                image = host_bits(self.pool(step, which, nan=nan, after=False)).copy()
                self.put(image, s.slots, s.words[which], s.new)
            elif self.case.session and step:
                image = host_bits(self.pool(step - 1, which, nan=nan, after=True)).copy()
                self.turn(image, step, which, nan=nan)
            else:
                word = _word(self.case.cache_dtype, self.poison(which, nan=nan))
                image = np.full(self.pool_shape(s.words[which].shape[-1]), word)
                self.put(image, s.slots, s.words[which], s.stored)
            self._pools[key] = from_array(image).view(getattr(torch, self.case.cache_dtype))
        return self._pools[key]

    def turn(self, pool: np.ndarray, step: int, which: str, *, nan: bool) -> None:
        """What happens to a session's pool (its bits) before a step: poison where a token has gone, and the tokens that
        requests bring along."""
        s = self.steps[step]
        cleared = s.placed.cleared
        if len(cleared):
            word = _word(self.case.cache_dtype, self.poison(which, nan=nan))
            shape = (self.case.num_layers, len(cleared), self.case.heads.num_kv_heads, pool.shape[-1])
            self.put(pool, cleared, np.broadcast_to(word, shape), np.arange(len(cleared)))
        self.put(pool, s.slots, s.words[which], s.placed.given)

    def poison(self, which: str, *, nan: bool) -> float:
        """What unowned slots hold of K ("k") or V ("v")."""
        return NAN if nan else 0.0 if which == "k" else LARGE[self.case.cache_dtype]

    @cached_property
    def _tables(self) -> dict[int, torch.Tensor]:
        return {}

    def page_table(self, step: int) -> torch.Tensor:
        """int32 `[num_rows, table_width]`: token locations; past each length, valid slots that nobody owns (in a
        session what stood there before). Made once; not to be written to."""
        if step not in self._tables:
            placed = self.steps[step].placed
            if self.case.session and step:
                table = self.page_table(step - 1).numpy().copy()
            else:
                page_size, shape = self.case.page_size, (self.plan.num_rows, self.case.table_width)
                free = (placed.free_pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
                table = free.astype(np.int32)[np.arange(shape[0] * shape[1]) % len(free)].reshape(shape)
            for row, slots in zip(placed.rows, placed.slots, strict=True):
                table[row, : len(slots)] = slots
            self._tables[step] = from_array(table)
        return self._tables[step]

    def pool_shape(self, dim: int) -> tuple[int, ...]:
        """`[layers, num_pages, page_size, num_kv_heads, dim]` (HND: heads before slots)."""
        inner = (self.case.page_size, self.case.heads.num_kv_heads)
        return (
            self.case.num_layers,
            self.plan.num_pages,
            *(inner if self.case.layout == "NHD" else inner[::-1]),
            dim,
        )

    def put(self, pool: np.ndarray, slots: np.ndarray, rows: np.ndarray, which: np.ndarray) -> None:
        """Put those of the tokens' rows `[layers, n, num_kv_heads, dim]` that `which` names at their `slots` (int64
        `[n]`), in every layer of a pool."""
        if not len(which):
            return
        if len(which) < len(slots):
            rows, slots = rows[:, which], slots[which]
        if self.case.layout == "NHD":
            flat = pool.reshape(len(pool), -1, pool.shape[-2] * pool.shape[-1])
            flat[:, slots] = rows.reshape(*rows.shape[:2], flat.shape[2])
        else:
            page, offset = np.divmod(slots, self.case.page_size)
            pool.swapaxes(2, 3)[:, page, offset] = rows


@cache
def _word(dtype: str, value: float) -> np.generic:
    """The bits of a number."""
    return host_bits(torch.full((1,), value, dtype=getattr(torch, dtype)))[0]


def tokens_of(rows: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    """A copy of some tokens, `rows[:, which]`."""
    chosen = host_bits(rows).take(which, axis=1)  # an index would transpose the memory
    return from_array(chosen).view(rows.dtype)


def materialise(case: Case) -> CaseTensors:
    """Build the tensors of a case."""
    plan = place_session(case) if case.session else place(case)
    steps = tuple(_step(case, s, p) for s, p in zip(case.steps, plan.steps, strict=True))
    return CaseTensors(case, plan, steps)


def _step(case: Case, step: Step, placed: Placed) -> StepTensors:
    tokens, rows = TokenIds(step, placed.origins), RowIds(step)
    k, v = keys_and_values(case, tokens)
    q = queries(case, step, tokens, rows, k)
    kv_dtype = getattr(torch, case.cache_dtype)
    return StepTensors(
        step,
        placed,
        tokens,
        rows,
        _tensor(q, getattr(torch, case.dtype)),
        _tensor(k, kv_dtype),
        _tensor(v, kv_dtype),
        None if case.mask.custom is None else custom_masks(case.mask.custom, step),
    )


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    # numpy gives an array without elements odd strides, which kernels look at
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    tensor = from_array(np.ascontiguousarray(array))
    return tensor if dtype is torch.float32 else tensor.half() if dtype is torch.float16 else tensor.to(dtype)


def custom_masks(seed: int, step: Step) -> tuple[torch.Tensor, ...]:
    """A random mask per request, about two thirds visible; every row sees at least one key if there is one."""
    masks: list[torch.Tensor] = []
    for r in step.requests:
        rng = np.random.default_rng((seed, r.uid))
        mask = rng.random((r.qo_len, r.kv_len)) < 0.67
        if r.kv_len:
            mask[np.arange(r.qo_len), rng.integers(0, r.kv_len, r.qo_len)] = True
        masks.append(torch.as_tensor(mask))
    return tuple(masks)
