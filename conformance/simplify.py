"""Makes a failing case simpler by hand: steps and requests left out, lengths cut, settings put back to their defaults.

Hypothesis shrinks what it drew itself; this takes any case (from a corpus, a trace, a user), and goes on where
hypothesis would have to change two things at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from cases.model import AnyRequest, Case, Heads, KernelRequest, Mask, Step

MAX_TRIES = 400


def simplify(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The simplest case on a path of single steps downhill on which `fails` holds; `case` itself fails."""
    tries = 0
    tried = {case}
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(case):
            if simpler in tried:
                continue
            tried.add(simpler)
            tries += 1
            if tries > MAX_TRIES:
                return case
            if fails(simpler):
                case, progress = simpler, True
                break
    return case


def _simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the largest leaps first."""
    if len(case.steps) > 1:
        yield from _cases(case, [{"steps": (step,)} for step in case.steps])
        yield from _cases(
            case, [{"steps": case.steps[:i] + case.steps[i + 1 :]} for i in range(len(case.steps))]
        )
    for index, step in enumerate(case.steps):
        yield from _with_steps(case, index, _fewer_requests(step))
    yield from _cases(case, _plainer(case))
    for index, step in enumerate(case.steps):
        yield from _with_steps(case, index, _shorter(step, case.page_size))


def _cases(case: Case, changes: list[dict[str, Any]]) -> Iterator[Case]:
    for change in changes:
        try:
            changed = replace(case, **change)
        except ValidationError:  # does not go with the rest of the case
            continue
        if changed != case:
            yield changed


def _with_steps(case: Case, index: int, steps: Iterator[dict[str, Any]]) -> Iterator[Case]:
    for change in steps:
        try:
            step = replace(case.steps[index], **change)
        except ValidationError:
            continue
        yield from _cases(case, [{"steps": (*case.steps[:index], step, *case.steps[index + 1 :])}])


def _fewer_requests(step: Step) -> Iterator[dict[str, Any]]:
    requests = step.requests
    if len(requests) > 1:
        for half in (requests[: len(requests) // 2], requests[len(requests) // 2 :]):
            yield {"requests": tuple(map(_alone, half))}
        for gone in requests:
            kept = (r for r in requests if r is not gone)
            yield {"requests": tuple(_alone(r) if r.prefix_of == gone.uid else r for r in kept)}
    yield {"requests": tuple(map(_alone, requests))}
    uids = {r.uid: uid for uid, r in enumerate(requests)}
    yield {
        "requests": tuple(
            replace(r, uid=uids[r.uid], prefix_of=None if r.prefix_of is None else uids[r.prefix_of])
            for r in requests
        )
    }


def _alone(request: AnyRequest) -> AnyRequest:
    return replace(request, prefix_of=None, prefix_len=0)


def _plainer(case: Case) -> list[dict[str, Any]]:
    heads = case.heads
    plain: list[dict[str, Any]] = [
        {"kv_dtype": None, "k_scale": 1.0, "v_scale": 1.0},
        {"mask": Mask()},
        {"mask": replace(case.mask, window=None)},
        {"mask": replace(case.mask, soft_cap=None)},
        *({name: value} for name, value in _DEFAULTS.items()),
        {"heads": Heads(head_dim_qk=heads.head_dim_qk, head_dim_vo=heads.head_dim_vo)},
        {"heads": Heads(heads.group_size, 1, heads.head_dim_qk, heads.head_dim_vo)},
        {"heads": replace(heads, head_dim_qk=64, head_dim_vo=64)},
        *(
            {"page_size": size}
            for size in (1, 2, case.page_size // 2, case.page_size - 1)
            if 0 < size < case.page_size
        ),
    ]
    return plain


_DEFAULTS: dict[str, Any] = {
    "max_seq_len": None,
    "placement": "sequential",
    "layout": "NHD",
    "strided": False,
    "sm_scale": None,
    "values": "needles",
    "dtype": "float16",
    "spare_pages": 2,
    "seed": 0,
}


def _shorter(step: Step, page_size: int) -> Iterator[dict[str, Any]]:
    for index, r in enumerate(step.requests):
        names = ("kv_len", "qo_len") if isinstance(r, KernelRequest) else ("cached_len", "extend_len")
        for name in ("prefix_len", *names):
            length = getattr(r, name)
            for less in dict.fromkeys(
                (page_size,) if name == "prefix_len" else (0, 1, length // 2, length - 1)
            ):
                if not 0 <= less < length:
                    continue
                try:
                    shorter = replace(r, **{name: less})
                except ValidationError:
                    continue
                yield {"requests": (*step.requests[:index], shorter, *step.requests[index + 1 :])}
