"""Copies in flight: whoever touches their pinned memory before the host has waited for them is named."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes import cuda
from fakes.cuda.watched import Watched, watched

Tensor = torch.Tensor

IN_FLIGHT, EARLY = "cuda.pinned-in-flight", "cuda.early-read"


@contextmanager
def _full() -> Iterator[None]:
    with ExitStack() as stack:
        try:
            stack.enter_context(cuda.simulated_cuda("full"))
        except cuda.DeviceUnavailable as error:
            pytest.skip(str(error))
        yield


@pytest.fixture
def seen() -> Iterator[Watched]:
    with _full(), watched() as watcher:
        yield watcher


def _rules(seen: Watched) -> list[str]:
    return [hazard.rule for hazard in seen.hazards]


def _pinned(n: int = 8) -> Tensor:
    return torch.arange(n, dtype=torch.int32, pin_memory=True)


def _upload(h: Tensor) -> Tensor:
    d = torch.empty_like(h, device="cuda")
    d.copy_(h, non_blocking=True)
    return d


def _wait_for_event() -> None:
    event = torch.cuda.Event()
    event.record()
    event.synchronize()


def _on_another_stream(h: Tensor) -> None:
    d = torch.zeros(8, dtype=torch.int32, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        h.copy_(d)


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda h: h.add_(1),
    "through a view": lambda h: h[2:4].fill_(7),
    "through .data, which has a version counter of its own": lambda h: h.data.fill_(7),
    "through numpy": lambda h: h.numpy().__setitem__(3, 9),
    "the same value again": lambda h: h.numpy().__setitem__(3, 3),
    "ctypes": lambda h: ctypes.memset(h.data_ptr(), 0, 4),
    "copy_": lambda h: h.copy_(torch.zeros(8, dtype=torch.int32)),
    "out=": lambda h: torch.add(torch.ones(8, dtype=torch.int32), 1, out=h),
    "a slice assigned": lambda h: h.__setitem__(slice(0, 2), torch.tensor([5, 6], dtype=torch.int32)),
    "a blocking copy to the host on another stream": _on_another_stream,
}


@pytest.mark.parametrize("name", WRITES)
def test_written_in_flight(seen: Watched, name: str) -> None:
    h = _pinned()
    d = _upload(h)
    WRITES[name](h)
    assert _rules(seen) == [IN_FLIGHT]
    message = seen.hazards[0].message
    assert message.count("test_copies.py:") == 2, message
    assert "in _upload" in message
    torch.cuda.synchronize()
    assert d.tolist() == list(range(8)), "what was copied is what was there"
    assert len(seen.hazards) == 1


@pytest.mark.parametrize("name", WRITES)
def test_written_after_a_wait(seen: Watched, name: str) -> None:
    h = _pinned()
    _upload(h)
    _wait_for_event()
    WRITES[name](h)
    torch.cuda.synchronize()
    assert not seen.hazards


def test_a_write_is_carried_out(seen: Watched) -> None:
    h = _pinned()
    _upload(h)
    h.fill_(7)
    assert h.tolist() == [7] * 8


def test_a_view_of_numpy_taken_before_the_copy(seen: Watched) -> None:
    h = _pinned()
    array = h.numpy()
    _upload(h)
    array[3] = 3
    assert _rules(seen) == [IN_FLIGHT]


def test_an_inference_tensor_has_no_version_counter(seen: Watched) -> None:
    with torch.inference_mode():
        h = _pinned()
        _upload(h)
        h.add_(1)
    assert _rules(seen) == [IN_FLIGHT]


def test_only_read(seen: Watched) -> None:
    h = _pinned()
    _upload(h)
    assert h.sum() == 28
    assert h.tolist() == list(range(8))
    assert not seen.hazards


def test_an_event_recorded_before_the_copy(seen: Watched) -> None:
    h, event = _pinned(), torch.cuda.Event()
    event.record()
    _upload(h)
    event.synchronize()
    h.add_(1)
    assert _rules(seen) == [IN_FLIGHT]


def test_another_streams_synchronisation(seen: Watched) -> None:
    h = _pinned()
    with torch.cuda.stream(torch.cuda.Stream()):
        _upload(h)
    torch.cuda.current_stream().synchronize()
    h.add_(1)
    assert _rules(seen) == [IN_FLIGHT]


def test_a_joined_streams_synchronisation(seen: Watched) -> None:
    h, side = _pinned(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        _upload(h)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.current_stream().synchronize()
    h.add_(1)
    assert not seen.hazards


def test_a_host_read_on_the_same_stream(seen: Watched) -> None:
    h = _pinned()
    d = _upload(h)
    assert d[1].item() == 1
    h.add_(1)
    assert not seen.hazards


def test_pageable_memory_is_staged(seen: Watched) -> None:
    h = torch.arange(8, dtype=torch.int32)
    d = h.to("cuda", non_blocking=True)
    assert [wait.what for wait in seen.waits] == ["a non-blocking copy from pageable memory"]
    h.add_(1)
    torch.cuda.synchronize()
    assert not seen.hazards
    assert d.tolist() == list(range(8))


def test_pinned_memory_that_is_strided_is_staged(seen: Watched) -> None:
    h = _pinned(16)
    d = h[::2].to("cuda", non_blocking=True)
    h.add_(1)
    torch.cuda.synchronize()
    assert not seen.hazards
    assert [wait.what for wait in seen.waits][:1] == [
        "a non-blocking copy from pinned memory that is not contiguous"
    ]
    assert d.tolist() == list(range(0, 16, 2))


def test_converted_on_the_way_it_is_read_in_flight(seen: Watched) -> None:
    h = _pinned()
    d = torch.empty(8, dtype=torch.float32, device="cuda")
    d.copy_(h, non_blocking=True)
    h.add_(1)
    assert _rules(seen) == [IN_FLIGHT]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.bool])
def test_a_result_read_before_it_has_arrived(seen: Watched, dtype: torch.dtype) -> None:
    d = torch.ones(8, device="cuda").to(dtype)
    h = d.to("cpu", non_blocking=True)
    assert h.is_pinned()
    early = h.clone()
    assert _rules(seen) == [EARLY]
    assert seen.hazards[0].message.count("test_copies.py:") == 2
    torch.cuda.synchronize()
    assert torch.equal(h, torch.ones(8).to(dtype))
    assert not (early == h).any(), "what is there before is garbage"


def test_a_result_read_after_an_event(seen: Watched) -> None:
    d = torch.arange(8, device="cuda")
    h = d.to("cpu", non_blocking=True)
    _wait_for_event()
    assert h.sum().item() == 28
    assert not seen.hazards


def test_a_result_is_fetched_into_pageable_memory_at_once(seen: Watched) -> None:
    d, h = torch.arange(8, device="cuda"), torch.empty(8, dtype=torch.int64)
    h.copy_(d, non_blocking=True)
    assert h.sum().item() == 28
    assert not seen.hazards


def test_a_buffer_that_is_dropped_in_flight_is_not_handed_out_again(seen: Watched) -> None:
    h = _pinned()
    _upload(h)
    del h
    again = torch.zeros(8, dtype=torch.int32, pin_memory=True)
    again.add_(1)
    torch.cuda.synchronize()
    assert not seen.hazards


def test_another_part_of_the_same_buffer(seen: Watched) -> None:
    h = torch.zeros(2048, dtype=torch.int32, pin_memory=True)
    _upload(h[:4])
    h[1000:1004] = 3
    torch.cuda.synchronize()
    assert not seen.hazards


def test_a_write_that_no_page_sees_is_seen_when_the_copy_is_waited_for(seen: Watched) -> None:
    h = torch.zeros(2048, dtype=torch.int32, pin_memory=True)
    _upload(h[:4])
    h[1000:1004] = 3  # opens the page
    h[0] = 1
    assert not seen.hazards
    torch.cuda.synchronize()
    assert _rules(seen) == [IN_FLIGHT]
    assert "in _upload" in seen.hazards[0].message


def test_two_copies_of_one_buffer_are_both_covered(seen: Watched) -> None:
    h = torch.zeros(2048, dtype=torch.int32, pin_memory=True)
    _upload(h[:4])
    event = torch.cuda.current_stream().record_event()
    _upload(h[4:8])
    event.synchronize()
    h[0] = 1
    assert not seen.hazards
    h[4] = 1
    torch.cuda.synchronize()
    assert _rules(seen) == [IN_FLIGHT]


def test_the_device_reads_back_what_it_is_about_to_bring(seen: Watched) -> None:
    """Down and up again on one stream: the second copy comes behind the first."""
    d = torch.arange(8, dtype=torch.int32, device="cuda")
    h = d.to("cpu", non_blocking=True)
    again = _upload(h)
    torch.cuda.synchronize()
    assert not seen.hazards
    assert again.tolist() == h.tolist() == list(range(8))


def test_up_and_down_again_on_one_stream(seen: Watched) -> None:
    h = _pinned()
    d = _upload(h)
    h.copy_(d + 1, non_blocking=True)
    torch.cuda.synchronize()
    assert not seen.hazards
    assert d.tolist() == list(range(8))
    assert h.tolist() == list(range(1, 9))


def test_a_thread_that_writes(seen: Watched) -> None:
    h = _pinned()
    _upload(h)

    def writer() -> None:
        h.add_(1)

    thread = threading.Thread(target=writer)
    thread.start()
    thread.join()
    assert _rules(seen) == [IN_FLIGHT]
    assert "in writer" in seen.hazards[0].message


def test_a_system_call_fails_instead_of_trapping(seen: Watched, tmp_path: Path) -> None:
    """A door that page protection does not watch: the kernel refuses to write there."""
    path = tmp_path / "eight"
    path.write_bytes(b"12345678")
    h = torch.zeros(8, dtype=torch.uint8, pin_memory=True)
    _upload(h)
    into: Any = h.numpy()
    with path.open("rb", buffering=0) as file, pytest.raises(OSError, match="Bad address"):
        os.readv(file.fileno(), [into])
    assert not seen.hazards
    torch.cuda.synchronize()
    with path.open("rb", buffering=0) as file:
        assert os.readv(file.fileno(), [into]) == 8


def test_nothing_stays_closed_behind_the_simulation() -> None:
    with _full(), watched():
        h, d = _pinned(), torch.arange(8, device="cuda")
        _upload(h)
        down = d.to("cpu", non_blocking=True)
    h.add_(1)
    assert down.tolist() == list(range(8))


def test_without_a_watcher_results_are_late_all_the_same() -> None:
    with _full():
        h = torch.arange(8, device="cuda").to("cpu", non_blocking=True)
        assert h.sum() != 28
        torch.cuda.synchronize()
        assert h.sum() == 28


@pytest.mark.parametrize("blocking", [True, False])
def test_empty_copies(seen: Watched, blocking: bool) -> None:
    h = torch.empty(0, dtype=torch.int32, pin_memory=True)
    h.to("cuda", non_blocking=not blocking).to("cpu", non_blocking=not blocking)
    torch.cuda.synchronize()
    assert not seen.hazards
