"""What a user may choose at every door: backends, checks, a trace; and what can be wrong about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from backends.libraries import LibraryError
from backends.registry import BackendError, BackendSpec, names
from cases.codec import digest, short
from cases.errors import CaseError
from cases.model import Case
from cases.traces import batches, describe, read_trace
from conformance.checks import CHECKS
from conformance.errors import UsageError
from conformance.report import ReportError
from conformance.shadow import ShadowError, require_free_name
from fakes.cuda import DeviceUnavailable

HYBRIDS = ("fa,fi", "fi,fa")
"""Hybrids (prefill,decode) that are asked beside the built-in backends."""
DEFAULT_BATCHES = 1000
_KV_BUDGET = 1920


WRONG_USAGE = (UsageError, BackendError, LibraryError, CaseError, ReportError, ShadowError, DeviceUnavailable)
"""Mistakes of the user's: told in one sentence, never with a traceback."""


def chosen_backends(named: Sequence[str]) -> list[str]:
    """The backends that are named, or all built-in and announced ones and two hybrids.

    Raises:
        ShadowError: a name leads to a folder which our packages hide.
    """
    for name in named:
        require_free_name(name)
    return list(dict.fromkeys(named)) or [*names(), *HYBRIDS]


def require_checks(named: Sequence[str]) -> None:
    """Make sure that every name is a check.

    Raises:
        UsageError: one is not.
    """
    for name in named:
        if name not in CHECKS:
            near = difflib.get_close_matches(name, CHECKS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"unknown check {name!r}{hint} (known: {', '.join(CHECKS)})")


def require_level(cases: Iterable[Case], specs: Iterable[BackendSpec]) -> None:
    """Make sure that each case is of the level of some backend: the others are not asked it.

    Raises:
        UsageError: one is of another level than all of them.
    """
    levels = {spec.level for spec in specs}
    for case in cases:
        if case.level not in levels:
            raise UsageError(
                f"case {short(digest(case))} is of level {case.level}, and every backend that is asked is of level "
                f"{' or '.join(sorted(levels))}"
            )


@dataclass(frozen=True)
class TraceBatches:
    """Batches of a request trace; `lines` say what they are."""

    lines: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()


def trace_batches(
    path: str,
    *,
    page_size: int | None = None,
    count: int | None = None,
    limit: int | None = None,
    seed: int = 0,
) -> TraceBatches:
    """The first `count` batches of a trace, whose longest requests are scaled to `limit` tokens (256).

    Raises:
        CaseError: no such file, or no trace.
        UsageError: limits that leave no room for a request.
    """
    trace = read_trace(path)
    page_size, limit = page_size or 16, limit or 256
    try:
        served = batches(
            trace, page_size=page_size, token_limit=limit, kv_budget=max(_KV_BUDGET, limit), seed=seed
        )
        cases = tuple(islice(served, count or DEFAULT_BATCHES))
    except CaseError:
        raise
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    head = f"{path}: {trace.format}, {len(trace.rows)} requests, scaled to at most {limit} tokens each"
    return TraceBatches((head, *describe(cases).splitlines()), cases)
