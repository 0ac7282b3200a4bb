"""The rules of a session: who may come, go, borrow and step back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cases.model import AnyRequest, Case, Step


def check_session(case: Case) -> None:
    """Go through the steps of a session.

    Raises:
        ValueError: the first rule that is broken, in one sentence.
    """
    if case.level != "engine":
        raise ValueError(f"a session is a case of level engine, level is {case.level}")
    live = _Live(case.page_size)
    for index, step in enumerate(case.steps):
        live.leave(index, step)
        live.compute(index, step)


class _Live:
    """The requests that are there: `lengths` in tokens, `shared`: leading tokens that others hold, too."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.lengths: dict[int, int] = {}
        self.shared: dict[int, int] = {}

    def leave(self, index: int, step: Step) -> None:
        computed = {r.uid for r in step.requests}
        for uid in step.finished:
            if uid not in self.lengths:
                raise ValueError(f"step {index}: finished names uid {uid}, which is not there")
            if uid in computed:
                raise ValueError(f"step {index}: uid {uid} has finished and is computed")
            del self.lengths[uid], self.shared[uid]

    def compute(self, index: int, step: Step) -> None:
        stored = self.lengths | {r.uid: r.stored_len for r in step.requests}
        borrowers = {r.uid for r in step.requests if r.prefix_of is not None}
        for r in step.requests:
            where = f"step {index}, uid {r.uid}"
            if r.uid in self.lengths:
                self._stays(where, r)
            else:
                self._comes(where, r, stored, borrowers)
        self.lengths |= {r.uid: r.kv_len for r in step.requests}

    def _stays(self, where: str, r: AnyRequest) -> None:
        if r.prefix_of is not None:
            raise ValueError(f"{where}: prefix_of belongs to the step that admits a request of a session")
        if r.stored_len > self.lengths[r.uid]:
            raise ValueError(
                f"{where}: cached_len {r.stored_len} is more than the {self.lengths[r.uid]} tokens it had before"
            )
        if r.stored_len < self.shared[r.uid]:
            raise ValueError(
                f"{where}: cached_len {r.stored_len} steps back into the {self.shared[r.uid]} tokens that it shares"
            )

    def _comes(self, where: str, r: AnyRequest, stored: dict[int, int], borrowers: set[int]) -> None:
        self.shared[r.uid] = max(self.shared.get(r.uid, 0), r.prefix_len)
        if r.prefix_of is None:
            if r.prefix_len:
                raise ValueError(f"{where}: prefix_len without prefix_of")
            return
        lender = r.prefix_of
        if lender not in stored or lender == r.uid:
            raise ValueError(f"{where}: prefix_of {lender} is no other request that is there")
        if lender in borrowers:
            raise ValueError(f"{where}: prefix_of {lender} borrows itself in this step; name the owner")
        if r.prefix_len % self.page_size or not r.prefix_len:
            raise ValueError(
                f"{where}: prefix_len {r.prefix_len} is no positive multiple of page_size {self.page_size}"
            )
        if r.prefix_len > min(r.stored_len, stored[lender]):
            raise ValueError(f"{where}: prefix_len {r.prefix_len} exceeds what both requests have stored")
        self.shared[lender] = max(self.shared.get(lender, 0), r.prefix_len)
