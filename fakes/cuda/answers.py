"""torch.cuda's functions, as both simulated devices answer them, and the undo log that they are installed through."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import torch

from fakes.cuda.devices import CAPABILITY, DeviceProperties, ordinal
from fakes.cuda.streams import Event, Stream, Streams

CUDA_VERSION = "13.0"
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


def install(undo: ExitStack, answers: dict[str, Any]) -> None:
    """Patch torch.cuda, its profiler ranges and `torch.version.cuda`."""
    for name, value in answers.items():
        replace(undo, torch.cuda, name, value)
    replace(undo, torch.cuda.nvtx, "_nvtx", SimpleNamespace(**dict.fromkeys(_NVTX, lambda *_: 0)))
    replace(undo, torch.version, "cuda", CUDA_VERSION)


def of_torch_cuda(streams: Streams, generator: torch.Generator) -> dict[str, Any]:
    """Queries, streams and events, memory and random numbers. `generator` is the device's default one."""
    properties = DeviceProperties()

    def of_device(value: Any) -> Callable[..., Any]:
        def answer(device: Any = None) -> Any:
            ordinal(device)
            return value

        return answer

    def exchanged(device: Any) -> int:  # torch.compile tells handlers apart by identity: not `ordinal` twice
        return ordinal(device)

    def seed(seed: int) -> None:
        generator.manual_seed(seed)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": of_device(None),
        "_exchange_device": ordinal,
        "_maybe_exchange_device": exchanged,
        "get_device_capability": of_device(CAPABILITY),
        "get_device_name": of_device(properties.name),
        "get_device_properties": of_device(properties),
        "get_arch_list": lambda: [f"sm_{properties.major}{properties.minor}"],
        "is_bf16_supported": lambda including_emulation=True: True,
        "can_device_access_peer": lambda device, peer_device: True,
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
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "Event": Event,
        "Stream": Stream,
        "synchronize": streams.synchronize,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.stream,
    }
