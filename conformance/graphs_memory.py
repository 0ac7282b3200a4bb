"""Memory that captured kernels read: whether it still is where it was, and whether something wrote past its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode

from backends.contract import Batch, EngineContext
from conformance.machine import Machine
from fakes import cuda
from fakes.recorder import Call, TensorRecord

_DEPTH = 4
"""How far a buffer may lie below a backend."""
_GUARD_WORDS = 32
_GUARD_VALUE = 0x5A
_LARGEST = 1 << 20
"""Elements of the largest buffer that is guarded: a workspace is not worth a copy."""


class Guards(TorchFunctionMode):
    """Inside it, each tensor that is made on the device lies between guard words that nobody may write to."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        made = func(*args, **(kwargs or {}))
        if func not in _FACTORIES or self._machine.place_of(made) != "cuda:0":
            return made
        if not 0 < made.numel() <= _LARGEST or not made.is_contiguous():
            return made
        whole = made.new_full((made.numel() + 2 * _GUARD_WORDS,), _GUARD_VALUE)
        inside = whole[_GUARD_WORDS:-_GUARD_WORDS].view(made.shape)
        inside.copy_(made)
        self._kept.append((whole, inside))
        return inside

    def broken(self) -> list[str]:
        """The buffers around which something was written."""
        return [
            f"a buffer of {str(inside.dtype).removeprefix('torch.')} {list(inside.shape)}"
            for whole, inside in self._kept
            if not self._intact(whole)
        ]

    def _intact(self, whole: torch.Tensor) -> bool:
        words = self._machine.fetch(whole)
        guards = (words[:_GUARD_WORDS], words[-_GUARD_WORDS:])
        return all(bool((part == torch.full_like(part, _GUARD_VALUE)).all()) for part in guards)


_FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor}


class Buffers:
    """Where the tensors of a backend stood when a graph was captured that reads them.

    Judged are those that the captured batch's metadata names, or a library call was given: each by the path from the
    backend that leads to its memory.
    """

    def __init__(self, backend: object, read: set[int]) -> None:
        self._backend = backend
        self._at = {
            path: tensor.data_ptr()
            for path, tensor in _tensors(backend)
            if tensor.data_ptr() in read and tensor.numel()
        }

    @classmethod
    def of(cls, backend: object, batch: Batch, calls: Sequence[Call]) -> Buffers:
        read = {tensor.data_ptr() for _, tensor in _tensors(batch.attn_metadata) if cuda.on_device(tensor)}
        for call in calls:
            read |= {x.data_ptr for x in call.arguments.values() if isinstance(x, TensorRecord)}
        return cls(backend, read)

    def moved(self) -> list[str]:
        """Paths of tensors that stand elsewhere now: a graph goes on reading the old memory."""
        if not self._at:
            return []
        now = {path: tensor.data_ptr() for path, tensor in _tensors(self._backend)}
        return [path for path, pointer in self._at.items() if now.get(path, pointer) != pointer]


def _tensors(root: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that an object holds, by path; the engine's own are left out."""
    todo: list[tuple[str, object, int]] = [("", root, 0)]
    seen: set[int] = set()
    while todo:
        path, value, depth = todo.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
            continue
        if id(value) in seen or depth > _DEPTH or isinstance(value, EngineContext):
            continue
        seen.add(id(value))
        todo += [
            (f"{path}.{name}" if path and not name.startswith("[") else path + name, part, depth + 1)
            for name, part in _parts(value)
        ]


def _parts(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        named = cast("dict[object, object]", value)
        yield from ((f"[{key!r}]", part) for key, part in named.items())
    elif isinstance(value, (list, tuple)):
        parts = cast("Sequence[object]", value)
        yield from ((f"[{i}]", part) for i, part in enumerate(parts))
    elif is_dataclass(value):
        yield from ((f.name, getattr(value, f.name, None)) for f in fields(value))
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from vars(value).items()
