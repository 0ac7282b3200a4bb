"""`Rule`: one measured fact about a kernel library, with a probe for the library and its fake alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fakes import modes

Kind = Literal["right", "wrong", "refused", "undefined", "crashes", "value"]


@dataclass(frozen=True)
class Verdict:
    """What a release does. Build one with `RIGHT`, `WRONG`, `UNDEFINED`, `refused`, `crashes` or `value`.

    `error` names the exception type (or a base of it), `fragment` is part of its message; of a crash, the
    signal; of a value, what the probe must answer.
    """

    kind: Kind
    error: str = ""
    fragment: str = ""

    def accepts(self, seen: Observation) -> bool:
        """Whether an observation is what this verdict says. Undefined: anything but a refusal in Python."""
        if self.kind == "undefined":
            return seen.kind != "refused" or "RuntimeError" in seen.errors
        if self.kind != seen.kind:
            return False
        if self.kind == "refused":
            return self.error in seen.errors and self.fragment in seen.detail
        if self.kind == "crashes":
            return self.fragment in seen.detail
        return self.kind != "value" or self.fragment == seen.detail

    def __str__(self) -> str:
        return " ".join(
            word for word in (self.kind, self.error, self.fragment and f'"{self.fragment}"') if word
        )


RIGHT = Verdict("right")
WRONG = Verdict("wrong")
"""Accepted without a word, and the answer is not what was asked."""
UNDEFINED = Verdict("undefined")
"""Reads memory that is not its own: right or wrong by luck."""


def refused(error: str, fragment: str = "") -> Verdict:
    return Verdict("refused", error, fragment)


def crashes(signal: str) -> Verdict:
    return Verdict("crashes", fragment=signal)


def value(answer: str) -> Verdict:
    """The probe reads something off the result and answers in these words."""
    return Verdict("value", fragment=answer)


@dataclass(frozen=True)
class Observation:
    """What a probe saw. `errors`: the exception's type and its bases by name."""

    kind: Kind
    detail: str = ""
    errors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.errors[0] if self.errors else ''}: {self.detail}"


@dataclass(frozen=True)
class Lab:
    """What a probe is given: the library under test and where its tensors live."""

    library: Any
    """The module, real or fake: `flashinfer`, `sgl_kernel`."""
    device: torch.device | str = "cpu"
    mark: Callable[[int], None] = lambda batch: None
    """Says that batch `batch` begins: the harness's own record cannot see it otherwise."""


@dataclass(frozen=True)
class Rule:
    """A fact. `verdicts` has one entry per release it was measured on.

    `cause` says why the library does it, in one sentence; instances follow from it. `device` is what the
    probe needs:
    "light", "full" (graphs, copies in flight) or "gpu" (timing of a real stream). `finding`: the rule that
    strict mode records, because the answer is wrong, or right by luck only.
    """

    id: str
    library: str
    cause: str
    verdicts: Mapping[str, Verdict]
    evidence: str
    probe: Callable[[Lab], Observation]
    device: Literal["light", "full", "gpu"] = "light"
    finding: str | None = None

    def silent(self, release: str) -> bool:
        """Whether strict mode must record a finding, because the library itself says nothing."""
        return self.verdicts[release].kind in ("wrong", "undefined")


def observe(rule: Rule, lab: Lab) -> Observation:
    """Run a rule's probe; what it raises is an observation too."""
    try:
        return rule.probe(lab)
    except modes.UndefinedRead as error:
        return Observation("undefined", str(error), _names(error))
    except modes.WouldCrash as error:
        return Observation("crashes", str(error), _names(error))
    except Exception as error:  # noqa: BLE001 - whatever the library raises is what we came to see
        return Observation("refused", str(error), _names(error))


def judge(got: torch.Tensor, expected: torch.Tensor, limit: float = 5e-3) -> Observation:
    """Right if the error relative to the norm of `expected` is within `limit`.

    Args:
        got: any float dtype and device.
        expected: float64 of the same shape, on the CPU.
        limit: of the relative error.
    """
    if tuple(got.shape) != tuple(expected.shape):
        return Observation("wrong", f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    plain = got.detach().cpu().to(torch.float64)
    same = plain == expected  # infinities
    gap = torch.where(same, 0.0, plain - expected)
    scale = torch.where(expected.isfinite(), expected, 0.0).norm().clamp_min(1e-6)
    error = float(gap.norm() / scale)
    return Observation("right" if error <= limit else "wrong", f"relative error {error:.2g}")


def _names(error: Exception) -> tuple[str, ...]:
    return tuple(kind.__name__ for kind in type(error).__mro__)
