"""`Seen`: what a call did, as it is compared: a verdict, and a sketch of its numbers."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import torch

from conformance.fidelity.draft import LN2, Draft

Kind = Literal["right", "wrong", "refused", "undefined", "crashed", "hung"]

KINDS: tuple[Kind, ...] = ("right", "wrong", "refused", "undefined", "crashed", "hung")

BY_LUCK = ("RuntimeError", "MemoryError")
"""What C++ code raises when it dislikes the numbers that it finds."""

SKETCH = 4
"""Random projections of each output vector that stand for it."""

OUT_LIMIT = 0.02
"""Largest root mean square error of one row and head, relative to the row: kernels in 16 bits err by 0.002, a single
key among 50 that is missing or foreign by 0.1."""

ROUNDING = 0.005
"""How far two results of the same computation are from each other, in the same measure: twice the error of one."""

LSE_LIMIT = 5e-3
"""Largest error of an LSE, in its own base and relative where it is above 1: fa2 errs by 1e-3."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A verdict. `error`: the built-in type that a refusal raised, or of an undefined call the one that Python code may
    raise whatever is read. `base`: of the LSE, "2", "e" or "".

    `stage` and `detail` are words for people. `numbers` float32 `[rows, heads, SKETCH + 2]`: the projections, the root
    mean square of the output and the LSE, or None where no result came; NaN where it is NaN or was not written.
    """

    kind: Kind
    error: str = ""
    stage: str = ""
    detail: str = ""
    base: str = ""
    numbers: np.ndarray | None = None

    def __str__(self) -> str:
        words = [self.kind]
        if self.error:
            words.append(f"{self.error} at {self.stage}")
        if self.base:
            words.append(f"LSE base {self.base}")
        return " ".join(words) + (f": {self.detail}" if self.detail else "")

    def to_json(self) -> dict[str, Any]:
        given: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("kind", "error", "stage", "detail", "base")
            if getattr(self, name)
        }
        if self.numbers is not None:
            packed = zlib.compress(np.ascontiguousarray(self.numbers, dtype="<f4").tobytes())
            given |= {"shape": list(self.numbers.shape), "numbers": base64.b85encode(packed).decode()}
        return given

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Seen:
        """What `to_json` wrote.

        Raises:
            ValueError, KeyError: it did not.
        """
        if given["kind"] not in KINDS:
            raise ValueError(f"kind is {given['kind']!r}, must be one of {', '.join(KINDS)}")
        numbers = None
        if "numbers" in given:
            raw = zlib.decompress(base64.b85decode(cast("str", given["numbers"])))
            numbers = np.frombuffer(raw, dtype="<f4").reshape(given["shape"])
        words = {name: str(given.get(name, "")) for name in ("error", "stage", "detail", "base")}
        return cls(given["kind"], numbers=numbers, **words)


def refused(error: Exception, stage: str) -> Seen:
    """What an exception of the library says. Its type is the first built-in one among its bases."""
    kind = next(base for base in type(error).__mro__ if base.__module__ == "builtins")
    message = " ".join(str(error).split())
    return Seen("refused", kind.__name__, stage, message[:200])


def judge(draft: Draft, out: torch.Tensor, lse: torch.Tensor) -> Seen:
    """Compare a result with what the call meant.

    Args:
        draft: of the call.
        out: `[rows, heads, dim]` on the CPU, any float dtype.
        lse: `[rows, heads]` on the CPU.
    """
    expected, expected_lse = draft.expected
    meant = len(expected)
    rows = len(draft.tensors["q"]) if "q" in draft.tensors else len(expected)
    shape = (rows, *expected.shape[1:])
    if tuple(out.shape) != shape or tuple(lse.shape) != shape[:2]:
        return Seen("wrong", detail=f"shapes {tuple(out.shape)} and {tuple(lse.shape)}, expected {shape}")
    known = min(rows, meant)
    got = out[:known].to(torch.float64).numpy()
    got_lse = lse[:known].to(torch.float64).numpy()
    want, want_lse = expected[:known].numpy(), expected_lse[:known].numpy()
    numbers = sketch(got, got_lse)
    with np.errstate(invalid="ignore"):
        gap = np.sqrt(np.mean((got - want) ** 2, axis=-1))
        size = np.sqrt(np.mean(want**2, axis=(-2, -1)))[:, None]
    error = float(np.max(gap / np.maximum(size, 0.05), initial=0.0)) if np.isfinite(gap).all() else np.inf
    base = _base(got_lse, want_lse)
    right = error <= OUT_LIMIT and base != "?"
    detail = "" if right else f"relative error {error:.2g}" + ("" if base != "?" else ", LSE fits no base")
    return Seen("right" if right else "wrong", detail=detail, base=base.replace("?", ""), numbers=numbers)


def _base(got: np.ndarray, want: np.ndarray) -> str:
    """In which base an LSE is what it should be: "2", "e", "" for both (nothing to tell by), "?" for none."""
    fits = [name for name, factor in (("2", 1 / LN2), ("e", 1.0)) if _close(got, want * factor).all()]
    return "?" if not fits else fits[0] if len(fits) == 1 else ""


def sketch(out: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """`numbers` of a result."""
    projection = _projection(out.shape[-1])
    with np.errstate(invalid="ignore", over="ignore"):
        size = np.sqrt(np.mean(out**2, axis=-1, keepdims=True))
        return np.concatenate((out @ projection, size, lse[..., None]), axis=-1).astype(np.float32)


_projections: dict[int, np.ndarray] = {}


def _projection(dim: int) -> np.ndarray:
    """`[dim, SKETCH]` of +-1 / sqrt(dim): a projection of a vector is about its root mean square."""
    if dim not in _projections:
        signs = np.random.default_rng(dim).integers(0, 2, (dim, SKETCH)) * 2.0 - 1.0
        _projections[dim] = signs / np.sqrt(dim)
    return _projections[dim]


def _close(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Elementwise, of LSEs: equal infinities, or within the limit; NaN is close to NaN."""
    with np.errstate(invalid="ignore"):
        near = np.abs(a - b) <= LSE_LIMIT * np.maximum(1.0, np.abs(b))
    return (a == b) | (near & np.isfinite(b)) | (np.isnan(a) & np.isnan(b))


