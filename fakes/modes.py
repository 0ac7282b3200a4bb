"""How a fake ends what the real library would leave undefined."""

from __future__ import annotations


class UndefinedRead(RuntimeError):  # noqa: N818 - an outcome, not an error of ours
    """The library would read memory that belongs to nobody we know: its answer depends on luck."""


class WouldCrash(RuntimeError):  # noqa: N818 - the same
    """The library's process would die of a signal, which the message names."""


def illegal_access(why: str) -> RuntimeError:
    """What CUDA reports, later and elsewhere, once a kernel has left its memory; `why` says what left it."""
    return RuntimeError(f"CUDA error: an illegal memory access was encountered ({why})")
