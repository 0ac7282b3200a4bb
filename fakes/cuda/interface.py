"""What every simulated device offers, whatever its mechanism, and which one is installed now.

One simulation at a time, for the whole process: it patches `torch.cuda`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")

Kind = Literal["light", "full"]


class DeviceUnavailable(RuntimeError):  # noqa: N818
    """This simulated device cannot be installed here; the message says why."""


class NotSimulated(NotImplementedError):  # noqa: N818
    """The installed device does not simulate what was asked for; the message names what."""


class Simulation(ABC):
    """An installed device. `kind` says which."""

    kind: ClassVar[Kind]

    @abstractmethod
    def open(self) -> None:
        """Install everything, or nothing where this raises."""

    @abstractmethod
    def close(self) -> None:
        """Restore what `open` found. Never raises for what user code left behind."""

    @abstractmethod
    def host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU alias of a device tensor: same storage, nothing copied."""

    @abstractmethod
    def adopt(self, tensor: torch.Tensor) -> torch.Tensor:
        """The device alias of a CPU tensor: same storage, nothing copied."""

    @abstractmethod
    def on_device(self, tensor: torch.Tensor) -> bool: ...

    @abstractmethod
    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call fn as one device operation; tensors in its result come back on the device."""

    @abstractmethod
    def paused(self) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def resumed(self) -> AbstractContextManager[Any]: ...


_installed: Simulation | None = None
_nothing = nullcontext()


def install(simulation: Simulation) -> None:
    """Open a simulation and make it the current one.

    Raises:
        RuntimeError: One is installed already.
        DeviceUnavailable: It cannot be installed here.
    """
    global _installed  # noqa: PLW0603
    if _installed is not None:
        raise RuntimeError(
            f"a simulated CUDA device ({_installed.kind}) is already installed in this process; "
            "leave it before entering another"
        )
    simulation.open()
    _installed = simulation


def remove(simulation: Simulation) -> None:
    """Close a simulation that `install` opened."""
    global _installed  # noqa: PLW0603
    _installed = None
    simulation.close()


def current() -> Simulation | None:
    """The installed simulation, if any."""
    return _installed


def host(t: torch.Tensor) -> torch.Tensor:
    """The plain CPU alias of a tensor, to compute on.

    Zero copy: what is written there is written on the device. Compute on it inside a `kernel`, under
    `paused()` or outside of the simulation; elsewhere the light device takes the alias for the device
    tensor that it is.
    """
    return t if _installed is None else _installed.host(t)


def adopt(t: torch.Tensor) -> torch.Tensor:
    """The device tensor over a CPU tensor's storage, without copying. Use what is returned in place of `t`.

    All tensors over that storage move with it. Without a simulation, where every tensor counts as on the
    device, `t`.
    """
    return t if _installed is None else _installed.adopt(t)


def on_device(t: torch.Tensor) -> bool:
    """Whether a tensor is on the simulated device. Without a simulation every tensor counts as there."""
    return True if _installed is None else _installed.on_device(t)


def kernel(fn: Callable[P, R]) -> Callable[P, R]:
    """Make a function one device operation, as a library's kernel launch is.

    Inside it the simulation is off: tensors are what `host` says, and torch and numpy run at full speed. Numbers that
    are none raise no warning of numpy's, as they raise none on a GPU.
    The tensors that it returns (one, or tuples, lists and dicts of them) come back on the device, except
    those that live in the storage of an argument, which stay where they are. Without a simulation this is
    `fn`.
    """
    quiet: Callable[P, R] = np.errstate(all="ignore")(fn)

    @functools.wraps(fn)
    def launch(*args: P.args, **kwargs: P.kwargs) -> R:
        simulation = _installed
        if simulation is None:
            return quiet(*args, **kwargs)
        return simulation.run(quiet, args, kwargs)

    return launch


def paused() -> AbstractContextManager[Any]:
    """Switch the simulation off for harness code inside it: device tensors are plain CPU tensors there.

    What is made there is on the CPU; `adopt` hands it over. `torch.cuda` goes on answering as the device
    does.
    """
    return _nothing if _installed is None else _installed.paused()


def resumed() -> AbstractContextManager[Any]:
    """Switch the simulation on again inside `paused`, for code that is to see the device."""
    return _nothing if _installed is None else _installed.resumed()
