"""Helpers of the tests that say what holds on CUDA and must hold in the simulation."""

from __future__ import annotations

import torch

Tensor = torch.Tensor


def real_gpu() -> bool:
    return torch.backends.cuda.is_built() and torch.cuda.device_count() > 0


def there(*tensors: Tensor) -> bool:
    return all(t.is_cuda and not t.is_cpu and t.device == torch.device("cuda", 0) for t in tensors)


def here(*tensors: Tensor) -> bool:
    return all(t.is_cpu and not t.is_cuda and t.device == torch.device("cpu") for t in tensors)


def row(n: int = 6) -> Tensor:
    return torch.arange(float(n), device="cuda")
