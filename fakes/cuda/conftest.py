"""The devices that claims are tested on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fakes import cuda
from fakes.cuda.claims import real_gpu
from fakes.cuda.watched import simulated


@pytest.fixture(params=["light", "full"])
def cuda_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """A real GPU where there is one, else both simulations: what is claimed of CUDA holds on all three."""
    if real_gpu():
        if request.param == "full":
            pytest.skip("asked once, on the real GPU")
        yield
        return
    for _ in simulated(request.param):
        yield


@pytest.fixture
def full_or_gpu() -> Iterator[None]:
    """A real GPU where there is one, else the full simulation: for claims that the light one does not make."""
    if real_gpu():
        yield
        return
    for _ in simulated("full"):
        yield


@pytest.fixture
def full() -> Iterator[cuda.Simulation]:
    """The full simulation, for what it says of itself."""
    if real_gpu():
        pytest.skip("a CUDA device is not simulated beside a real one")
    yield from simulated("full")
