"""How a fake ends what the real library would leave undefined."""

from __future__ import annotations


class UndefinedRead(RuntimeError):  # noqa: N818 - an outcome, not an error of ours
    """The library would read memory that belongs to nobody we know: its answer depends on luck."""


class WouldCrash(RuntimeError):  # noqa: N818 - the same
    """The library's process would die of a signal, which the message names."""


class WouldHang(WouldCrash):
    """A kernel would run for minutes, and whoever waits for it would give up."""


FAR = 4 << 30
"""Bytes from a tensor to where no memory is taken to be: a read 8 GB away crashed when it was measured, reads within
2 MB found other tensors. What lies between depends on what else the process holds."""


def outside(distance: int, why: str) -> RuntimeError:
    """What comes of a read so many bytes away from a tensor: something foreign, or a crash."""
    if distance > FAR:
        return illegal_access(why)
    return UndefinedRead(f"illegal memory access, or foreign numbers: {why}")


def illegal_access(why: str) -> RuntimeError:
    """What CUDA reports, later and elsewhere, once a kernel has left its memory; `why` says what left it."""
    return RuntimeError(f"CUDA error: an illegal memory access was encountered ({why})")
