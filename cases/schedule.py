"""A session in the making: a small engine's scheduler, whose calls are the steps of a session."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from cases.model import AnyRequest, Kind, Phase, Request, Step

_BOTH: frozenset[Phase] = frozenset({"prefill", "decode"})


class Schedule:
    """Requests that are live, and the steps so far. Every call leaves a valid session.

    `max_live` requests are live at most, with `token_limit` tokens in all; whoever came first leaves where one more
    would not fit. A backend without one of the `phases` is asked for the other one.

    `live`: tokens of each live request by uid, in order of arrival. `gone`: the same of those that left.
    """

    def __init__(
        self,
        *,
        page_size: int,
        token_limit: int = 64,
        max_live: int = 6,
        phases: Collection[Phase] = _BOTH,
    ) -> None:
        self.page_size, self.token_limit, self.max_live = page_size, token_limit, max_live
        self.phases = phases
        self.live: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        self.steps: list[Step] = []
        self._shared: dict[int, int] = {}
        self._finished: list[int] = []
        self._uids = 0

    def decode(self, uids: Iterable[int] | None = None) -> None:
        """These requests, or all, compute one token."""
        chosen = list(self.live) if uids is None else list(uids)
        if not chosen:
            self.admit(1)
            return
        self._add("decode", self._grown(chosen, 1))

    def admit(self, kv_len: int, cached_len: int = 0, *, mixed: bool = False) -> None:
        """A new request of `kv_len` tokens, `cached_len` of them from elsewhere.

        `mixed`: all others decode in the same batch; else they wait.
        """
        mates = self._beside(kv_len, mixed=mixed)
        kv_len = min(kv_len, self.token_limit - self._tokens(mates))
        cached_len = min(cached_len, kv_len - 1)
        self._join(Request(cached_len, kv_len - cached_len, self._new_uid()), mates)

    def hit(self, lender: int, new: int, pages: int | None = None, *, mixed: bool = False) -> None:
        """A new request computes `new` tokens behind a prefix in the pages of a live one: all its full pages, or some.

        Without a full page, or with no room for it, the request computes all of its tokens.
        """
        whole = self.live.get(lender, 0) // self.page_size
        prefix = (whole if pages is None else min(whole, pages)) * self.page_size
        mates = self._beside(prefix + new, mixed=mixed, kept=lender)
        room = self.token_limit - self._tokens(mates)
        if lender not in self.live or not prefix or room <= prefix:
            self._join(Request(0, min(prefix + new, room), self._new_uid()), mates)
            return
        new = min(new, room - prefix)
        self._shared_at_least(lender, prefix)
        request = Request(prefix, new, self._new_uid(), lender, prefix)
        self._shared[request.uid] = prefix
        self._join(request, mates)

    def extend(self, uids: Iterable[int], new: int) -> None:
        """These requests compute `new` tokens more: the next chunk of their prompts."""
        if new == 1 or "prefill" not in self.phases:
            self.decode(uids)
        else:
            self._add("chunked", self._grown(list(uids), new))

    def verify(self, drafts: int) -> None:
        """All requests compute their last token anew and `drafts - 1` behind it; who cannot step back waits."""
        chosen = [uid for uid, kv_len in self.live.items() if kv_len > max(self._shared.get(uid, 0), 1)]
        if chosen and "prefill" in self.phases:
            self._add("verify", self._grown(chosen, drafts, back=1))
        else:
            self.decode()

    def finish(self, uid: int) -> None:
        """A request leaves before the next step."""
        self.gone[uid] = self.live.pop(uid)
        self._shared.pop(uid, None)
        self._finished.append(uid)

    def resume(self, uid: int) -> None:
        """A request that left comes back with the tokens it had, and decodes with the others."""
        if uid not in self.gone or uid in self.live or uid in self._finished:
            self.decode()
            return
        mates = self._beside(self.gone[uid] + 1, mixed=True)
        cached_len = min(self.gone[uid], self.token_limit - self._tokens(mates) - 1)
        self._join(Request(cached_len, 1, uid), mates)

    def _new_uid(self) -> int:
        self._uids += 1
        return self._uids - 1

    def _tokens(self, mates: Iterable[AnyRequest] = ()) -> int:
        return sum((self.live | {r.uid: r.kv_len for r in mates}).values())

    def _beside(self, kv_len: int, *, mixed: bool, kept: int | None = None) -> list[AnyRequest]:
        """Make room for a request; the batch mates that decode beside it."""
        kv_len = min(kv_len, self.token_limit)
        more = len(self.live) if mixed else 0
        while self.live and (
            len(self.live) >= self.max_live or self._tokens() + more + kv_len > self.token_limit
        ):
            leaves = [uid for uid in self.live if uid != kept] or [*self.live]
            self.finish(leaves[0])
            more = len(self.live) if mixed else 0
        return self._requests(self.live, 1) if mixed else []

    def _shared_at_least(self, uid: int, tokens: int) -> None:
        self._shared[uid] = max(self._shared.get(uid, 0), tokens)

    def _grown(self, uids: list[int], new: int, back: int = 0) -> list[AnyRequest]:
        while len(self.live) > 1 and self._tokens() + len(uids) * (new - back) > self.token_limit:
            first = next(iter(self.live))
            self.finish(first)
            uids = [uid for uid in uids if uid != first]
        if (
            uids and self._tokens() + len(uids) * (new - back) > self.token_limit
        ):  # one alone, as long as may be
            self.finish(uids.pop())
        return self._requests(uids, new, back) or [Request(0, 1, self._new_uid())]

    def _requests(self, uids: Iterable[int], new: int, back: int = 0) -> list[AnyRequest]:
        return [Request(self.live[uid] - back, new, uid) for uid in uids]

    def _join(self, request: Request, mates: list[AnyRequest]) -> None:
        if "prefill" not in self.phases:
            request = replace(request, cached_len=request.kv_len - 1, extend_len=1)
        kind: Kind = "mixed" if mates else "prefill"
        self._add(kind, [*mates, request])

    def _add(self, kind: Kind, requests: list[AnyRequest]) -> None:
        ones = all(r.qo_len == 1 for r in requests)
        if ones and ("prefill" not in self.phases or (kind == "mixed" and "decode" in self.phases)):
            kind = "decode"
        elif kind == "decode" and "decode" not in self.phases:
            kind = "prefill"
        phase: Phase = "decode" if kind == "decode" else "prefill"
        self.steps.append(Step(tuple(requests), phase, kind, tuple(self._finished)))
        self._finished.clear()
        self.live |= {r.uid: r.kv_len for r in requests}
