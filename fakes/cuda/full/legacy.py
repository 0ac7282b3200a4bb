"""What torch's Python side does otherwise for a CUDA build: legacy tensor types, storages by device, autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch

from fakes.cuda.answers import replace
from fakes.cuda.interface import NotSimulated

_TYPES = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "ByteTensor": torch.uint8,
    "CharTensor": torch.int8,
    "ShortTensor": torch.int16,
    "IntTensor": torch.int32,
    "LongTensor": torch.int64,
    "BoolTensor": torch.bool,
}


class _LegacyType(type):
    """`isinstance(t, torch.cuda.FloatTensor)` asks for device and dtype."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def _legacy(name: str, dtype: torch.dtype) -> type:
    def make(cls: Any, *args: Any) -> torch.Tensor:
        if args and isinstance(args[0], (list, tuple)):
            return torch.tensor(args[0], dtype=dtype, device="cuda")
        return torch.empty(*args, dtype=dtype, device="cuda")

    return _LegacyType(name, (), {"dtype": dtype, "__new__": make, "__module__": "torch.cuda"})


def _new_storage(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
    if device is not None and torch.device(device).type == "cuda" and (not args or isinstance(args[0], int)):
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device=device).untyped_storage()
    if device is not None:
        kwargs["device"] = device
    return torch._C.StorageBase.__new__(cls, *args, **kwargs)


def _record_stream(self: torch.Tensor, stream: Any) -> None:
    """Memory is freed when its last reference goes: no stream is still using it."""


def _explained(native: Callable[..., Any]) -> Callable[..., Any]:
    """Autograd counts the devices when it first runs backward in a process, and never again."""

    @functools.wraps(native)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        try:
            return native(*args, **kwargs)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise NotSimulated(
                "autograd does not know the simulated CUDA device: a backward ran in this process before the device "
                "was installed, and torch counts devices once; install it first, or use a process of its own"
            ) from None

    return run_backward


_NOT_SIMULATED = {
    "MemPool": "memory pools of its own",
    "ExternalStream": "streams of other libraries",
    "cudart": "the CUDA runtime",
    "memory_snapshot": "the caching allocator's state",
    "get_sync_debug_mode": "warnings about synchronisations (the harness counts them)",
    "set_sync_debug_mode": "warnings about synchronisations (the harness counts them)",
}


def _refusing(name: str, what: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise NotSimulated(f"the full simulated CUDA device does not simulate torch.cuda.{name}: {what}")

    return refuse


def install(undo: ExitStack) -> None:
    for name, what in _NOT_SIMULATED.items():
        replace(undo, torch.cuda, name, _refusing(name, what))
    for name, dtype in _TYPES.items():
        replace(undo, torch.cuda, name, _legacy(name, dtype))
    replace(undo, torch.UntypedStorage, "__new__", _new_storage)
    replace(
        undo, torch.autograd, "_engine_run_backward", _explained(torch.autograd.graph._engine_run_backward)
    )
    replace(undo, torch.Tensor, "record_stream", _record_stream)  # torch's own takes its own streams only
