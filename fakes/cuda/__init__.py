"""A simulated CUDA device on a CPU: engine code that demands CUDA runs unmodified.

`simulated_cuda()` installs one of two devices. The *full* one is a C++ extension that owns torch's CUDA dispatch
key; what it does not simulate is listed in `docs/simulated-cuda.md`. The *light* one is pure Python and sees what
goes through torch's Python interface in one thread. It does not see, and raises a clear error for where it can:

- `torch.set_default_device("cuda")`: refused. `with torch.device("cuda"):` works.
- Other threads: `torch.cuda`'s initialisation, factories on "cuda" and kernels are refused there; a device
  tensor that another thread only computes with looks like a CPU tensor to it.
- Bodies of custom operators and of TorchScript functions: factories on "cuda" are refused there; device
  tensors look like CPU tensors inside, and their results are on the device again.
- Operators that have a CUDA kernel only: refused.
- `torch.save`, `pickle` of device tensors and `torch.load` onto "cuda": refused.
- CUDA graphs, DLPack export, legacy types by name (`t.type("torch.cuda.FloatTensor")`), sparse tensors:
  refused.
- `torch.device(0)` and `torch.Generator("cuda")`: torch's own error. One random generator serves host and
  device.
- Names that were imported from `torch.cuda` before the simulation began: those answer as without a device.
- Nested tensors and `torch.accelerator`, which answer as without a device; torch.func transforms: refused.
- Addresses: memory reached through `data_ptr()` or the storage's own methods is host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from fakes.cuda.interface import (
    DeviceUnavailable,
    NotSimulated,
    Simulation,
    adopt,
    current,
    host,
    install,
    kernel,
    on_device,
    paused,
    remove,
    resumed,
)
from fakes.cuda.streams import Streams

__all__ = [
    "DeviceUnavailable",
    "NotSimulated",
    "Simulation",
    "adopt",
    "current",
    "host",
    "kernel",
    "on_device",
    "paused",
    "resumed",
    "simulated_cuda",
    "streams",
]


def streams() -> Streams | None:
    """The streams of the installed simulation, which say what the host has waited for."""
    return None if current() is None else Streams.latest


@contextmanager
def simulated_cuda(kind: Literal["auto", "light", "full"] = "auto") -> Iterator[Simulation]:
    """Install a simulated CUDA device, one in a process, and remove every trace of it afterwards.

    `kind`: "full", "light", or "auto" for the full one where it can be had here, else the light one.

    Raises:
        DeviceUnavailable: That kind cannot be installed here.
        RuntimeError: One is installed already.
    """
    simulation = _device(kind)
    install(simulation)
    try:
        yield simulation
    finally:
        remove(simulation)


def _device(kind: str) -> Simulation:
    if kind not in ("auto", "light", "full"):
        raise ValueError(f'kind of simulated CUDA device is {kind!r}, must be "auto", "light" or "full"')
    if kind != "light":
        from fakes.cuda.full.device import FullDevice

        try:
            return FullDevice()
        except DeviceUnavailable:
            if kind == "full":
                raise
    from fakes.cuda.light import LightDevice

    return LightDevice()