def differ(a: np.ndarray | None, b: np.ndarray | None, limit: float = OUT_LIMIT) -> str:
    """Where two results differ by more than `limit` of a row, in words; "" where they do not."""
    if a is None or b is None:
        return "" if a is b else "one has numbers, the other none"
    if a.shape != b.shape:
        return f"results of {a.shape[:2]} and {b.shape[:2]} rows and heads"
    x, y = a[..., :SKETCH].astype(np.float64), b[..., :SKETCH].astype(np.float64)
    classes = np.where(np.isnan(x), 2, np.sign(x) * np.isinf(x)) != np.where(
        np.isnan(y), 2, np.sign(y) * np.isinf(y)
    )
    if classes.any():
        row, head = np.argwhere(classes.any(axis=-1))[0]
        return f"row {row}, head {head}: {x[row, head, 0]:.4g} and {y[row, head, 0]:.4g}"
    both = np.isfinite(x) & np.isfinite(y)
    x, y = np.where(both, x, 0.0), np.where(both, y, 0.0)
    # four projections of a row may all be small
    sizes = np.maximum(a[..., SKETCH], b[..., SKETCH]).astype(np.float64)
    size = np.sqrt(np.mean(np.where(both.all(axis=-1), sizes, 0.0) ** 2, axis=-1))[:, None]
    gap = np.sqrt(np.mean((x - y) ** 2, axis=-1)) / np.maximum(size, 0.05)
    if gap.size and gap.max() > limit:
        row, head = np.unravel_index(int(gap.argmax()), gap.shape)
        return f"row {row}, head {head}: outputs differ by {gap[row, head]:.2g} of the row"
    far = ~_close(a[..., -1], b[..., -1])
    if far.any():
        row, head = np.argwhere(far)[0]
        return f"row {row}, head {head}: LSE {a[row, head, -1]:.6g} and {b[row, head, -1]:.6g}"
    return ""
