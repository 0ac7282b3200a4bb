"""How a plan reaches the device: written to a pinned buffer, copied from there while `plan` returns.

The next plan through the same pinned buffer rewrites it. Where the host has not waited for the copy of the plan before
(measured on an H200, contract rule `two-plans`), runs of that plan work by a mixture of both.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fakes import cuda
from fakes.cuda import watch
from fakes.cuda.clocks import Work
from fakes.flashinfer import rules


@dataclass(slots=True)
class Staged:
    """The plan that a pinned buffer was last written for. `ran`: memory that its runs wrote, (storage, start, size) in
    bytes."""

    work: Work
    where: watch.Line
    ran: list[tuple[StorageWeakRef, int, int]]


def stage(pinned: torch.Tensor) -> Staged | None:
    """Write a plan to a pinned buffer and begin its copy. None where nothing is asynchronous: no simulated device."""
    streams = cuda.streams()
    if streams is None:
        return None
    before: Staged | None = getattr(pinned, "staged", None)
    if before is not None and not streams.timeline.done(before.work):
        _mix(before)
    staged = Staged(streams.enqueue(), watch.line(), [])
    pinned.staged = staged  # pyright: ignore[reportAttributeAccessIssue] - shared with the buffer, whoever holds it
    return staged


def _mix(before: Staged) -> None:
    record = rules.strict()
    if record is not None:
        rules.order(
            record,
            "fi.staging-in-flight",
            "plan",
            f"{watch.line()} plans while the copy of the plan made at {before.where} is in flight: both are staged in "
            "one pinned buffer, so wait first for an event that is recorded after the earlier plan",
        )
    for reference, start, size in before.ran:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is not None:
            ctypes.memset(storage.data_ptr() + start, 0xFF, size)  # NaN in every float dtype


def ran(staged: Staged | None, *results: torch.Tensor | None) -> None:
    """A run of a plan has written its results, by host aliases of them."""
    streams = cuda.streams()
    if staged is None or streams is None or streams.timeline.done(staged.work):
        return
    for result in results:
        if result is not None and result.is_contiguous():
            start = int(result.storage_offset()) * result.element_size()
            size = result.numel() * result.element_size()
            staged.ran.append((StorageWeakRef(result.untyped_storage()), start, size))


def read_back(**arrays: torch.Tensor | None) -> None:
    """`plan` reads these on the host: one that is on the device makes the host wait."""
    streams = cuda.streams()
    if streams is None:
        return
    for name, array in arrays.items():
        if array is not None and cuda.on_device(array):
            streams.drain(f"plan, which reads {name} back from the device")
