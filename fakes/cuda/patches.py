"""torch.cuda as the simulated device answers it, installed through one undo log."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.dlpack

from fakes.cuda import moving, rules
from fakes.cuda.devices import CAPABILITY, CUDA, DeviceProperties, ordinal
from fakes.cuda.interface import NotSimulated
from fakes.cuda.places import DEVICE, TAG
from fakes.cuda.streams import CUDAGraph, Event, Stream, Streams, refuse_graph

_ABSENT = object()
_NVTX = ("rangePushA", "rangePop", "rangeStartA", "rangeEnd", "markA")


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set an attribute of a module or class, and write into the log how to restore it."""
    before = vars(owner).get(name, _ABSENT)
    if before is _ABSENT:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, before)
    setattr(owner, name, value)


def install(undo: ExitStack, seen: Callable[[], bool]) -> None:
    """Patch torch.cuda. `seen` says whether a torch call made now would go through the simulation."""
    for name, value in _answers(seen).items():
        replace(undo, torch.cuda, name, value)
    replace(undo, torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_NVTX, lambda *_: 0)))
    replace(undo, torch.version, "cuda", "13.0")
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
    properties = DeviceProperties()
    streams = Streams()

    def lazy_init() -> None:
        # torch's C++ calls this for "cuda" that no mode translated; engine code calls it through the mode.
        if not seen():
            raise NotSimulated(
                "the light simulated CUDA device does not see this use of CUDA: it comes from another "
                "thread, the body of a custom operator, of a TorchScript function or of a kernel, or a pause"
            )

    def of_device(value: Any) -> Callable[..., Any]:
        def answer(device: Any = None) -> Any:
            ordinal(device)
            return value

        return answer

    def seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lazy_init,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": of_device(None),
        "_exchange_device": ordinal,
        "_maybe_exchange_device": ordinal,
        "get_device_capability": of_device(CAPABILITY),
        "get_device_name": of_device(properties.name),
        "get_device_properties": of_device(properties),
        "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer_device: True,
        "synchronize": streams.synchronize,
        "ipc_collect": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": of_device((properties.total_memory, properties.total_memory)),
        "memory_allocated": of_device(0),
        "max_memory_allocated": of_device(0),
        "memory_reserved": of_device(0),
        "max_memory_reserved": of_device(0),
        "reset_peak_memory_stats": of_device(None),
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "Event": Event,
        "Stream": Stream,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.stream,
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
