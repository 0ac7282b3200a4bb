"""What the oracle reaches on a GPU, beside the rate at which that GPU multiplies float64 matrices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cases.model import Mask
from reference import masks
from reference.attention import paged_attention
from reference.problems import Problem, make_problem
from reference.twin import low_precision

GIB = 1 << 30
MATRIX_SIZE = 8192
"""Rows and columns of the product that sets the rate."""


@dataclass(frozen=True)
class Shape:
    """One problem: float16, causal unless it says otherwise."""

    name: str
    qo_lens: Sequence[int]
    kv_lens: Sequence[int]
    heads: tuple[int, int]
    head_dim: int = 128
    causal: bool = True

    def problem(self) -> Problem:
        return make_problem(
            self.qo_lens,
            self.kv_lens,
            heads=self.heads,
            dims=(self.head_dim, self.head_dim),
            dtype=torch.float16,
            mask=Mask(causal=self.causal),
        )


SHAPES = (
    Shape("decode, 64 requests of 4,000 tokens", [1] * 64, [4000] * 64, (32, 8)),
    Shape("prefill, 8,192 tokens", [8192], [8192], (32, 8)),
    Shape("full attention, 4,096 rows over 32,768 keys", [4096], [32768], (8, 8), causal=False),
    Shape("decode of 131,072 tokens", [1], [131072], (32, 8)),
    Shape("prefill of 131,072 tokens", [131072], [131072], (2, 1)),
)


@dataclass(frozen=True)
class Rate:
    """The oracle on one shape.

    Args:
        seconds: of one call, the least of its repeats; `twin_seconds`: of its low-precision twin.
        flops: useful ones a second: two products of float64 for every pair of row and key that the mask leaves.
        of_matrix_rate: the same as a share of the matrix rate.
        extra_gib: most memory that one call took beside its arguments and result; None: not measured here.
    """

    shape: Shape
    seconds: float
    twin_seconds: float
    flops: float
    of_matrix_rate: float
    extra_gib: float | None

    def __str__(self) -> str:
        memory = "" if self.extra_gib is None else f", {self.extra_gib:.2f} GiB beside its arguments"
        return (
            f"{self.shape.name}, {self.shape.heads[0]}/{self.shape.heads[1]} heads of {self.shape.head_dim}: "
            f"{self.seconds * 1e3:.1f} ms (twin {self.twin_seconds * 1e3:.1f} ms), {self.flops / 1e12:.2f} Tflop/s, "
            f"{self.of_matrix_rate:.0%} of the matrix rate{memory}"
        )


def matrix_rate(device: torch.device, size: int = MATRIX_SIZE, repeats: int = 3) -> float:
    """Float64 operations a second in a product of square matrices."""
    a = torch.randn(size, size, dtype=torch.float64, device=device)
    return 2.0 * size**3 / _seconds(lambda: a @ a, device, repeats)


def measure_on(
    device: torch.device, shapes: Sequence[Shape] = SHAPES, *, rate: float | None = None, repeats: int = 3
) -> Iterator[Rate]:
    """Measure each shape, warm. `rate`: the matrix rate; None: measured first."""
    rate = matrix_rate(device) if rate is None else rate
    for shape in shapes:
        problem = shape.problem()
        q, k, v = (x.to(device) for x in problem.tensors)
        options: dict[str, Any] = {**problem.options, "slots": problem.slots.to(device)}
        seconds = _seconds(lambda: paged_attention(q, k, v, **options), device, repeats)  # noqa: B023
        twin = _seconds(
            lambda: low_precision(q, k, v, dtype=torch.float16, **options),  # noqa: B023
            device,
            repeats,
        )
        extra = _extra_memory(lambda: paged_attention(q, k, v, **options), device)  # noqa: B023
        flops = useful_flops(shape) / seconds
        yield Rate(shape, seconds, twin, flops, flops / rate, extra)


def useful_flops(shape: Shape) -> float:
    """q . k and P @ V of every pair that is visible."""
    first, end = masks.key_ranges(shape.qo_lens, shape.kv_lens, Mask(causal=shape.causal))
    pairs = float((end - first).clip(0).sum())
    return pairs * shape.heads[0] * 4.0 * shape.head_dim


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    call()  # the first one starts the libraries
    return min(_timed(call, device) for _ in range(repeats))


def _timed(call: Callable[[], object], device: torch.device) -> float:
    _settle(device)
    begin = time.perf_counter()
    call()
    _settle(device)
    return time.perf_counter() - begin


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _extra_memory(call: Callable[[], object], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = call()
    _settle(device)
    kept = torch.cuda.memory_allocated(device) - before
    del result
    return (torch.cuda.max_memory_allocated(device) - before - kept) / GIB
