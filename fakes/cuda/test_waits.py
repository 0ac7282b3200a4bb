"""Which operations make the host wait for the device, and are told with their line."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fakes.cuda.streams import Streams
from fakes.cuda.watched import simulated, watched

Tensor = torch.Tensor


@pytest.fixture(autouse=True, params=["light", "full"])
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    for _ in simulated(request.param):
        yield


def _printed(x: Tensor) -> str:
    return str(x)


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x[1]),
    "float": lambda x: float(x[1]),
    "cpu": lambda x: x.cpu(),
    "to cpu": lambda x: x.to("cpu"),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "equal": lambda x: torch.equal(x, x),
    "unique": torch.unique,
    "masked_select": lambda x: x.masked_select(x > 1),
    "repeat_interleave": lambda x: x.repeat_interleave(x),
    "list index": lambda x: [0, 1, 2, 3, 4][x[1]],
    "max of a list": lambda x: max(x[:2]),
    "copy_ to the host": lambda x: torch.empty(4, dtype=x.dtype).copy_(x),
    "assigned on the host": lambda x: torch.empty(4, dtype=x.dtype).__setitem__(slice(None), x),
    "stream": lambda x: torch.cuda.current_stream().synchronize(),
    "device": lambda x: torch.cuda.synchronize(),
    "printed": _printed,
    "numpy": lambda x: x.numpy(force=True),
}

SILENT: dict[str, Callable[[Tensor], object]] = {
    "add": lambda x: x + 1,
    "number": lambda x: x * 2.5,
    "view": lambda x: x[1:].view(-1),
    "index on the device": lambda x: x[x],
    "mask filled": lambda x: x.masked_fill(x > 1, 7),
    "mask assigned": lambda x: x.__setitem__(x > 1, 7),
    "sized repeat": lambda x: x.repeat_interleave(x, output_size=6),
    "pinned source": lambda x: torch.arange(4, pin_memory=True).to("cuda", non_blocking=True),
    "asynchronous result": lambda x: x.to("cpu", non_blocking=True),
    "iterated": lambda x: [part + 1 for part in x],
    "shape": lambda x: (x.shape, len(x), x.numel()),
    "event": lambda x: torch.cuda.current_stream().record_event().synchronize(),
    "host only": lambda x: torch.arange(4).tolist(),
    "handed over": lambda x: torch.tensor([1, 2], device="cuda"),
}


@pytest.mark.parametrize("name", READS)
def test_the_host_waits(name: str) -> None:
    x = torch.arange(4, device="cuda")
    work = Streams.latest.enqueue()
    with watched() as seen:
        READS[name](x)
    assert seen.waits
    assert all(__file__.rpartition("/")[2] in wait.where for wait in seen.waits), seen.waits
    assert Streams.latest.timeline.done(work)


@pytest.mark.parametrize("name", SILENT)
def test_the_host_does_not_wait(name: str) -> None:
    x = torch.arange(4, device="cuda")
    with watched() as seen:
        SILENT[name](x)
    assert not seen.waits


@pytest.mark.parametrize(
    "hand_over",
    [
        pytest.param(lambda x: torch.arange(4).to("cuda", non_blocking=True), id="to"),
        pytest.param(lambda x: x.copy_(torch.arange(4), non_blocking=True), id="copy_"),
    ],
)
def test_a_non_blocking_copy_from_pageable_memory_may_wait_and_is_not_to_be_relied_on(
    hand_over: Callable[[Tensor], object],
) -> None:
    x = torch.arange(4, device="cuda")
    work = Streams.latest.enqueue()
    with watched() as seen:
        hand_over(x)
    assert [wait.what for wait in seen.waits] == ["a non-blocking copy from pageable memory"]
    assert not Streams.latest.timeline.done(work)


@pytest.mark.parametrize(
    "hand_over",
    [
        pytest.param(lambda x: torch.tensor([1, 2], device="cuda"), id="tensor"),
        pytest.param(lambda x: torch.arange(4).to("cuda"), id="to"),
        pytest.param(lambda x: torch.arange(4, pin_memory=True).cuda(), id="cuda"),
        pytest.param(lambda x: x.copy_(torch.arange(4)), id="copy_"),
        pytest.param(lambda x: x.__setitem__(slice(None), torch.arange(4)), id="assigned"),
        pytest.param(lambda x: x[[0, 1]], id="list index"),
    ],
)
def test_a_blocking_copy_to_the_device_waits_and_reads_nothing(hand_over: Callable[[Tensor], object]) -> None:
    x = torch.arange(4, device="cuda")
    work = Streams.latest.enqueue()
    with watched() as seen:
        hand_over(x)
    assert not seen.waits
    assert Streams.latest.timeline.done(work)
