"""The device that claims are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fakes import cuda


@pytest.fixture
def cuda_device() -> Iterator[None]:
    """A real GPU where there is one, else the light simulation: what is claimed of CUDA holds on both."""
    if torch.backends.cuda.is_built() and torch.cuda.device_count() > 0:
        yield
        return
    with cuda.simulated_cuda("light"):
        yield
