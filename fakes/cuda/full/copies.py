"""Copies between pinned memory and the device that the host has not waited for yet.

The extension copies at once. Here each copy stays *in flight* until the host has waited for it. While it is, its
pinned pages are protected: of a copy to the device against writing, of a copy to the host (whose destination holds
garbage meanwhile) against reading too. The first access traps, whoever makes it (torch, numpy, ctypes), is reported
with its line and goes on. A second net compares the source of a copy to the device with what was copied, once the copy
is waited for: it sees writes that no page protection sees (system calls, other bytes of a page that is open).

A copy from or to memory that is not pinned, or that is not contiguous, goes through a buffer of the driver's: it is
safe, and the host waits for the stream meanwhile, whatever `non_blocking` says.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch

from fakes.cuda import watch
from fakes.cuda.streams import Streams

NONE, READ, READ_WRITE = 0, 1, 3
"""What `protect` leaves allowed."""

Kind = Literal["h2d", "d2h"]


@dataclass(slots=True, eq=False)
class Copy:
    """A copy in flight. Bytes `start` to `end` are its part of the pinned block at `block`.

    `content`: what the host side holds once the copy is done. `storage` keeps the block from being used again.
    """

    kind: Kind
    storage: torch.UntypedStorage
    block: int
    start: int
    end: int
    content: bytes
    where: watch.Line | None
    settled: bool = False
    """Reported, or followed by another copy of these bytes: nothing more is to be found out about it."""


class Copies:
    """The copies of one simulation; its methods are the extension's hooks.

    Args:
        streams: says what the host has waited for.
        protect: `protect(address, access)` of the extension, for the pinned block that holds an address.
        traps: takes the accesses that trapped since it was last asked, as (address, what was allowed, block id). The
            extension has opened their blocks.
    """

    def __init__(
        self,
        streams: Streams,
        protect: Callable[[int, int], object],
        traps: Callable[[], Iterable[tuple[int, int, int]]],
    ) -> None:
        self._streams = streams
        self._protect = protect
        self._traps = traps
        self._in_flight: dict[int, list[Copy]] = {}
        """By pinned block."""

    def copying(
        self, kind: Kind, host_side: torch.Tensor, device_side: torch.Tensor, non_blocking: bool, pinned: bool
    ) -> None:
        """The extension is about to copy between host and device."""
        if not (non_blocking and pinned and _is_direct(host_side, device_side)):
            self._streams.staged_copy(kind, non_blocking, pinned)
        elif self._in_flight:
            self._follow(kind, host_side)

    def copied(
        self, kind: Kind, host_side: torch.Tensor, device_side: torch.Tensor, non_blocking: bool, pinned: bool
    ) -> None:
        """The extension has copied between host and device."""
        if non_blocking and pinned and host_side.numel() and _is_direct(host_side, device_side):
            self._begin(kind, host_side)

    def _follow(self, kind: Kind, host_side: torch.Tensor) -> None:
        """A copy comes behind others of the same block on the device: what they bring is there for it.

        The copies that it overlaps are not looked at any further; in which order two streams take is not simulated.
        """
        block = host_side.untyped_storage().data_ptr()
        start, end = host_side.data_ptr(), host_side.data_ptr() + host_side.nbytes
        before = self._in_flight.get(block, ())
        if before:
            self._protect(block, READ_WRITE)
        for copy in before:
            if copy.kind == "h2d" == kind or end <= copy.start or copy.end <= start:
                continue
            if copy.kind == "d2h":
                ctypes.memmove(copy.start, copy.content, copy.end - copy.start)
                copy.content = b""
            copy.settled = True

    def _begin(self, kind: Kind, host_side: torch.Tensor) -> None:
        storage = host_side.untyped_storage()
        start = host_side.data_ptr()
        size = host_side.numel() * host_side.element_size()
        watched = watch.hazards_wanted()
        if kind == "h2d" and not watched:
            self._streams.enqueue()
            return
        copy = Copy(
            kind=kind,
            storage=storage,
            block=storage.data_ptr(),
            start=start,
            end=start + size,
            content=ctypes.string_at(start, size),
            where=watch.line() if watched else None,
        )
        if kind == "d2h":
            ctypes.memmove(start, _garbage(host_side.dtype, copy.content), size)
        self._in_flight.setdefault(copy.block, []).append(copy)
        self._streams.enqueue(lambda: self._finish(copy))
        self._shield(copy.block)

    def _finish(self, copy: Copy) -> None:
        """The host has waited for this copy."""
        self.report_trapped()
        others = self._in_flight[copy.block]
        others.remove(copy)
        if not others:
            del self._in_flight[copy.block]
        if copy.storage.data_ptr() != copy.block:
            return  # resized since: the pinned block is gone
        self._protect(copy.block, READ_WRITE)
        size = copy.end - copy.start
        if copy.kind == "d2h":
            ctypes.memmove(copy.start, copy.content, len(copy.content))
        elif not copy.settled and ctypes.string_at(copy.start, size) != copy.content:
            watch.hazard(
                "cuda.pinned-in-flight",
                "pinned memory",
                f"pinned memory changed while the copy to the device made at {copy.where} was in flight: wait for an "
                "event that is recorded after the copy before writing there again",
            )
        self._shield(copy.block)

    def _shield(self, block: int) -> None:
        """Protect a block as the copies in flight from and to it demand; those settled already do not."""
        kinds = {copy.kind for copy in self._in_flight.get(block, ()) if not copy.settled}
        if kinds:
            self._protect(block, NONE if "d2h" in kinds else READ)

    def report_trapped(self) -> None:
        """Report what trapped. The extension calls this in the middle of the access, on the line that makes it.

        The block stays open, or the access would trap again for ever.
        """
        for address, _, _ in self._traps():
            for copy in chain.from_iterable(list(self._in_flight.values())):
                if copy.start <= address < copy.end and not copy.settled:
                    copy.settled = True
                    self._report(copy)

    def _report(self, copy: Copy) -> None:
        if copy.kind == "h2d":
            watch.hazard(
                "cuda.pinned-in-flight",
                "pinned memory",
                f"{watch.line()} writes to pinned memory while the copy to the device made at {copy.where} is in "
                "flight: wait for an event that is recorded after the copy first",
            )
        else:
            watch.hazard(
                "cuda.early-read",
                "pinned memory",
                f"{watch.line()} uses the result of the copy to the host made at {copy.where} before it has arrived: "
                "wait for an event that is recorded after the copy first",
            )


def _is_direct(host_side: torch.Tensor, device_side: torch.Tensor) -> bool:
    """Whether torch copies from this very memory. What is strided goes through a pageable copy of it."""
    if host_side.shape != device_side.shape:
        return False
    if host_side.is_contiguous():
        return True
    same = host_side.dtype == device_side.dtype and host_side.stride() == device_side.stride()
    return same and torch.ops.aten.is_non_overlapping_and_dense(host_side)


def _garbage(dtype: torch.dtype, content: bytes) -> bytes:
    """What a destination holds before its copy has arrived: NaN, a negative number, the wrong truth."""
    if dtype is torch.bool:
        return bytes(1 - byte for byte in content)
    return (b"\xff" if dtype.is_floating_point or dtype.is_complex else b"\xa5") * len(content)
