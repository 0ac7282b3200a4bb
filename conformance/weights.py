"""Attention weights in words: keys that are missing, foreign, hidden or weighed wrongly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cases.model import Case, Mask
from cases.tensors import StepTensors
from conformance.compare import apart
from reference.masks import visible

_OTHER_HEAD = 0.01
"""By how much the mean KV head of another head differs at least."""
_UNDERFLOW = 1e-6
"""A smaller weight may be rounded to 0."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """`got`, `want`: float64 `[num_rows, num_qo_heads, num_slots]`; `slots`: int64, all that requests own.

    `kv_heads`: float64 `[num_rows, num_qo_heads]`, the mean KV head that each row's values come from. `given`: what
    library calls were given that no case asks for, in words.
    """

    case: Case
    mask: Mask
    tensors: StepTensors
    slots: np.ndarray
    got: np.ndarray
    want: np.ndarray
    kv_heads: np.ndarray
    tolerance: float
    given: tuple[str, ...] = ()


def describe(weights: Weights, request: int | None) -> list[str]:
    """What is wrong with the worst row, among those of `request` if one of them is wrong."""
    error = np.nan_to_num(np.abs(weights.got - weights.want), nan=np.inf, posinf=np.inf).max(
        axis=2, initial=0
    )
    if not (error > weights.tolerance).any():
        return _wrong_heads(weights) or ["every row reads the keys that it must, with the right weights"]
    if request is not None:
        own = np.where((weights.tensors.rows.request == request)[:, None], error, 0.0)
        error = own if (own > weights.tolerance).any() else error
    row, head = (int(i) for i in np.unravel_index(int(error.argmax()), error.shape))
    return _Row(weights, row, head).lines()


def _wrong_heads(weights: Weights) -> list[str]:
    heads = weights.case.heads
    must = np.repeat(np.arange(heads.num_kv_heads), heads.group_size)
    reads = weights.want.sum(axis=2) > 0
    wrong = np.argwhere(reads & (np.abs(weights.kv_heads - must) > _OTHER_HEAD))
    if not len(wrong):
        return []
    row, head = (int(i) for i in wrong[0])
    which = _kv_head(weights.kv_heads[row, head])
    in_heads = ", ".join(map(str, sorted({int(h) for _, h in wrong})))
    where = f"row {row}, head {head} takes the values of {which}, must take those of KV head {must[head]}"
    return [f"every row gives its keys the right weights, but {where} (wrong in heads {in_heads})"]


def _kv_head(mean: float) -> str:
    if abs(mean - round(mean)) < _OTHER_HEAD:
        return f"KV head {mean:.0f}"
    return f"a mixture of KV heads (their mean is {mean:.3g})"


class _Row:
    """One row and head. Arrays are over the slots that requests own."""

    def __init__(self, weights: Weights, row: int, head: int) -> None:
        self.weights, self.row, self.head = weights, row, head
        self.case = weights.case
        self.placed = weights.tensors.placed
        self.got, self.want = weights.got[row, head], weights.want[row, head]
        self.request = int(weights.tensors.rows.request[row])
        self.position = int(weights.tensors.rows.position[row])
        own = self.placed.slots[self.request]
        self.columns = np.searchsorted(weights.slots, own)
        """Column of each of the request's own keys, by position."""
        self.seen = self._visible()
        reads = self.got != 0  # a key that is masked has no weight at all, whatever the rounding
        must = self.want[self.columns] > _UNDERFLOW
        self.missing = np.flatnonzero(self.seen & must & ~reads[self.columns])
        self.hidden = np.flatnonzero(~self.seen & reads[self.columns])
        foreign = reads.copy()
        foreign[self.columns] = False
        self.foreign = np.flatnonzero(foreign)

    def _visible(self) -> np.ndarray:
        step = self.weights.tensors.step
        r = step.requests[self.request]
        custom = self.weights.tensors.custom
        first = sum(step.qo_lens[: self.request])
        mask = visible(
            r.qo_len, r.kv_len, self.weights.mask, None if custom is None else custom[self.request]
        )
        return mask.numpy()[self.row - first]

    def lines(self) -> list[str]:
        where = f"row {self.row} (request {self.request}, position {self.position}), head {self.head}"
        if not np.isfinite(self.got).all():
            return [f"{where}: not finite, though every slot of the pool holds numbers"]
        factor = self._factor()
        found = [*(factor or self._missing()), *self._hidden(), *self._foreign(), *self._sum()]
        return [f"{where}: {line}" for line in found or self._weighed_wrongly()]

    def _missing(self) -> list[str]:
        if not len(self.missing):
            return []
        return [f"does not read {_positions(self.missing)}{self._cause_of_missing()}"]

    def _cause_of_missing(self) -> str:
        missing, seen = self.missing.tolist(), np.flatnonzero(self.seen)
        stored = self.weights.tensors.step.requests[self.request].stored_len
        if len(missing) == len(seen):
            return f", {'all' if len(seen) > 1 else 'the only one'} that it must read"
        if missing == [int(seen[0])]:
            alone = not len(self.hidden) and not len(self.foreign)
            off = ": window off by one" if alone and self.weights.mask.window == len(seen) else ""
            return f", one key too few on the left{off}"
        if self.case.level == "kernel":
            return ""
        if missing == list(range(stored)):
            return ", all of its cached prefix"
        if missing == list(range(stored, self.position + 1)):
            return ", the tokens of this step"
        return ""

    def _hidden(self) -> list[str]:
        if not len(self.hidden):
            return []
        cause = self._cause_of_window()
        if not cause and (self.hidden > self.position).all() and self.weights.mask.causal:
            cause = ": keys after its own"
        weight = self.got[self.columns[self.hidden]].sum()
        return [f"reads {_positions(self.hidden)}, which it must not see, with weight {weight:.3g}{cause}"]

    def _cause_of_window(self) -> str:
        """Why keys before the window are read. From position 0 on they may be as many as there are."""
        seen, hidden = np.flatnonzero(self.seen), self.hidden
        if self.weights.mask.window is None or not len(seen):
            return ""
        left = int(seen[0])
        if hidden.tolist() == [left - 1]:
            return ": one key too many on the left, window off by one" + (
                " or not applied" if left == 1 else ""
            )
        if hidden.tolist() == list(range(left)):
            return ": it reads all from position 0 on, the window is not applied or too wide"
        return ""

    def _foreign(self) -> list[str]:
        lines: list[str] = []
        for column in self.foreign[:4]:
            slot = int(self.weights.slots[column])
            owner, position = self._owner(slot)
            lines.append(
                f"reads a foreign key with weight {self.got[column]:.3g}: request {owner}'s at "
                f"position {position} (page {slot // self.case.page_size}, offset {slot % self.case.page_size})"
            )
        if len(self.foreign) > len(lines):
            lines.append(f"reads {len(self.foreign) - len(lines)} more foreign keys")
        return lines

    def _owner(self, slot: int) -> tuple[int, int]:
        for request, slots in enumerate(self.placed.slots):
            at = np.flatnonzero(slots == slot)
            if len(at):
                return request, int(at[0])
        raise LookupError(f"nobody owns slot {slot}")

    def _sum(self) -> list[str]:
        total, must = float(self.got.sum()), float(self.want.sum())
        if self.case.v_scale != 1 and math.isclose(total * self.case.v_scale, must, rel_tol=1e-3):
            return [f"its weights sum to {apart(total, must, 6)}: v_scale is not applied"]
        if total < must - 8 * self.weights.tolerance:
            return [f"{must - total:.3g} of its weight lies on slots that no request owns, or is lost"]
        if total > must + 8 * self.weights.tolerance:
            return [f"its weights sum to {apart(total, must, 6)}"]
        return []

    def _weighed_wrongly(self) -> list[str]:
        head, must = self.weights.kv_heads[self.row, self.head], self.head // self.case.heads.group_size
        if abs(head - must) > _OTHER_HEAD:
            which = _kv_head(head)
            return [f"has wrong weights, and the values of {which}, must have those of KV head {must}"]
        got, want = self.got[self.columns], self.want[self.columns]
        worst = np.argsort(-np.abs(got - want), kind="stable")[:4]
        each = ", ".join(f"position {i}: {apart(got[i], want[i], 4)}" for i in worst if got[i] != want[i])
        return [f"reads the right keys with wrong weights ({each})"]

    def _factor(self) -> list[str]:
        factor = self._score_factor()
        if factor is None or factor <= 0 or math.isclose(factor, 1.0, rel_tol=0.02):
            return []
        cause = _scale_cause(factor, self.case.scale)
        return [f"every score is {factor:.3g} times what it must be{cause}"]

    def _score_factor(self) -> float | None:
        """The one factor on all scores that explains the weights, if there is one."""
        both = (self.want > 0) & (self.got > 0)
        if both.sum() < 2:
            return None
        want, got = np.log(self.want[both]), np.log(self.got[both])
        want, got = want - want.mean(), got - got.mean()
        spread = float(want @ want)
        if spread < 1e-2:
            return None
        factor = float(want @ got) / spread
        if both.sum() == 2 and not _scale_cause(factor, self.case.scale):
            return None  # two weights always fit some factor
        return factor if np.abs(got - factor * want).max() < 0.1 else None


def _scale_cause(factor: float, scale: float) -> str:
    if math.isclose(factor * scale, 1.0, rel_tol=0.02):
        return ": the softmax scale is not applied"
    return ": the softmax scale is applied twice" if math.isclose(factor, scale, rel_tol=0.02) else ""


def _positions(positions: np.ndarray) -> str:
    if len(positions) == 1:
        return f"its key at position {positions[0]}"
    if len(positions) > 2 and (np.diff(positions) == 1).all():
        return f"its {len(positions)} keys at positions {positions[0]} to {positions[-1]}"
    shown = ", ".join(map(str, positions[:6]))
    return f"its {len(positions)} keys at positions {shown}{', ...' if len(positions) > 6 else ''}"
