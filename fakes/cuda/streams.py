"""Streams and events. Each call computes at once; what the host may rely on is another matter (`fakes.cuda.clocks`).

Copies between host and device, and what a library copies for itself, are work on a stream. Until the host has waited
for it (through an event that was recorded after it, its stream, or the device) it counts as still running.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal, NoReturn, Self

from fakes.cuda import watch
from fakes.cuda.clocks import Clock, Timeline, Work, merge
from fakes.cuda.devices import CUDA, ordinal
from fakes.cuda.interface import NotSimulated

_ids = itertools.count(1)


class Streams:
    """The streams of one simulation: which one is current in this thread, and what the host has waited for.

    The latest made is the one that new streams and events belong to. `refuse_in_capture` is
    called with what is about to make the host wait; it raises where a graph is being captured.
    """

    latest: ClassVar[Streams]

    def __init__(self, refuse_in_capture: Callable[[str], None] | None = None) -> None:
        Streams.latest = self
        self.timeline = Timeline()
        self.default = Stream()
        self.default.stream_id = self.default.cuda_stream = 0
        self.refuse_in_capture = refuse_in_capture
        self._threads = threading.local()

    @property
    def now(self) -> Stream:
        return getattr(self._threads, "now", self.default)

    @now.setter
    def now(self, stream: Stream) -> None:
        self._threads.now = stream

    def current_stream(self, device: Any = None) -> Stream:
        ordinal(device)
        return self.now

    def default_stream(self, device: Any = None) -> Stream:
        ordinal(device)
        return self.default

    def set_stream(self, stream: Stream | None) -> None:
        if stream is not None:
            self.now = stream

    def stream(self, stream: Stream | None) -> AbstractContextManager[Any]:
        return nullcontext() if stream is None else _Switched(self, stream)

    def synchronize(self, device: Any = None) -> None:
        """`torch.cuda.synchronize`."""
        ordinal(device)
        self._refuse("device synchronize")
        watch.host_waits("torch.cuda.synchronize()")
        self.timeline.wait_for_all()

    def enqueue(self, finish: Callable[[], None] | None = None) -> Work:
        """Begin work on the current stream; `finish` is called once the host has waited for it."""
        stream = self.now
        return self.timeline.enqueue(stream.stream_id, stream.clock, finish)

    def drain(self, what: str) -> None:
        """An operation makes the host wait for the current stream and reads a device value: `item`, `nonzero`."""
        self._refuse(what)
        name = what.removeprefix("aten::")
        watch.host_waits("item" if name == "_local_scalar_dense" else name)
        self.timeline.wait(self.now.clock)

    def staged_copy(self, kind: Literal["h2d", "d2h"], non_blocking: bool, pinned: bool) -> None:
        """A copy between host and device through a buffer of the driver's. The host side is free when it returns.

        `pinned`: the host side is pinned, and goes through that buffer all the same because it is not contiguous. A
        non-blocking one to the device may wait for the stream or not (it did not where it was measured): it counts as
        a wait, and nothing may be relied on to be done.
        """
        unfit = "pinned memory that is not contiguous" if pinned else "pageable memory"
        if kind == "d2h":
            self.drain(f"a non-blocking copy to {unfit}" if non_blocking else "a copy to the host")
        elif non_blocking:
            watch.host_waits(f"a non-blocking copy from {unfit}")
        else:  # nothing comes back that the program could be waiting for
            self.timeline.wait(self.now.clock)

    def wait(self, clock: Clock, what: str) -> None:
        self._refuse(what)
        self.timeline.wait(clock)

    def _refuse(self, what: str) -> None:
        if self.refuse_in_capture is not None:
            self.refuse_in_capture(what)


class _Polled:
    """Answers "not yet" once before "done", so that code sees both and a loop of queries ends."""

    _asked: Clock | None = None

    def _poll(self, streams: Streams, clock: Clock) -> bool:
        if streams.timeline.passed(clock):
            return True
        if self._asked != clock:
            self._asked = dict(clock)
            return False
        streams.timeline.wait(clock)
        return True


class Event(_Polled):
    """`torch.cuda.Event`. Before it is recorded it counts as complete, as on CUDA."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self.enable_timing = enable_timing
        self.device = CUDA
        self._streams = Streams.latest
        self._clock: Clock = {}
        self._recorded_at: float | None = None

    @property
    def cuda_event(self) -> int:
        return id(self) if self._recorded_at is not None else 0

    def record(self, stream: Stream | None = None) -> None:
        self._clock = dict((stream or self._streams.now).clock)
        self._recorded_at = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.now).wait_event(self)

    def query(self) -> bool:
        """False once if the host has not waited for what it was recorded after; then it has happened."""
        self._streams._refuse("event query")
        return self._poll(self._streams, self._clock)

    def synchronize(self) -> None:
        self._streams.wait(self._clock, "event synchronize")

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds of host time between two recorded events; the device itself takes none."""
        if not (self.enable_timing and end_event.enable_timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._recorded_at is None or end_event._recorded_at is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._recorded_at - self._recorded_at) * 1e3


class Stream(_Polled):
    """`torch.cuda.Stream`. As a context manager it becomes the current stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.stream_id = self.cuda_stream = next(_ids)
        self.priority = priority
        self.device = CUDA
        self.device_index = 0
        self.clock: Clock = {}
        self._streams = Streams.latest
        self._entered: list[AbstractContextManager[Any]] = []

    def wait_stream(self, stream: Stream) -> None:
        merge(self.clock, stream.clock)

    def wait_event(self, event: Event) -> None:
        merge(self.clock, event._clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        """False once if the host has not waited for all that is enqueued here; then that is done."""
        self._streams._refuse("stream query")
        return self._poll(self._streams, self.clock)

    def synchronize(self) -> None:
        watch.host_waits("Stream.synchronize()")
        self._streams.wait(self.clock, "stream synchronize")

    def __enter__(self) -> Self:
        entered = self._streams.stream(self)
        entered.__enter__()
        self._entered.append(entered)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.pop().__exit__(None, None, None)


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
