"""Where an exception was raised: the last line of the backend's own, and the line of ours below it that broke."""

from __future__ import annotations

import dis
import sys
from pathlib import PurePath
from types import TracebackType

from backends.libraries import DISTRIBUTIONS

_OURS = frozenset({"fakes", "cases", "reference"})
_ENGINE = frozenset(
    f"conformance.{name}"
    for name in ("engine", "execution", "graphs", "graphs_run", "kernel", "machine", "pool")
)
"""Modules that call a backend, or that it calls."""
_BELOW = sys.stdlib_module_names | _OURS | DISTRIBUTIONS.keys() | {"numpy", "torch", "triton"}
"""Packages that backends call; they have no files of their own there."""
_PASSED_ON = ("fakes.cuda", "conformance")
"""Modules that hand over to torch what they are given: what fails in there is the backend's doing."""


def whereabouts(error: BaseException) -> str:
    """In words, with files by name alone; empty where no line of the backend's was reached.

    A line of ours is named where the exception shows a fault of the harness: nothing there raised it on purpose.
    """
    own, below = "", list[TracebackType]()
    trace = error.__traceback__
    while trace is not None:
        if _is_own(trace):
            own, below = _line(trace), []
        else:
            below.append(trace)
        trace = trace.tb_next
    if not own:
        return ""
    broken = _broken(below)
    return own if broken is None else f"{own}, inside {_module_line(broken)}"


def _is_own(trace: TracebackType) -> bool:
    name, file = _module(trace), trace.tb_frame.f_code.co_filename
    return name not in _ENGINE and name.partition(".")[0] not in _BELOW and not file.startswith("<")


def _broken(below: list[TracebackType]) -> TracebackType | None:
    """The innermost line of ours, unless it raises by itself or only passes on what torch raises."""
    if below and _is_ours(below[-1]) and _operation(below[-1]) == "RAISE_VARARGS":
        return None
    for trace in reversed(below):
        passed_on = _module(trace).startswith(_PASSED_ON) and (
            trace is not below[-1] or _operation(trace).startswith("CALL")
        )
        if _is_ours(trace) and not passed_on:
            return trace
    return None


def _is_ours(trace: TracebackType) -> bool:
    name = _module(trace)
    return name in _ENGINE or name.partition(".")[0] in _OURS


def _operation(trace: TracebackType) -> str:
    return dis.opname[trace.tb_frame.f_code.co_code[trace.tb_lasti]]


def _module(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__", ""))


def _line(trace: TracebackType) -> str:
    code = trace.tb_frame.f_code
    return f"at {PurePath(code.co_filename).name}:{trace.tb_lineno} in {code.co_name}"


def _module_line(trace: TracebackType) -> str:
    package = _module(trace).split(".")
    file = PurePath(trace.tb_frame.f_code.co_filename).name
    folder = package if file == "__init__.py" else package[:-1]
    return f"{'/'.join([*folder, file])}:{trace.tb_lineno}"
