"""Streams and events: which synchronisation covers which work."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from fakes.cuda.clocks import Work
from fakes.cuda.streams import Event, Stream, Streams
from fakes.cuda.watched import watched


@pytest.fixture
def streams() -> Streams:
    return Streams()


def _device(streams: Streams) -> Callable[[], None]:
    return streams.synchronize


def _stream(streams: Streams) -> Callable[[], None]:
    return streams.now.synchronize


def _blocking_operation(streams: Streams) -> Callable[[], None]:
    return lambda: streams.drain("item")


def _event_after(streams: Streams) -> Callable[[], None]:
    event = Event()
    event.record()
    return event.synchronize


def _joined(streams: Streams) -> Callable[[], None]:
    other = Stream()
    other.wait_stream(streams.now)
    return other.synchronize


def _joined_by_event(streams: Streams) -> Callable[[], None]:
    event, other = Event(), Stream()
    event.record()
    other.wait_event(event)
    return other.synchronize


def _joined_by_two_events(streams: Streams) -> Callable[[], None]:
    other, third = Stream(), Stream()
    streams.now.record_event().wait(other)
    third.wait_event(other.record_event())
    return third.synchronize


@pytest.mark.parametrize(
    "prepare",
    [
        _device,
        _stream,
        _blocking_operation,
        _event_after,
        _joined,
        _joined_by_event,
        _joined_by_two_events,
    ],
)
def test_synchronisation_covers_work_enqueued_before(
    streams: Streams, prepare: Callable[[Streams], Callable[[], None]]
) -> None:
    work = streams.enqueue()
    synchronise = prepare(streams)
    assert not streams.timeline.done(work)
    synchronise()
    assert streams.timeline.done(work)


def _event_before(streams: Streams) -> tuple[Work, Callable[[], None]]:
    event = streams.now.record_event()
    return streams.enqueue(), event.synchronize


def _never_recorded(streams: Streams) -> tuple[Work, Callable[[], None]]:
    return streams.enqueue(), Event().synchronize


def _other_stream(streams: Streams) -> tuple[Work, Callable[[], None]]:
    return streams.enqueue(), Stream().synchronize


def _joined_before(streams: Streams) -> tuple[Work, Callable[[], None]]:
    other = Stream()
    other.wait_stream(streams.now)
    return streams.enqueue(), other.synchronize


def _side_work(streams: Streams) -> tuple[Work, Callable[[], None]]:
    with Stream():
        work = streams.enqueue()
    return work, streams.now.synchronize


def _default_stream_waits_for_nobody(streams: Streams) -> tuple[Work, Callable[[], None]]:
    with Stream():
        work = streams.enqueue()
    return work, lambda: streams.drain("item")


@pytest.mark.parametrize(
    "begin",
    [
        _event_before,
        _never_recorded,
        _other_stream,
        _joined_before,
        _side_work,
        _default_stream_waits_for_nobody,
    ],
)
def test_synchronisation_does_not_cover_other_work(
    streams: Streams, begin: Callable[[Streams], tuple[Work, Callable[[], None]]]
) -> None:
    work, synchronise = begin(streams)
    synchronise()
    assert not streams.timeline.done(work)
    streams.synchronize()
    assert streams.timeline.done(work)


def test_device_synchronise_covers_streams_that_are_gone(streams: Streams) -> None:
    with Stream():
        work = streams.enqueue()
    streams.synchronize()
    assert streams.timeline.done(work)


def test_finish_is_called_once_and_in_order(streams: Streams) -> None:
    finished: list[int] = []
    for i in range(3):
        streams.enqueue(lambda i=i: finished.append(i))
    event = streams.now.record_event()
    streams.enqueue(lambda: finished.append(3))
    assert not finished
    event.synchronize()
    assert finished == [0, 1, 2]
    streams.synchronize()
    streams.synchronize()
    assert finished == [0, 1, 2, 3]


def test_an_event_recorded_again_covers_the_later_work(streams: Streams) -> None:
    event = streams.now.record_event()
    work = streams.enqueue()
    event.record()
    event.synchronize()
    assert streams.timeline.done(work)


@pytest.mark.parametrize(
    "of",
    [lambda streams: streams.now, lambda streams: streams.now.record_event()],
    ids=["stream", "event"],
)
def test_query_says_not_yet_once_and_then_counts_as_waiting(
    streams: Streams, of: Callable[[Streams], Event | Stream]
) -> None:
    assert of(streams).query()
    work = streams.enqueue()
    polled = of(streams)
    assert not polled.query()
    assert not streams.timeline.done(work)
    assert polled.query()
    assert streams.timeline.done(work)


def test_each_thread_has_its_own_current_stream(streams: Streams) -> None:
    seen: list[Stream] = []
    with Stream() as side:
        thread = threading.Thread(target=lambda: seen.append(streams.current_stream()))
        thread.start()
        thread.join()
        assert streams.current_stream() is side
    assert seen == [streams.default]


def test_an_event_of_an_earlier_simulation_covers_nothing_of_a_later_one(streams: Streams) -> None:
    streams.enqueue()
    old = streams.now.record_event()
    later = Streams()
    work = later.enqueue()
    later.timeline.wait(old._clock)
    assert not later.timeline.done(work)


def test_what_makes_the_host_wait_is_told_with_its_line(streams: Streams) -> None:
    with watched() as told:
        streams.drain("item")
        streams.now.synchronize()
        streams.now.record_event().synchronize()  # an event is what one is to wait for
    assert [wait.what for wait in told.waits] == ["item", "Stream.synchronize()"]
    assert all("test_streams.py:" in wait.where and "with_its_line" in wait.where for wait in told.waits)


def test_waiting_is_refused_where_a_graph_is_captured() -> None:
    asked: list[str] = []
    streams = Streams(asked.append)
    streams.now.synchronize()
    streams.now.record_event().synchronize()
    streams.now.query()
    streams.synchronize()
    streams.drain("item")
    assert asked == ["stream synchronize", "event synchronize", "stream query", "device synchronize", "item"]
