"""Triton kernels of engines, through Triton's own interpreter.

The interpreter copies every argument's whole storage to the host and back at each launch, which a simulated device
counts as host reads, and which takes 64 ms for a KV cache of 256 MiB. Here it works on the same memory instead, and a
launch is one operation of the device: one node of a graph, and no host read.

Source of the two methods that are replaced: `triton/runtime/interpreter.py`, `GridExecutor`, of Triton 3.9.0.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from fakes import cuda
from fakes.cuda.answers import replace

VARIABLE = "TRITON_INTERPRET"
_REPLACED = ("__call__", "_init_args_hst", "_restore_args_dev")


@contextmanager
def interpreted() -> Iterator[None]:
    """Let Triton kernels run on the simulated device. Enter it before the modules that define them are imported.

    Raises:
        cuda.DeviceUnavailable: Triton is not installed, was imported before without its interpreter, or is of a
            release whose interpreter is built otherwise.
    """
    with ExitStack() as undo:
        if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
            raise cuda.DeviceUnavailable(
                "this engine's Triton kernels need Triton, whose interpreter runs them: install the package triton"
            )
        undo.callback(_set_variable, os.environ.get(VARIABLE))
        _set_variable("1")
        _patch(undo)
        yield


def _set_variable(value: str | None) -> None:
    if value is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = value


def _patch(undo: ExitStack) -> None:
    # Optional, and 0.5 s to import.
    triton = importlib.import_module("triton")
    interpreter = importlib.import_module("triton.runtime.interpreter")

    if not isinstance(triton.language.zeros, interpreter.InterpretedFunction):
        raise cuda.DeviceUnavailable(
            f"Triton was imported before {VARIABLE}=1 was set, so that its kernels are not interpreted: enter the "
            "simulation before anything imports Triton, or set the variable"
        )
    executor = interpreter.GridExecutor
    missing = [name for name in _REPLACED if name not in vars(executor)]
    missing += [name for name in ("_unwrap_tensor", "_rewrap_tensor") if not hasattr(interpreter, name)]
    if missing:
        raise cuda.DeviceUnavailable(
            f"the interpreter of triton {triton.__version__} has no {missing[0]}; that of 3.9.0 has"
        )
    launch = vars(executor)["__call__"]

    @cuda.kernel
    def run(grid: Any, *args: Any, **kwargs: Any) -> None:
        launch(grid, *args, **kwargs)

    def on_host(argument: Any) -> Any:
        """An argument over the same memory, as the interpreter takes it."""
        if isinstance(argument, tuple):
            parts = [on_host(part) for part in argument]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        if isinstance(argument, interpreter.TensorDescriptor):
            described = copy.copy(argument)
            described.base = on_host(argument.base)
            return described
        if not hasattr(argument, "data_ptr"):
            return argument
        tensor = interpreter._unwrap_tensor(argument)
        if not (cuda.on_device(tensor) or tensor.is_pinned()):
            raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor?)")
        return interpreter._rewrap_tensor(cuda.host(tensor), original_tensor=argument)

    def init_args(grid: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        return [on_host(arg) for arg in args], {name: on_host(arg) for name, arg in kwargs.items()}

    replace(undo, executor, "__call__", run)
    replace(undo, executor, "_init_args_hst", init_args)
    replace(undo, executor, "_restore_args_dev", lambda *_: None)
