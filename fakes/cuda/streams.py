"""Streams and events of a device that runs each call at once: everything enqueued is done already."""

from __future__ import annotations

import itertools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Self

import torch

from fakes.cuda.devices import CUDA
from fakes.cuda.interface import NotSimulated


class Event:
    """`torch.cuda.Event`. Complete as soon as it is recorded; before that too, as on CUDA."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self.device = CUDA
        self._recorded_at: float | None = None

    @property
    def cuda_event(self) -> int:
        return id(self) if self._recorded_at is not None else 0

    def record(self, stream: Stream | None = None) -> None:
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between two recorded events; the device itself takes none."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


class Stream:
    """`torch.cuda.Stream`. As a context manager it becomes the current stream."""

    _ids = itertools.count(1)

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(Stream._ids)
        self.priority = priority
        self.device = CUDA
        self.device_index = 0
        self._entered: list[AbstractContextManager[Any]] = []

    def wait_stream(self, stream: Stream) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        pass

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __enter__(self) -> Self:
        entered = torch.cuda.stream(self)  # type: ignore[arg-type]
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(None, None, None)


class Streams:
    """Which stream is current, and torch.cuda's functions about that."""

    def __init__(self) -> None:
        self.default = Stream()
        self.default.stream_id = self.default.cuda_stream = 0
        self.now = self.default

    def current_stream(self, device: Any = None) -> Stream:
        return self.now

    def default_stream(self, device: Any = None) -> Stream:
        return self.default

    def set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            self.now = stream

    def stream(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else _Switched(self, stream)


class _Switched(AbstractContextManager[None]):
    def __init__(self, streams: Streams, stream: Stream) -> None:
        self._streams, self._stream, self._before = streams, stream, streams.now

    def __enter__(self) -> None:
        self._before, self._streams.now = self._streams.now, self._stream

    def __exit__(self, *exc: object) -> None:
        self._streams.now = self._before


class CUDAGraph:
    """`torch.cuda.CUDAGraph` and all else about graphs: refused."""

    def __init__(self, *_: Any, **__: Any) -> None:
        refuse_graph()


def refuse_graph(*_: Any, **__: Any) -> NoReturn:
    raise NotSimulated(
        'the light simulated CUDA device cannot capture CUDA graphs; that needs the full device (kind="full")'
    )
