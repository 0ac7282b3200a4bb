"""The device that claims are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes import cuda
from fakes.cuda.claims import real_gpu


@pytest.fixture
def cuda_device() -> Iterator[None]:
    """A real GPU where there is one, else the light simulation: what is claimed of CUDA holds on both."""
    if real_gpu():
        yield
        return
    with cuda.simulated_cuda("light"):
        yield
