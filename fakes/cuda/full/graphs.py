"""`torch.cuda.CUDAGraph` and `torch.cuda.graph`: capture once, replay over the same memory.

What a graph remembers and what it does not follows CUDA: operations, their numbers, and the memory that they read and
write; no Python around them. During capture nothing runs: memory that captured operations write has its old contents
afterwards, and what they allocate holds NaN, until the first replay.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch

from fakes.cuda.interface import NotSimulated
from fakes.cuda.streams import Stream, Streams

Pool = tuple[int, int]
_pools = itertools.count(1)


def graph_pool_handle() -> Pool:
    """A new memory pool. Graphs that share one share no memory here: each keeps its own."""
    return (0, next(_pools))


def answers(extension: ModuleType, streams: Streams) -> dict[str, Any]:
    """What torch.cuda and torch.cuda.graphs offer about graphs."""

    class CUDAGraph(_CUDAGraph):
        _extension = extension

    class graph(_Capture):  # noqa: N801
        _streams = streams

    for made, name in ((CUDAGraph, "CUDAGraph"), (graph, "graph")):
        made.__qualname__ = made.__name__ = name
        made.__module__ = "torch.cuda.graphs"
    return {
        "CUDAGraph": CUDAGraph,
        "graph": graph,
        "graph_pool_handle": graph_pool_handle,
        "is_current_stream_capturing": extension.capturing,
        "make_graphed_callables": _refuse_graphed_callables,
    }


class _CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    _extension: ModuleType

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: Any = self._extension.Graph()
        self._pool: Pool | None = None

    def capture_begin(
        self, pool: Pool | None = None, capture_error_mode: str = "global", check_input_liveness: bool = False
    ) -> None:
        """Record what this thread does from now on.

        Raises:
            RuntimeError: this thread captures already, or this graph has been captured and not been reset.
        """
        if capture_error_mode not in ("global", "thread_local", "relaxed"):
            raise RuntimeError(
                f"Unknown capture error mode. Expected `global`, `thread_local`, or `relaxed`, got {capture_error_mode}"
            )
        if self._graph.captured:
            raise RuntimeError(
                "This CUDAGraph instance already owns a captured graph. To capture a new graph, create a new instance."
            )
        self._extension.begin_capture(self._graph)
        self._pool = pool if pool is not None else graph_pool_handle()

    def capture_end(self) -> None:
        """Stop recording.

        Raises:
            RuntimeError: something was refused meanwhile, in CUDA's words. The graph cannot be replayed.
        """
        error: str = self._extension.end_capture()
        if error:
            raise RuntimeError(
                f"CUDA error: operation failed due to a previous error during capture (the first was: {error})"
            )

    def instantiate(self) -> None:
        """Nothing is left to be done after the capture."""

    def replay(self) -> None:
        """Run the recorded operations.

        Raises:
            RuntimeError: nothing was captured, or the capture failed.
        """
        self._graph.replay()

    def reset(self) -> None:
        """Forget what was captured."""
        self._graph = self._extension.Graph()
        self._pool = None

    def pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self._pool

    def enable_debug_mode(self) -> None:
        pass

    def debug_dump(self, debug_path: str) -> NoReturn:
        raise NotSimulated(
            f"the full simulated CUDA device does not write graphs to files (asked for {debug_path})"
        )

    @property
    def nodes(self) -> list[str]:
        """Names of the recorded operations, in order. Not torch's: for tests and reports."""
        return self._graph.names()

    def __len__(self) -> int:
        return len(self._graph)

    def __bool__(self) -> bool:
        return True


class _Capture:
    """`torch.cuda.graph`."""

    _streams: Streams
    _own_stream: Stream | None = None

    def __init__(
        self,
        cuda_graph: _CUDAGraph,
        pool: Pool | None = None,
        stream: Stream | None = None,
        capture_error_mode: str = "global",
        enable_annotations: bool = False,
        check_input_liveness: bool = False,
    ) -> None:
        own = type(self)
        if stream is None and own._own_stream is None:
            own._own_stream = Stream()
        self.cuda_graph = cuda_graph
        self.pool = pool
        self.capture_stream = stream or own._own_stream
        self.capture_error_mode = capture_error_mode
        self._on_stream = self._streams.stream(self.capture_stream)

    def __enter__(self) -> None:
        self._streams.synchronize()
        self._on_stream.__enter__()
        try:
            self.cuda_graph.capture_begin(self.pool, self.capture_error_mode)
        except BaseException:
            self._on_stream.__exit__(None, None, None)
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self.cuda_graph.capture_end()
        finally:
            self._on_stream.__exit__(None, None, None)


def _refuse_graphed_callables(*_: Any, **__: Any) -> NoReturn:
    raise NotSimulated(
        "the full simulated CUDA device does not capture autograd (torch.cuda.make_graphed_callables); capture with "
        "torch.cuda.graph"
    )


def record_kernel(
    extension: ModuleType, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Run a declared kernel while capturing, and record it as one node.

    What it was called with is frozen: numbers and plans as they are, tensors as the memory they stand for.
    """
    extension.require_valid()
    frozen_args = _mapped(extension.snapshot, tuple(args))
    frozen_kwargs = _mapped(extension.snapshot, kwargs)
    keep = extension.capture_graph().keep
    _mapped(keep, (frozen_args, frozen_kwargs))

    def run() -> Any:
        before = extension.set_mode(extension.KERNEL)
        try:
            return fn(*frozen_args, **frozen_kwargs)
        finally:
            extension.set_mode(before)

    recorded = on_device(extension, run(), args, kwargs)
    landing = _mapped(extension.snapshot, recorded)

    def again() -> None:
        _land(extension, landing, run())

    extension.record_call(again)
    return recorded


def on_device(extension: ModuleType, result: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A kernel's result with its tensors on the device, except those that live in a host argument."""
    if result is None:
        return None
    hosted: set[int] | None = None

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal hosted
        if tensor.is_cuda or not tensor.is_cpu:
            return tensor
        if hosted is None:
            hosted = set()
            for given in _tensors((tuple(args), kwargs)):
                if given.is_cpu:
                    hosted.add(given.untyped_storage().data_ptr())
        return tensor if tensor.untyped_storage().data_ptr() in hosted else extension.adopt(tensor)

    return _mapped(moved, result)


def _mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """A value with every tensor in it (in tuples, lists and dicts, nested) replaced."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(change, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_mapped(change, item) for item in value]
    if isinstance(value, tuple):
        items = [_mapped(change, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    _mapped(found.append, value)
    return found


def _land(extension: ModuleType, recorded: Any, result: Any) -> None:
    for to, new in zip(_tensors(recorded), _tensors(result), strict=True):
        target, source = extension.host(to), extension.host(new)
        if target.data_ptr() != source.data_ptr() or target.shape != source.shape:
            target.copy_(source)
