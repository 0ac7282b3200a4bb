"""Where a backend's code runs: the plain CPU, or the simulated CUDA device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fakes import cuda


class Machine:
    """A device to run backend code on; None stands for the plain CPU. Harness code runs outside of `running`."""

    def __init__(self, simulation: cuda.Simulation | None) -> None:
        self._simulation = simulation
        self.device = torch.device("cpu" if simulation is None else "cuda")

    @property
    def simulated(self) -> bool:
        return self._simulation is not None

    @property
    def name(self) -> str:
        return "cpu" if self._simulation is None else f"simulated cuda ({self._simulation.kind})"

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a host tensor stand on this machine's device, without a copy."""
        return tensor if self._simulation is None else cuda.adopt(tensor)

    def running(self) -> AbstractContextManager[object]:
        """Backend code runs inside; harness code outside sees plain CPU tensors."""
        return nullcontext() if self._simulation is None else cuda.resumed()

    def place_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, as backend code would see it: "cuda:0", "cpu" or "meta"."""
        return "cuda:0" if self.simulated and cuda.on_device(tensor) else str(tensor.device)
