"""What the light device patches in torch, installed through one undo log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.utils.dlpack

from fakes.cuda import answers, moving, rules
from fakes.cuda.answers import replace
from fakes.cuda.devices import CUDA
from fakes.cuda.interface import NotSimulated
from fakes.cuda.places import DEVICE, TAG
from fakes.cuda.streams import CUDAGraph, Streams, refuse_graph


def install(undo: ExitStack, seen: Callable[[], bool]) -> None:
    """Patch torch.cuda. `seen` says whether a torch call made now would go through the simulation."""
    answers.install(undo, _answers(seen))
    replace(undo, torch.UntypedStorage, "device", property(_storage_device(seen)))
    replace(undo, torch, "set_default_device", _set_default_device(torch.set_default_device))
    for owner, name, rule in (
        (torch._C.ScriptFunction, "__call__", rules.custom),
        (torch._C.ScriptMethod, "__call__", rules.custom),
        (torch.Tensor, "set_", moving.set_),
        (torch.Tensor, "record_stream", rules.record_stream),
        (torch, "to_dlpack", rules.dlpack),
        (torch.utils.dlpack, "to_dlpack", rules.dlpack),
    ):
        replace(undo, owner, name, _ruled(owner, name, rule, seen))
    serialization = torch.serialization
    replace(undo, serialization, "location_tag", _location_tag(serialization.location_tag))
    replace(
        undo,
        serialization,
        "default_restore_location",
        _restore_location(serialization.default_restore_location),
    )


def _answers(seen: Callable[[], bool]) -> dict[str, Any]:
    def lazy_init() -> None:
        # torch's C++ calls this for "cuda" that no mode translated; engine code calls it through the mode.
        if not seen():
            raise NotSimulated(
                "the light simulated CUDA device does not see this use of CUDA: it comes from another "
                "thread, the body of a custom operator, of a TorchScript function or of a kernel, or a pause"
            )

    return answers.of_torch_cuda(Streams(), torch.default_generator) | {
        "_lazy_init": lazy_init,
        "is_current_stream_capturing": lambda: False,
        "CUDAGraph": CUDAGraph,
        "graph": refuse_graph,
        "graph_pool_handle": refuse_graph,
        "make_graphed_callables": refuse_graph,
    }


def _storage_device(seen: Callable[[], bool]) -> Callable[[torch.UntypedStorage], torch.device]:
    native = torch._C.StorageBase.device.__get__  # type: ignore[attr-defined]

    def device(storage: torch.UntypedStorage) -> torch.device:
        return CUDA if getattr(storage, TAG, None) is DEVICE and seen() else native(storage)

    return device


def _set_default_device(native: Callable[..., None]) -> Callable[..., None]:
    def set_default_device(device: Any) -> None:
        if device is not None and torch.device(device).type == "cuda":
            raise NotSimulated(
                "the light simulated CUDA device cannot see torch.set_default_device('cuda'); use "
                "`with torch.device('cuda'):`"
            )
        native(device)

    return set_default_device


def _ruled(owner: Any, name: str, rule: rules.Rule, seen: Callable[[], bool]) -> Callable[..., Any]:
    """A function that does not ask torch's modes, made to follow a rule."""
    native = getattr(owner, name)

    @functools.wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not seen():
            return native(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return rule(native, args, kwargs)

    return call


def _location_tag(native: Callable[..., Any]) -> Callable[..., Any]:
    def location_tag(storage: Any) -> Any:
        untyped = getattr(storage, "_untyped_storage", storage)
        if getattr(untyped, TAG, None) is DEVICE:
            raise NotSimulated(
                "the light simulated CUDA device cannot save or pickle device tensors; use `.cpu()` first"
            )
        return native(storage)

    return location_tag


def _restore_location(native: Callable[..., Any]) -> Callable[..., Any]:
    def default_restore_location(storage: Any, location: str) -> Any:
        if location.startswith("cuda"):
            raise NotSimulated(
                "the light simulated CUDA device cannot load onto cuda: use map_location='cpu'"
            )
        return native(storage, location)

    return default_restore_location
