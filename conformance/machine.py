"""Where a backend's code runs: the plain CPU, the simulated CUDA device, or a real one."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from fakes import cuda


class NoGPU(cuda.DeviceUnavailable):
    """No real CUDA device answers; the message says why."""


class Machine:
    """A device to run backend code on; None stands for the plain CPU. Harness code runs outside of `running`.

    A tensor has two sides: the backend's, which `adopt` makes, and the harness's, which `alias` gives. What is written
    on one shows on the other.
    """

    real = False
    """Whether kernels run on a GPU: results are rounded, errors come late, and tensors must be fetched."""

    def __init__(self, simulation: cuda.Simulation | None) -> None:
        self._simulation = simulation
        self.device = torch.device("cpu" if simulation is None else "cuda")

    @property
    def simulated(self) -> bool:
        return self._simulation is not None

    @property
    def name(self) -> str:
        return "cpu" if self._simulation is None else f"simulated cuda ({self._simulation.kind})"

    @property
    def place(self) -> str:
        """Where results must be: "cuda:0" or "cpu"."""
        return "cpu" if self._simulation is None else "cuda:0"

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """A host tensor as the backend sees it."""
        return tensor if self._simulation is None else cuda.adopt(tensor)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """An adopted tensor as the harness may read and write it."""
        return tensor if self._simulation is None else cuda.host(tensor)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of an adopted tensor on the host; not to be written to."""
        return self.alias(tensor)

    def running(self) -> AbstractContextManager[object]:
        """Backend code runs inside; harness code outside sees plain CPU tensors."""
        return nullcontext() if self._simulation is None else cuda.resumed()

    def settle(self) -> None:
        """Wait until everything that was started is done; raises what went wrong meanwhile."""

    def drain(self) -> None:
        """Wait for the copies that a simulated device has in flight, as an engine does when it stops."""
        streams = cuda.streams() if self._simulation is not None else None
        if streams is not None:
            streams.timeline.wait_for_all()

    def soil(self) -> None:
        """Leave NaN behind wherever a kernel may take its predecessor's remains for zeros."""

    def place_of(self, tensor: torch.Tensor) -> str:
        """Where a tensor is, as backend code would see it: "cuda:0", "cpu" or "meta"."""
        return "cuda:0" if self.simulated and cuda.on_device(tensor) else str(tensor.device)


class Poisoned:
    """Memory that backend code allocates without filling it holds NaN, or the largest integer. Entered for every call
    of every case."""

    def __enter__(self) -> None:
        # 1 is "warn"; `torch.utils.deterministic.fill_uninitialized_memory` is on
        torch.set_deterministic_debug_mode(1)

    def __exit__(self, *_: object) -> None:
        torch.set_deterministic_debug_mode(0)


class GPU(Machine):
    """The first real CUDA device that this process sees.

    Raises:
        NoGPU: there is none.
    """

    real = True
    _SOIL = 4096
    """Rows and columns of a product whose tiles fill the shared memory of every multiprocessor."""

    def __init__(self) -> None:
        require_gpu()
        super().__init__(None)
        self.device = torch.device("cuda")
        self._running = Poisoned()
        self._nan: torch.Tensor | None = None

    @property
    def name(self) -> str:
        return f"{torch.cuda.get_device_name(0)} (CUDA {torch.version.cuda})"

    @property
    def place(self) -> str:
        return "cuda:0"

    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def running(self) -> AbstractContextManager[object]:
        return self._running

    def settle(self) -> None:
        torch.cuda.synchronize()

    def soil(self) -> None:
        if self._nan is None:
            shape = (self._SOIL, self._SOIL)
            self._nan = torch.full(shape, torch.nan, dtype=torch.float16, device=self.device)
        torch.mm(self._nan, self._nan)

    def place_of(self, tensor: torch.Tensor) -> str:
        return str(tensor.device)


def require_gpu() -> None:
    """Make sure that a real CUDA device can be had in this process. Touches CUDA.

    Raises:
        NoGPU: why it cannot.
    """
    if torch.version.cuda is None:
        raise NoGPU(f"no GPU answers: torch {torch.__version__} is built without CUDA")
    if not torch.cuda.is_available():
        raise NoGPU(f"no GPU answers: torch {torch.__version__} finds no CUDA device")
