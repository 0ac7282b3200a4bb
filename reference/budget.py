"""How far a result may be from the oracle.

A budget is computed from the case's own data: what the low-precision twin errs, twice, plus what two float32 sums in
different orders differ by. A result that comes in float64 (the fakes keep one) is held to `exact_tolerance` instead.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from reference.state import AttentionState

EXACT_FACTOR = 64.0
"""Measured: independent float64 implementations differ by up to 6 (`test_budget.py`)."""


TRUNCATED = 8
"""Products that a tensor core adds to a float32 sum at a time; the sum is truncated, not rounded."""


FAST_TANH = 2.0**-11
"""Relative error of the hardware's tanh, which kernels cap scores with (PTX `tanh.approx.f32`)."""


class Budget(NamedTuple):
    """Largest error allowed.

    Args:
        max_abs: of each element; a float64 tensor of the result's shape, or one number for all.
        mean_abs: of the mean over all elements.
    """

    max_abs: torch.Tensor | float
    mean_abs: float

    def wider(self, by: float) -> Budget:
        """This budget and `by` for every element."""
        return Budget(self.max_abs + by, self.mean_abs + by)


def widest(a: Budget, b: Budget) -> Budget:
    """What either of two budgets for the same tensor allows."""
    max_abs = torch.maximum(torch.as_tensor(a.max_abs), torch.as_tensor(b.max_abs))
    return Budget(max_abs, max(a.mean_abs, b.mean_abs))


class Excess(NamedTuple):
    """A result against its budget.

    Args:
        where: bool, the result's shape: elements that are not finite where they should be, or beyond their budget.
        error: float64, the same shape: |result - oracle|, NaN or Inf where either is.
        max_error, mean_error: over the elements where both are finite; 0.0 if there are none.
        mean_is_over: the mean error is beyond its budget.
        not_finite: elements among `where` whose result is NaN or Inf, or whose oracle is.
    """

    where: torch.Tensor
    error: torch.Tensor
    max_error: float
    mean_error: float
    mean_is_over: bool
    not_finite: int

    @property
    def failed(self) -> bool:
        return self.mean_is_over or bool(self.where.any())


def error_budget(
    oracle: AttentionState, twin: AttentionState, *, dtype: torch.dtype, max_score: float, max_v: float
) -> Budget:
    """Budget for `out` in `dtype`.

    Per element: 2 x the twin's largest error, one rounding step of `dtype` at the oracle's value, and
    4 eps (1 + max_score) max_v, with eps of float32, which kernels for all three dtypes sum in. For the mean: 1.5 x
    the twin's mean error and the mean of the other two.

    Args:
        oracle: float64. twin: out in `dtype`, the same case.
        max_score, max_v: the oracle's own fields.
    """
    return _budget(oracle.out, twin.out, dtype, _sum_slack(max_score, max_v))


def surely_within(
    result: np.ndarray, oracle: np.ndarray, *, dtype: torch.dtype, max_score: float, max_v: float
) -> bool:
    """Whether `error_budget` allows a result whatever the twin errs: cheap, and true of one that is rounded once.

    A rounding step is more than half of eps |element|, so that what passes here is within it element by element.

    Args:
        result, oracle: float64 arrays of one shape, the result's numbers being those of `dtype`.
        max_score, max_v: the oracle's own fields.
    """
    allowed = np.abs(oracle)
    allowed *= torch.finfo(dtype).eps / 2.0
    allowed += _sum_slack(max_score, max_v)
    with np.errstate(invalid="ignore"):
        error = result - oracle
    return bool((np.abs(error, out=error) <= allowed).all())


def lse_budget(
    oracle: AttentionState, twin: AttentionState, *, dtype: torch.dtype, max_score: float, num_keys: int
) -> Budget:
    """Budget for a float32 natural-log `lse`, as `error_budget`; rows without keys (-inf) are exact.

    Kernels that sum the weights on tensor cores lose a step of float32 with every `TRUNCATED` keys of the row: 1.2e-3
    nats at 126,000 keys on an H200 (FlashInfer's fa2), always to the low side. Equal weights (zero scores) add up
    exactly, so that a row's keys can be counted. Otherwise each weight is off by up to half a step of `dtype`, and not
    as in the twin, whose splits are others (measured: 1.01 of twice what the twin errs).

    Args:
        dtype: of q, which the weights are rounded to.
        num_keys: of the longest request.
    """
    eps = torch.finfo(torch.float32).eps
    uneven = eps * num_keys / TRUNCATED + torch.finfo(dtype).eps / 2.0
    slack = 4.0 * eps * (1.0 + max_score) + (uneven if max_score > 0.0 else 0.0)
    return _budget(oracle.lse, twin.lse, torch.float32, slack)


def fast_tanh_error(soft_cap: float | None, max_score: float) -> float:
    """How far the hardware's tanh moves a capped score: the LSE by as much, an output by twice that times max |v|."""
    return 0.0 if soft_cap is None else FAST_TANH * min(soft_cap, max_score)


def exact_tolerance(max_score: float, max_v: float) -> float:
    """How far two float64 implementations may differ in `out`; with `max_v` 1.0, in `lse`.

    It is far below 1e-9 of V, so that one dropped key shows even when its weight is that small.
    """
    return EXACT_FACTOR * torch.finfo(torch.float64).eps * (1.0 + max_score) * max_v


def exceeds(result: torch.Tensor, oracle: torch.Tensor, budget: Budget) -> Excess:
    """Compare a result (any float dtype) with the oracle's float64 tensor of the same shape.

    Finiteness first: where the oracle, rounded to the result's dtype, is NaN or Inf, the result must be the same;
    elsewhere it must be finite. Only then are errors held against the budget.

    Raises:
        ValueError: the shapes differ.
    """
    if result.shape != oracle.shape:
        raise ValueError(f"the result is {tuple(result.shape)}, must be {tuple(oracle.shape)} as the oracle")
    error = (result.to(torch.float64) - oracle).abs()
    nearest = oracle.to(result.dtype)
    same = (result == nearest) | (result.isnan() & nearest.isnan())
    within = error <= budget.max_abs  # False for NaN, whatever the budget
    where = ~(same | (within & nearest.isfinite()))
    finite = error[error.isfinite()]
    max_error, mean_error = (float(finite.max()), float(finite.mean())) if finite.numel() else (0.0, 0.0)
    not_finite = int((where & ~error.isfinite()).sum())
    return Excess(where, error, max_error, mean_error, not mean_error <= budget.mean_abs, not_finite)


def rounding_step(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of `dtype` at each |element|, float64; the smallest one at 0."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.to(torch.float64).abs().clamp(min=info.smallest_normal, max=info.max))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def _sum_slack(max_score: float, max_v: float) -> float:
    """What two float32 sums in different orders differ by."""
    return 4.0 * torch.finfo(torch.float32).eps * (1.0 + max_score) * max_v


def _budget(oracle: torch.Tensor, twin: torch.Tensor, dtype: torch.dtype, slack: float) -> Budget:
    twin_error = (twin.to(torch.float64) - oracle).abs()
    finite = twin_error.isfinite()
    twin_error = twin_error[finite]
    step = rounding_step(oracle.nan_to_num(0.0, 0.0, 0.0), dtype)
    if not twin_error.numel():
        return Budget(step + slack, slack)
    mean_step = float(step[finite].mean())
    return Budget(2.0 * twin_error.max() + step + slack, 1.5 * float(twin_error.mean()) + mean_step + slack)
