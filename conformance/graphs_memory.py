"""Memory that captured kernels read: whether it still is where it was, and whether something wrote past its end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from types import ModuleType
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
        guards = torch.cat((words[:_GUARD_WORDS], words[-_GUARD_WORDS:]))
        return bool((guards == _GUARD_VALUE).all())


_FACTORIES = {torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.tensor}


Path = tuple[tuple[bool, Any], ...]
"""From an object to a tensor: each step an attribute (True, name) or an item (False, key)."""


class Buffers:
    """Where the tensors of a backend stood when graphs were captured that read them.

    Judged are those that a captured batch's metadata names, or a library call was given: each by the path from the
    backend that leads to its memory.
    """

    def __init__(self, backend: object) -> None:
        self._backend = backend
        self._all = [(path, tensor.data_ptr()) for path, tensor in _tensors(backend) if tensor.numel()]
        self._of_size: dict[int, list[tuple[Path, int]]] = {}

    def captured(self, size: int, batch: Batch, calls: Sequence[Call]) -> None:
        """A graph of this size reads what its batch and its calls name."""
        read = {tensor.data_ptr() for _, tensor in _tensors(batch.attn_metadata) if cuda.on_device(tensor)}
        for call in calls:
            read |= {x.data_ptr for x in call.arguments.values() if isinstance(x, TensorRecord)}
        self._of_size[size] = [(path, pointer) for path, pointer in self._all if pointer in read]

    def moved(self, size: int) -> list[str]:
        """Tensors that stand elsewhere now: the graph of this size goes on reading the old memory.

        A name that is bound anew while another still leads to the memory has not moved it.
        """
        moved = [
            (path, pointer)
            for path, pointer in self._of_size[size]
            if self._stands_at(path) not in (None, pointer)
        ]
        standing = {tensor.data_ptr() for _, tensor in _tensors(self._backend)} if moved else set[int]()
        return [_words(path) for path, pointer in moved if pointer not in standing]

    def _stands_at(self, path: Path) -> int | None:
        value: Any = self._backend
        try:
            for by_name, key in path:
                value = getattr(value, key) if by_name else value[key]
        except (AttributeError, KeyError, IndexError):
            return None
        return value.data_ptr() if isinstance(value, torch.Tensor) else None


def _words(path: Path) -> str:
    return "".join(f".{key}" if by_name else f"[{key!r}]" for by_name, key in path).removeprefix(".")


def _tensors(root: object) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors that an object holds, by path; the engine's own are left out."""
    todo: list[tuple[Path, object]] = [((), root)]
    seen: set[int] = set()
    while todo:
        path, value = todo.pop()
        if isinstance(value, torch.Tensor):
            yield path, value
        elif len(path) <= _DEPTH and id(value) not in seen and not isinstance(value, _LEAVES):
            seen.add(id(value))
            todo += [((*path, step), part) for step, part in _parts(value)]


def _parts(value: object) -> Iterator[tuple[tuple[bool, Any], object]]:
    if isinstance(value, dict):
        yield from (((False, key), part) for key, part in cast("dict[object, object]", value).items())
    elif isinstance(value, (list, tuple)):
        yield from (((False, i), part) for i, part in enumerate(cast("Sequence[object]", value)))
    elif is_dataclass(value):
        yield from (((True, f.name), getattr(value, f.name, None)) for f in fields(value))
    elif not callable(value):
        yield from (((True, name), part) for name, part in getattr(value, "__dict__", {}).items())


_LEAVES = (EngineContext, str, int, float, type(None), torch.dtype, torch.device, type, ModuleType)
