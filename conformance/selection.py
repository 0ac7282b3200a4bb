"""Which cases a run asks: the smallest ones first, then the corpus and the named edges, then random ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis.strategies import SearchStrategy

import cases
from backends.contract import Capabilities
from cases.codec import load
from cases.edges import EDGES
from cases.model import Case, Heads, KernelRequest, Level, Request, Step
from cases.sessions import session_cases
from cases.strategies import engine_cases, kernel_cases
from conformance.wanted import wanted_by_any

CORPUS = Path(cases.__file__).parent / "corpus"


def smoke_cases(capabilities: Capabilities) -> list[Case]:
    """One request of one token in one page, in every phase that a backend takes, as simple as it allows."""
    c = capabilities
    qk, vo = min(c.head_dims) if c.head_dims else (64, 64)
    common: dict[str, Any] = {
        "level": c.level,
        "heads": Heads(min(c.group_sizes) if c.group_sizes else 1, 1, qk, vo),
        "dtype": "float16" if "float16" in c.dtypes else min(c.dtypes),
        "page_size": min(c.page_sizes) if c.page_sizes else 1,
        "layout": "NHD" if "NHD" in c.layouts else "HND",
    }
    if c.level == "kernel":
        return [Case((Step((KernelRequest(),)),), num_layers=1, **common)]
    steps = {"prefill": Step((Request(),)), "decode": Step((Request(),), phase="decode", kind="decode")}
    return [Case((step,), **common) for phase, step in steps.items() if phase in c.phases]


@cache
def named_cases(level: Level) -> tuple[Case, ...]:
    """The corpus, by file name, and the named edges of one level.

    Raises:
        CaseError: a corpus file that cannot be read.
    """
    corpus = [load(path).case for path in sorted(CORPUS.glob("*.json"))]
    edges = [case for case, _ in EDGES.values()]
    return tuple(case for case in [*corpus, *edges] if case.level == level)


def cases_for(asked: Sequence[Capabilities]) -> SearchStrategy[Case]:
    """Random cases for backends of one level: all that any of them declares."""
    wanted = wanted_by_any(asked)
    return engine_cases(wanted) if wanted.level == "engine" else kernel_cases(wanted)


def sessions_for(asked: Sequence[Capabilities]) -> SearchStrategy[Case]:
    """Random sessions for engine-level backends: all that any of them declares."""
    return session_cases(wanted_by_any(asked))


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Cases in order, each once."""
    return list(dict.fromkeys(cases))
