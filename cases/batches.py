"""Batches from bare lengths, for named cases."""

from __future__ import annotations

from collections.abc import Iterable

from cases.model import KernelRequest, Kind, Request, Step


def step(kind: Kind, lengths: Iterable[tuple[int, int]], first_uid: int = 0) -> Step:
    """A batch from (cached_len, extend_len) pairs."""
    requests = tuple(Request(cached, extend, first_uid + i) for i, (cached, extend) in enumerate(lengths))
    return Step(requests, "decode" if kind == "decode" else "prefill", kind)


def decode(*kv_lens: int, first_uid: int = 0) -> Step:
    return step("decode", [(n - 1, 1) for n in kv_lens], first_uid)


def kernel(*lengths: tuple[int, int], decode: bool = False) -> Step:
    """A batch from (qo_len, kv_len) pairs."""
    requests = tuple(KernelRequest(qo, kv, i) for i, (qo, kv) in enumerate(lengths))
    return Step(requests, "decode" if decode else "prefill", "decode" if decode else "prefill")


def shared(kind: Kind, prefix_len: int, lengths: Iterable[tuple[int, int]]) -> Step:
    """A batch in which every request borrows the first one's leading pages."""
    requests = tuple(
        Request(cached, extend, i, 0 if i else None, prefix_len if i else 0)
        for i, (cached, extend) in enumerate(lengths)
    )
    return Step(requests, "decode" if kind == "decode" else "prefill", kind)


def growing(kv_len: int, tokens: int) -> tuple[Step, ...]:
    """One request: its prompt, then one decoded token a step."""
    return (step("prefill", [(0, kv_len)]), *(decode(kv_len + i) for i in range(1, tokens + 1)))
