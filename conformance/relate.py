"""Other ways to ask the same: cases whose rows must get the same answers as rows of a given case.

A relation returns `Related`, or None where it does not apply. Rows keep their q, k and v (they are lent by the original
case), so the original's answers are theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from backends.contract import Capabilities
from cases.model import Case, Placement, Request, Step
from cases.tensors import CaseTensors, materialise, tokens_of
from conformance.question import Question


@dataclass(frozen=True, slots=True)
class Related:
    """`rows[step]`: for each row of the related case's step, the row of the original's only step. `same_bits`: whether
    a backend that declares `bit_equal` promises the very bits here."""

    name: str
    case: Case
    tensors: CaseTensors
    rows: tuple[np.ndarray, ...]
    same_bits: bool = False


Relation = Callable[[Question, Capabilities], Related | None]


def permuted(question: Question, capabilities: Capabilities) -> Related | None:
    """The requests in reverse order."""
    del capabilities
    (step,) = question.case.steps
    if len(step.requests) < 2:
        return None
    order = list(range(len(step.requests)))[::-1]
    return replace(_same_requests("permuted requests", question, order), same_bits=True)


def alone(question: Question, capabilities: Capabilities) -> Related | None:
    """The last request that shares no pages, without its batch mates."""
    del capabilities
    (step,) = question.case.steps
    own = [i for i, r in enumerate(step.requests) if r.prefix_of is None]
    if len(step.requests) < 2 or not own:
        return None
    return replace(_same_requests("a request without its batch mates", question, [own[-1]]), same_bits=True)


_NEXT_PLACE: dict[Placement, Placement] = {
    "sequential": "scattered",
    "scattered": "reversed",
    "reversed": "sequential",
}


def relocated(question: Question, capabilities: Capabilities) -> Related | None:
    """Other pages and other page-table rows."""
    del capabilities
    case = replace(
        question.case,
        placement=_NEXT_PLACE[question.case.placement],
        spare_pages=question.case.spare_pages + 1,
    )
    return replace(_lend("relocated pages", question, case), same_bits=True)


def other_page_size(question: Question, capabilities: Capabilities) -> Related | None:
    """Another page size that the backend takes and that divides every shared prefix."""
    case = question.case
    (step,) = case.steps
    for size in (1, 2, 4, 16, 64):
        fits = capabilities.page_sizes is None or size in capabilities.page_sizes
        if size != case.page_size and fits and all(r.prefix_len % size == 0 for r in step.requests):
            return _lend(f"page size {size}", question, replace(case, page_size=size, spare_pages=2))
    return None


def other_layout(question: Question, capabilities: Capabilities) -> Related | None:
    """The other layout of the KV cache."""
    layout = "HND" if question.case.layout == "NHD" else "NHD"
    if layout not in capabilities.layouts:
        return None
    return _lend(f"layout {layout}", question, replace(question.case, layout=layout))


def chunked(question: Question, capabilities: Capabilities) -> Related | None:
    """Prefill in two chunks instead of one."""
    case = question.case
    (step,) = case.steps
    if case.level != "engine" or "prefill" not in capabilities.phases:
        return None
    requests = [r for r in step.requests if isinstance(r, Request)]
    cut = [r.extend_len // 2 for r in requests]
    if not any(cut) or any(r.prefix_of is not None for r in requests) or not case.mask.causal:
        return None
    first = [replace(r, extend_len=c) for r, c in zip(requests, cut, strict=True) if c]
    rest = [
        replace(r, cached_len=r.cached_len + c, extend_len=r.extend_len - c)
        for r, c in zip(requests, cut, strict=True)
    ]
    steps = (
        Step(requests=tuple(first), phase="prefill", kind="chunked"),
        Step(requests=tuple(rest), phase="prefill", kind="chunked"),
    )
    starts = np.concatenate(([0], np.cumsum(step.qo_lens)))
    rows = (
        _spans([(starts[i], starts[i] + c) for i, c in enumerate(cut) if c]),
        _spans([(starts[i] + c, starts[i + 1]) for i, c in enumerate(cut)]),
    )
    return _lend("prefill in two chunks", question, replace(case, steps=steps), rows)


def cached(question: Question, capabilities: Capabilities) -> Related | None:
    """All but the last new token of each request already in the cache."""
    case = question.case
    (step,) = case.steps
    if case.level != "engine" or not case.mask.causal or "prefill" not in capabilities.phases:
        return None
    if all(r.qo_len == 1 for r in step.requests):
        return None
    requests = tuple(replace(r, cached_len=r.kv_len - 1, extend_len=1) for r in step.requests)
    ends = np.cumsum(step.qo_lens) - 1
    steps = (Step(requests=requests, phase="prefill", kind="prefill"),)
    return _lend("a prefix hit instead of a prefill", question, replace(case, steps=steps), (ends,))


RELATIONS: tuple[Relation, ...] = (
    permuted,
    alone,
    relocated,
    other_page_size,
    other_layout,
    chunked,
    cached,
)


def _spans(spans: list[tuple[int, int]]) -> np.ndarray:
    return np.concatenate([np.arange(a, b) for a, b in spans])


def _same_requests(name: str, question: Question, order: list[int]) -> Related:
    (step,) = question.case.steps
    starts = np.concatenate(([0], np.cumsum(step.qo_lens)))
    requests = tuple(step.requests[i] for i in order)
    rows = _spans([(starts[i], starts[i + 1]) for i in order])
    case = replace(question.case, steps=(replace(step, requests=requests),))
    return _lend(name, question, case, (rows,))


def _lend(name: str, question: Question, case: Case, rows: tuple[np.ndarray, ...] | None = None) -> Related:
    """Tensors of a related case whose rows have the q, and whose tokens the k and v, of the original."""
    original = question.step(0)
    if rows is None:
        rows = tuple(np.arange(step.num_rows) for step in case.steps)
    built = materialise(case)
    at = {token: i for i, token in enumerate(original.tokens.pairs())}
    steps = tuple(
        replace(
            step,
            q=original.q[:, torch.as_tensor(kept)],
            **_keys(original.k_all, original.v_all, [at[token] for token in step.tokens.pairs()]),
        )
        for step, kept in zip(built.steps, rows, strict=True)
    )
    return Related(name, case, replace(built, steps=steps), rows)


def _keys(k: torch.Tensor, v: torch.Tensor, tokens: list[int]) -> dict[str, torch.Tensor]:
    take = np.array(tokens, dtype=np.int64)
    return {"k_all": tokens_of(k, take), "v_all": tokens_of(v, take)}
