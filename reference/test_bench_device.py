from __future__ import annotations

import torch

from reference.bench_device import Shape, matrix_rate, measure_on, useful_flops

CPU = torch.device("cpu")


def test_flops_are_those_of_visible_pairs() -> None:
    assert useful_flops(Shape("", [3], [3], (2, 1), 8)) == (1 + 2 + 3) * 2 * 4 * 8
    assert useful_flops(Shape("", [2, 1], [3, 0], (1, 1), 8, causal=False)) == 2 * 3 * 4 * 8
    assert useful_flops(Shape("", [4], [2], (1, 1), 8)) == (1 + 2) * 4 * 8


def test_rates() -> None:
    assert matrix_rate(CPU, size=64, repeats=1) > 0
    (rate,) = measure_on(CPU, [Shape("small", [2], [9], (2, 1), 8)], rate=1e9, repeats=1)
    assert rate.flops == useful_flops(rate.shape) / rate.seconds
    assert rate.of_matrix_rate == rate.flops / 1e9
    assert rate.extra_gib is None
    assert str(rate).startswith("small, 2/1 heads of 8: ")
