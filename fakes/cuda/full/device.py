"""The full device, installed by `open` and removed by `close` through one undo log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any, ClassVar, Self

import torch

from fakes.cuda import answers
from fakes.cuda.full import build, graphs, legacy
from fakes.cuda.full.copies import Copies
from fakes.cuda.interface import DeviceUnavailable, Kind, NotSimulated, Simulation
from fakes.cuda.streams import Streams

Tensor = torch.Tensor


class FullDevice(Simulation):
    """torch's own CUDA, as far as anything that runs on a CPU can see.

    Raises:
        DeviceUnavailable: the extension cannot be built or installed here.
    """

    kind: ClassVar[Kind] = "full"

    def __init__(self) -> None:
        self._extension: ModuleType = build.extension()
        self._undo = ExitStack()

    def open(self) -> None:
        extension = self._extension
        reason = extension.why_not()
        if reason:
            raise DeviceUnavailable(f"the full simulated CUDA device cannot be installed: {reason}")
        with ExitStack() as undo:
            streams = Streams(extension.refuse_in_capture)
            copies = Copies(streams, extension.protect, extension.traps)
            extension.install()
            undo.callback(extension.uninstall)
            extension.set_hooks(
                NotSimulated, copies.copying, copies.copied, streams.drain, copies.report_trapped
            )
            undo.callback(extension.set_hooks, None, None, None, None, None)
            undo.callback(extension.set_mode, extension.set_mode(extension.LIVE))
            on_graphs = graphs.answers(extension, streams)
            answers.install(undo, answers.of_torch_cuda(streams, torch.default_generator) | on_graphs)
            answers.replace(undo, torch.cuda, "_lazy_init", lambda: None)
            for name in ("CUDAGraph", "graph", "graph_pool_handle", "is_current_stream_capturing"):
                answers.replace(undo, torch.cuda.graphs, name, on_graphs[name])
            legacy.install(undo)
            undo.callback(streams.timeline.wait_for_all)  # opens what is protected
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()

    def host(self, tensor: Tensor) -> Tensor:
        return self._extension.host(tensor)

    def adopt(self, tensor: Tensor) -> Tensor:
        return self._extension.adopt(tensor)

    def on_device(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        extension = self._extension
        if extension.capturing():
            return graphs.record_kernel(extension, fn, args, kwargs)
        before = extension.set_mode(extension.KERNEL)
        try:
            result = fn(*args, **kwargs)
        finally:
            extension.set_mode(before)
        return graphs.on_device(extension, result, args, kwargs)

    def paused(self) -> _In:
        return _In(self._extension.set_mode, self._extension.PAUSED)

    def resumed(self) -> _In:
        return _In(self._extension.set_mode, self._extension.LIVE)


class _In:
    """A mode of this thread. A class, not a generator: it is entered for every call of every case."""

    __slots__ = ("_before", "_mode", "_set_mode")

    def __init__(self, set_mode: Callable[[int], int], mode: int) -> None:
        self._set_mode, self._mode = set_mode, mode

    def __enter__(self) -> Self:
        self._before = self._set_mode(self._mode)
        return self

    def __exit__(self, *_: object) -> None:
        self._set_mode(self._before)
