"""The light device: a TorchFunctionMode over CPU tensors whose storages are tagged.

Pure Python, any torch build. It sees what torch shows to such a mode: calls of torch's Python interface in
the thread that entered the simulation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext

from fakes.cuda import patches, rules
from fakes.cuda.interface import DeviceUnavailable, Kind, NotSimulated, Simulation
from fakes.cuda.places import (
    ON_DEVICE,
    ON_HOST,
    is_device,
    put,
    put_all,
    put_new,
    sides_of,
)

Tensor = torch.Tensor
HOST_ONLY = (0, ON_HOST)


class LightMode(TorchFunctionMode):
    """Gives each torch call its CUDA meaning. Inside `__torch_function__` torch itself turns the mode off."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = rules.RULES.get(func)
        if rule is None:
            rule = rules.classify(func)
        if rule is rules.untouched:
            return func(*args, **kwargs) if kwargs else func(*args)
        if rule is not rules.follow:
            return rule(func, args, kwargs or {})
        # What `rules.follow` does, at less cost: all operands on one side, no device named.
        sides = sides_of(args)
        if kwargs:
            if "device" in kwargs or "pin_memory" in kwargs:
                return rules.follow(func, args, kwargs)
            sides |= sides_of(kwargs.values())
            if sides in HOST_ONLY:
                return func(*args, **kwargs)
        elif sides in HOST_ONLY:
            return func(*args)
        if sides != ON_DEVICE:
            return rules.follow(func, args, kwargs or {})
        try:
            out = func(*args, **kwargs) if kwargs else func(*args)
        except NotImplementedError as error:
            rules.explain(func, error)
        put_all(out)
        return out


class LightDevice(Simulation):
    """The light device, installed by `open` and removed by `close` through one undo log."""

    kind: ClassVar[Kind] = "light"

    def __init__(self) -> None:
        self._thread = 0
        self._mode = LightMode()
        self._undo = ExitStack()

    def open(self) -> None:
        if torch.backends.cuda.is_built() and torch.cuda.device_count() > 0:
            raise DeviceUnavailable(
                "a CUDA device is not simulated where torch finds a real one; run on it, or hide it with "
                "CUDA_VISIBLE_DEVICES=''"
            )
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, DeviceContext) and mode.device.type == "cuda":
                raise DeviceUnavailable(
                    "the light simulated CUDA device cannot see a default device that was set before; unset "
                    "torch.set_default_device('cuda') first"
                )
        self._thread = threading.get_ident()
        with ExitStack() as undo:
            patches.install(undo, seen=self.sees_this_call)
            _push_mode(self._mode)
            undo.callback(_remove_mode, self._mode)
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def sees_this_call(self) -> bool:
        """Whether torch calls made here, now, go through the mode."""
        return torch._C._is_torch_function_mode_enabled() and self._mode in _get_current_function_mode_stack()

    def host(self, tensor: Tensor) -> Tensor:
        return tensor

    def adopt(self, tensor: Tensor) -> Tensor:
        return put(tensor)

    def on_device(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():  # the mode would look at the storage's access as well
            return is_device(tensor)

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            raise NotSimulated(
                f"{fn.__qualname__} was called in another thread than the one that entered the simulation; "
                "the light simulated CUDA device serves that one only"
            )
        with torch._C.DisableTorchFunction():
            out = fn(*args, **kwargs)
            if out is not None:
                put_new(out, args, kwargs)
        return out

    def paused(self) -> AbstractContextManager[Any]:
        return torch._C.DisableTorchFunction()

    def resumed(self) -> AbstractContextManager[Any]:
        return torch._C._EnableTorchFunction()


def _remove_mode(mode: LightMode) -> None:
    """Take our mode off the stack, with whatever user code left above it."""
    if mode in _get_current_function_mode_stack():
        while _pop_mode() is not mode:
            pass
