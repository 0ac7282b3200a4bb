"""What may be left out of a session so that the rest of it still hangs together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cases.drafts import Changes, Draft
from cases.model import AnyRequest, Case, Request


def session_changes(_: Case, drafts: Sequence[Draft]) -> Changes:
    """Fewer steps, then fewer requests in all or in one of them, then fewer tokens, then nobody leaves early.

    What a request does not compute any more is missing from its later steps, too.
    """
    count = len(drafts)
    for end in dict.fromkeys((1, count // 2, count - 1)):
        if 0 < end < count:
            yield drafts[:end], {}
            yield drafts[count - end :], {}
    for i in range(count if count > 1 else 0):
        yield _without(drafts, i, [r.uid for r in drafts[i].requests]), {}
    if any(len(draft.requests) > 1 for draft in drafts):
        for which in (0, -1):
            changed = drafts
            for i, draft in enumerate(drafts):
                kept = draft.requests[which].uid
                changed = _without(changed, i, [r.uid for r in draft.requests if r.uid != kept])
            yield changed, {}
    for i, draft in enumerate(drafts):
        for r in draft.requests if len(draft.requests) > 1 else ():
            yield _without(drafts, i, [r.uid]), {}
    for i, draft in enumerate(drafts):
        for r in draft.requests:
            for shorter in _shorter(r):
                yield _changed(drafts, i, shorter, r.kv_len - shorter.kv_len), {}
    for i, draft in enumerate(drafts):
        for uid in draft.finished:
            kept = [other for other in draft.finished if other != uid]
            yield [*drafts[:i], draft._replace(finished=kept), *drafts[i + 1 :]], {}


def consistent(drafts: Sequence[Draft]) -> list[Draft]:
    """The same without steps that compute nothing, and without leaving and lending of requests that are not there."""
    live: set[int] = set()
    found: list[Draft] = []
    leaving: list[int] = []
    for draft in drafts:
        leaving += draft.finished
        if not draft.requests:
            continue
        uids = {r.uid for r in draft.requests}
        finished = [uid for uid in dict.fromkeys(leaving) if uid in live and uid not in uids]
        leaving = []
        live -= set(finished)
        requests = [
            replace(r, prefix_of=None, prefix_len=0) if r.prefix_of not in live | uids | {None} else r
            for r in draft.requests
        ]
        live |= uids
        found.append(draft._replace(requests=requests, finished=finished))
    return found


def _without(drafts: Sequence[Draft], at: int, uids: Sequence[int]) -> list[Draft]:
    """Some requests do not compute in one step."""
    changed = list(drafts)
    for uid in uids:
        before = _length_before(changed, at, uid)
        r = next(r for r in changed[at].requests if r.uid == uid)
        if before is not None:
            changed = later(changed, at, uid, r.kv_len - before)
    changed[at] = changed[at]._replace(requests=[r for r in changed[at].requests if r.uid not in uids])
    return changed


def _changed(drafts: Sequence[Draft], at: int, request: AnyRequest, fewer: int) -> list[Draft]:
    changed = later(drafts, at, request.uid, fewer)
    requests = [request if r.uid == request.uid else r for r in changed[at].requests]
    changed[at] = changed[at]._replace(requests=requests)
    return changed


def later(drafts: Sequence[Draft], at: int, uid: int, fewer: int) -> list[Draft]:
    """After step `at` a request has `fewer` tokens (below 0: more), as long as it stays."""
    drafts = list(drafts)
    for i in range(at + 1, len(drafts)):
        if uid in drafts[i].finished:
            break
        requests = [
            replace(r, cached_len=max(r.stored_len - fewer, r.prefix_len))
            if isinstance(r, Request) and r.uid == uid
            else r
            for r in drafts[i].requests
        ]
        drafts[i] = drafts[i]._replace(requests=requests)
    return drafts


def _length_before(drafts: Sequence[Draft], at: int, uid: int) -> int | None:
    """Tokens that a request has before a step; None: it is not there."""
    for draft in reversed(drafts[:at]):
        for r in draft.requests:
            if r.uid == uid:
                return r.kv_len
        if uid in draft.finished:
            return None
    return None


def _shorter(r: AnyRequest) -> Iterator[Request]:
    if not isinstance(r, Request):
        return
    for extend_len in dict.fromkeys((1, r.extend_len // 2, r.extend_len - 1)):
        if 0 < extend_len < r.extend_len:
            yield replace(r, extend_len=extend_len)
    own = r.cached_len - r.prefix_len
    for cut in dict.fromkeys((own, own // 2, 1)):
        if 0 < cut <= own:
            yield replace(r, cached_len=r.cached_len - cut)
