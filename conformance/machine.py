"""Where a backend's code runs: the plain CPU, or the simulated CUDA device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from fakes import cuda


class Machine:
    """A device for one run. Library backends get the simulated CUDA device, the others the CPU."""

    def __init__(self, simulation: cuda.Simulation | None) -> None:
        self._simulation = simulation
        self.device = torch.device("cpu" if simulation is None else "cuda")

    @property
    def simulated(self) -> bool:
        return self._simulation is not None

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a host tensor stand on this machine's device, without a copy."""
        return tensor if self._simulation is None else cuda.adopt(tensor)

    def running(self) -> AbstractContextManager[object]:
        """Backend code runs inside; the harness's own code outside sees plain CPU tensors."""
        return nullcontext() if self._simulation is None else cuda.resumed()

    def place_of(self, tensor: torch.Tensor) -> str:
        """"cuda:0" or "cpu", as backend code would see it."""
        return "cuda:0" if self.simulated and cuda.on_device(tensor) else "cpu"


@contextmanager
def machine_for(libraries: frozenset[str], kind: str = "auto") -> Iterator[Machine]:
    """Open the machine that a backend of these libraries needs; the simulation is removed at exit."""
    if not libraries:
        yield Machine(None)
        return
    with cuda.simulated_cuda(kind) as simulation, cuda.paused():
        yield Machine(simulation)
