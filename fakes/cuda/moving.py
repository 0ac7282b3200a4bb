"""Functions that choose where their result lives: moves, factories, pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch

from fakes.cuda.devices import ordinal
from fakes.cuda.interface import NotSimulated
from fakes.cuda.places import DEVICE, PINNED, TAG, is_device, place_of, put, same_storage, tensors_in
from fakes.cuda.streams import Streams

Tensor = torch.Tensor
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

CPU = torch.device("cpu")
_NAMES = ("cpu", "cuda:0")


@lru_cache(maxsize=64)
def _native(device: Any) -> tuple[Any, bool]:
    """A device in any of torch's forms, as the one to ask torch for, and whether it is the simulated one."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type != "cuda":
        return device, False
    ordinal(device)
    return CPU, True


def _crosses(host_side: Tensor | None, to_device: bool, non_blocking: bool = False) -> None:
    """Something is copied between host and device. `host_side`: what is known to be there, a source or destination.

    A copy that the host does not wait for is not followed any further here.
    """
    pinned = host_side is not None and place_of(host_side) is PINNED
    if not (non_blocking and pinned):
        Streams.latest.staged_copy("h2d" if to_device else "d2h", non_blocking, pinned)


def _land(out: Any, on_device: bool, operands: Iterable[Tensor]) -> Any:
    """Put a result where it belongs, as a copy if it shares the storage of an operand on the other side."""
    if not isinstance(out, Tensor) or is_device(out) == on_device:
        return out
    if out.is_meta:
        return out
    if is_device(out) or same_storage(out, operands):
        out = out.clone()
    return put(out) if on_device else out


def placed(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A function with `device=` or `pin_memory=`. Without a device the result goes where the operands are."""
    operands = tensors_in(args)
    kwargs = dict(kwargs)
    pinned = kwargs.pop("pin_memory", None)
    if kwargs.get("device") is not None:
        kwargs["device"], on_device = _native(kwargs["device"])
    else:
        on_device = any(map(is_device, operands))
    if pinned and on_device:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    out = _land(func(*args, **kwargs), on_device, operands)
    return put(out, PINNED) if pinned else out


def factory(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """A function whose tensor operands give numbers only, wherever they are: `torch.arange(n)`."""
    kwargs = dict(kwargs)
    pinned = kwargs.pop("pin_memory", None)
    device, on_device = kwargs.get("device"), False
    if device is not None:
        kwargs["device"], on_device = _native(device)
    if pinned and on_device:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    into = kwargs.get("out")
    if into is not None:
        if device is not None and on_device != is_device(into):
            raise RuntimeError(
                f"device {device} does not match device type of out parameter ({_NAMES[is_device(into)]})"
            )
        return func(*args, **kwargs)
    out = func(*args, **kwargs)
    if on_device:
        return put(out)
    return put(out, PINNED) if pinned else out


def from_data(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """`torch.tensor`, `as_tensor`, `asarray`: tensors stay on their device, all else starts on the CPU."""
    data = args[0] if args else kwargs.get("data", kwargs.get("obj"))
    kwargs = dict(kwargs)
    pinned = kwargs.pop("pin_memory", None)
    source = isinstance(data, Tensor) and is_device(data)
    on_device = source
    if kwargs.get("device") is not None:
        kwargs["device"], on_device = _native(kwargs["device"])
    if pinned and on_device:
        raise RuntimeError("Only dense CPU tensors can be pinned")
    out = func(*args, **kwargs)
    if out.is_meta:
        return out
    if on_device != source:
        _crosses(None, on_device)
    if on_device != source and func.__name__ != "tensor":  # may share the memory of a tensor or an array
        out = out.clone()
    if pinned:
        return put(out, PINNED)
    return put(out) if on_device else out


def to(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    """`to(device)`, `to(dtype)`, `to(other)` with all their keywords, and `type_as(other)`."""
    tensor = args[0]
    on_device = is_device(tensor)
    where = args[1] if len(args) > 1 else kwargs.get("device", kwargs.get("other"))
    if where is None or type(where) is torch.dtype:
        out = func(*args, **kwargs)
        return put(out) if on_device else out
    if isinstance(where, Tensor):
        on_device = is_device(where)
    else:
        native, on_device = _native(where)
        if len(args) > 1:
            args = (tensor, native, *args[2:])
        else:
            kwargs = kwargs | {"device": native}
    if on_device != is_device(tensor):
        non_blocking = kwargs.get("non_blocking") or any(arg is True for arg in args[2:4])
        if on_device or not non_blocking:  # the host's copy of a non-blocking one is made in pinned memory
            _crosses(tensor if on_device else None, on_device, bool(non_blocking))
    return _land(func(*args, **kwargs), on_device, (tensor,))


def cuda(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    tensor = args[0]
    ordinal(args[1] if len(args) > 1 else kwargs.get("device"))
    return _move(tensor, True, kwargs, bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")))


def cpu(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    return _move(args[0], False, kwargs)


def _move(tensor: Tensor, on_device: bool, kwargs: Kwargs, non_blocking: bool = False) -> Tensor:
    if is_device(tensor) == on_device:
        return tensor
    _crosses(tensor if on_device else None, on_device, non_blocking)
    out = tensor.clone(memory_format=kwargs.get("memory_format", torch.preserve_format))
    return put(out) if on_device else out


def copy_(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    """`copy_(source)`: between any two devices."""
    target: Tensor = args[0]
    to_device, source = is_device(target), args[1] if len(args) > 1 else kwargs.get("src")
    if isinstance(source, Tensor) and is_device(source) != to_device:
        non_blocking = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
        _crosses(source if to_device else target, to_device, non_blocking)
    return func(*args, **kwargs)


def type_(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """`type()` names the type; `type(dtype)` converts."""
    on_device = is_device(args[0])
    wanted = args[1] if len(args) > 1 else kwargs.get("dtype")
    if wanted is None:
        name = func(*args, **kwargs)
        return name.replace("torch.", "torch.cuda.", 1) if on_device else name
    if isinstance(wanted, torch.dtype):
        out = func(*args, **kwargs)
        return put(out) if on_device else out
    raise NotSimulated(
        f"the light simulated CUDA device does not know the legacy tensor type {wanted}; use a dtype and "
        "`.to(device)`"
    )


def pin_memory(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    tensor = args[0]
    if is_device(tensor):
        name = tensor.type().replace("torch.", "torch.cuda.", 1)
        raise RuntimeError(f"cannot pin '{name}' only dense CPU tensors can be pinned")
    return tensor if place_of(tensor) is PINNED else put(tensor.clone(), PINNED)


def is_pinned(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> bool:
    return place_of(args[0]) is PINNED


def set_(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Tensor:
    """`set_(source)`: a storage or tensor of the same device."""
    tensor = args[0]
    source = args[1] if len(args) > 1 else kwargs.get("source")
    if source is not None:
        if isinstance(source, torch.TypedStorage):
            source = source._untyped_storage
        there = is_device(source) if isinstance(source, Tensor) else getattr(source, TAG, None) is DEVICE
        if there != is_device(tensor):
            raise RuntimeError(
                f'Attempted to set the storage of a tensor on device "{_NAMES[not there]}" to a storage on '
                f'different device "{_NAMES[there]}".  This is no longer allowed; the devices must match.'
            )
    return func(*args, **kwargs)
