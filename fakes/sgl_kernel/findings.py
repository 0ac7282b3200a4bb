"""Strict mode's findings of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from fakes import recorder


def find(
    rule: str,
    argument: str,
    message: str,
    request: int | None = None,
    kind: Literal["arrays", "order"] = "arrays",
) -> None:
    """Record a finding under `sgl_kernel.<rule>` once per batch; later layers would only repeat it."""
    record = recorder.current()
    if record is None or not record.strict:
        return
    rule = f"sgl_kernel.{rule}"
    for known in reversed(record.findings):
        if known.rule == rule and known.message == message and known.request == request:
            return
    record.find(rule, kind, argument, message, request)


def strict() -> bool:
    """Whether findings are wanted: checks that cost time ask first."""
    record = recorder.current()
    return record is not None and record.strict


def ignored(argument: str, why: str, given: bool | Callable[[], bool]) -> None:
    """Record an argument that the library takes and never reads."""
    if strict() and (given if isinstance(given, bool) else given()):
        find("ignored_argument", argument, f"{argument} is ignored: {why}")
