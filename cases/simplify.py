"""Making a failing case smaller by its record: fewer steps, requests and tokens, plainer settings.

Works on any case, whether drawn, read from a file or taken from a trace, and goes where shrinking by bytes
gets stuck: it drops an early step while a later one fails, and shrinks page and lengths together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from cases.codec import to_json
from cases.drafts import Changes, Draft
from cases.model import MAX_SPARE_PAGES, AnyRequest, Case, Heads, KernelRequest, Mask, Request, Step
from cases.placement import pages_for
from cases.session_changes import consistent, later, session_changes

_PLAIN = Case((Step((Request(),)),))
_KEPT = {"steps", "level", "page_size", "num_layers"}
_RANK = {"decode": 0, "prefill": 1}
_FEW = 4


def simplify(case: Case, fails: Callable[[Case], bool], *, budget: int = 1000) -> Case:
    """The smallest case found for which `fails` holds, starting from `case`; `budget` calls at most."""
    smallest, size = case, _size(case)
    reached = 0
    tried: set[Case] = set()
    while True:
        for index, candidate in enumerate(simpler(smallest)):
            if index < reached or candidate in tried or _size(candidate) >= size:
                continue
            tried.add(candidate)
            if budget == 0:
                return smallest
            budget -= 1
            if fails(candidate):
                # Go on from here: what came before did not fail a moment ago, and has its turn in the next round.
                smallest, size, reached = candidate, _size(candidate), index
                break
        else:
            if not reached:
                return smallest
            reached = 0


def simpler(case: Case) -> Iterator[Case]:
    """Valid cases that differ in one respect and are mostly simpler, the boldest first."""
    drafts = [Draft(step.requests, step.phase, step.kind, step.finished) for step in case.steps]
    for change in (
        session_changes if case.session else _fewer_steps,
        _fewer_requests,
        _alone_at_the_end,
        _smaller_pages,
        _plainer_settings,
        _shorter_together,
        _shorter,
        _plainer_steps,
        _other_seeds,
        _one_for_a_token,
    ):
        for changed, settings in change(case, drafts):
            if settings.get("session", case.session):
                kept = consistent(changed)
            else:
                kept = [draft._replace(finished=()) for draft in changed if draft.requests]
            try:
                yield replace(case, steps=tuple(draft.step() for draft in kept), **settings)
            except ValueError:
                continue


def _size(case: Case) -> tuple[int, ...]:
    requests = [r for step in case.steps for r in step.requests]
    heads = case.heads
    text = to_json(case)
    return (
        len(case.steps),
        len(requests),
        sum(r.kv_len for r in requests),
        sum(r.qo_len for r in requests),
        case.page_size,
        sum(_RANK.get(step.kind, 2) for step in case.steps),
        heads.num_qo_heads * heads.head_dim_qk + heads.num_kv_heads * heads.head_dim_vo,
        len(text),
        *text.encode(),
    )


def _fewer_steps(_: Case, drafts: Sequence[Draft]) -> Changes:
    if len(drafts) == 1:
        return
    for draft in drafts:
        yield [draft], {}
    for i in range(len(drafts)):
        yield [*drafts[:i], *drafts[i + 1 :]], {}


def _fewer_requests(_: Case, drafts: Sequence[Draft]) -> Changes:
    """Without some uids, in every step: each half of them, then each one."""
    uids = list(dict.fromkeys(r.uid for draft in drafts for r in draft.requests))
    halves = [uids[: len(uids) // 2], uids[len(uids) // 2 :]] if len(uids) > 2 else []
    for dropped in [*halves, *([uid] for uid in uids)]:
        kept = [draft._replace(requests=_without(draft.requests, set(dropped))) for draft in drafts]
        yield kept, {}


def _other_seeds(case: Case, drafts: Sequence[Draft]) -> Changes:
    """Another seed, alone and with fewer requests: what checks draw by it may stand in the way of a smaller case."""
    for seed in dict.fromkeys((0, case.seed & ~1, case.seed ^ 1)):
        if seed == case.seed:
            continue
        yield drafts, {"seed": seed}
        for kept, _ in _fewer_requests(case, drafts):
            yield kept, {"seed": seed}


def _one_for_a_token(case: Case, drafts: Sequence[Draft]) -> Changes:
    """Of a few requests one fewer, and another a token longer: what it takes to be in the way of something."""
    if sum(len(draft.requests) for draft in drafts) > _FEW:
        return
    changes = session_changes if case.session else _fewer_steps_or_requests
    for fewer, settings in changes(case, drafts):
        if settings or sum(len(d.requests) for d in fewer) >= sum(len(d.requests) for d in drafts):
            continue
        for i, draft in enumerate(fewer):
            for j, r in enumerate(draft.requests):
                for longer in _longer(r):
                    requests = [*draft.requests[:j], longer, *draft.requests[j + 1 :]]
                    grown = draft._replace(requests=requests)
                    if longer.qo_len > 1 and draft.kind == "decode":
                        grown = grown._replace(phase="prefill", kind="prefill")
                    longer_one = [*fewer[:i], grown, *fewer[i + 1 :]]
                    yield longer_one, {}
                    if case.session:
                        yield later(longer_one, i, r.uid, -1), {}


def _fewer_steps_or_requests(case: Case, drafts: Sequence[Draft]) -> Changes:
    yield from _fewer_steps(case, drafts)
    yield from _fewer_requests(case, drafts)


def _longer(r: AnyRequest) -> Iterator[AnyRequest]:
    if isinstance(r, KernelRequest):
        yield replace(r, kv_len=r.kv_len + 1)
    else:
        yield replace(r, cached_len=r.cached_len + 1)
        yield replace(r, extend_len=r.extend_len + 1)


def _alone_at_the_end(case: Case, drafts: Sequence[Draft]) -> Changes:
    """One request of one token, where a pool as large as this one ends: what an address alone makes wrong."""
    if case.session:
        return
    tokens = (KernelRequest(1, 1) if case.level == "kernel" else Request(),)
    held = sum(pages_for(r.kv_len, case.page_size) for draft in drafts for r in draft.requests)
    for page_size in dict.fromkeys((1, case.page_size)):
        spare = min((held + case.spare_pages) * case.page_size // page_size, MAX_SPARE_PAGES)
        settings = {
            "page_size": page_size,
            "spare_pages": spare,
            "max_seq_len": None,
            "placement": "reversed",
        }
        yield [drafts[0]._replace(requests=tokens)], settings


def _without(requests: Sequence[AnyRequest], uids: set[int]) -> list[AnyRequest]:
    """The first borrower of a dropped lender lends to the others."""
    heirs: dict[int, int] = {}
    found: list[AnyRequest] = []
    for r in requests:
        if r.uid in uids:
            continue
        if r.prefix_of not in uids:
            found.append(r)
        elif heirs.setdefault(r.prefix_of, r.uid) == r.uid:
            found.append(replace(r, prefix_of=None, prefix_len=0))
        else:
            found.append(replace(r, prefix_of=heirs[r.prefix_of]))
    return found


def _smaller_pages(case: Case, drafts: Sequence[Draft]) -> Changes:
    """Smaller pages, with the same lengths and with lengths that stand to the page as before."""
    for size in (1, 2, 3, 4, 8, 16, 32, 64):
        if size >= case.page_size:
            return
        scaled = [d._replace(requests=[_scaled(r, case.page_size, size) for r in d.requests]) for d in drafts]
        for changed in (scaled, drafts):
            yield changed, {"page_size": size, "max_seq_len": None}
            if case.max_seq_len is not None:
                yield changed, {"page_size": size, "max_seq_len": _longest(changed)}


def _longest(drafts: Sequence[Draft]) -> int:
    return max(r.kv_len for draft in drafts for r in draft.requests)


def _scaled(r: AnyRequest, old: int, new: int) -> AnyRequest:
    def length(n: int) -> int:
        pages, rest = divmod(n, old)
        return pages * new + (max(new - (old - rest), 1) if rest > old // 2 else min(rest, new - 1))

    prefix = r.prefix_len // old * new
    if isinstance(r, KernelRequest):
        kv_len = length(r.kv_len)
        return replace(r, qo_len=min(r.qo_len, kv_len), kv_len=kv_len, prefix_len=prefix)
    kv_len = max(length(r.kv_len), prefix + 1)
    extend = min(r.extend_len, kv_len - prefix)
    return replace(r, cached_len=kv_len - extend, extend_len=extend, prefix_len=prefix)


def _plainer_settings(case: Case, drafts: Sequence[Draft]) -> Changes:
    names = [f.name for f in fields(Case) if f.name not in _KEPT]
    yield drafts, {name: getattr(_PLAIN, name) for name in names}
    for heads in (Heads(), Heads(case.heads.group_size), Heads(2, 1), Heads(2, 2)):
        yield drafts, {"heads": heads}
    yield drafts, {"heads": Heads(case.heads.num_qo_heads, case.heads.num_kv_heads)}
    yield drafts, {"kv_dtype": None, "k_scale": 1.0, "v_scale": 1.0}
    mask = case.mask
    if mask.window is not None:
        yield drafts, {"mask": replace(mask, window=None, window_layers=None)}
        yield drafts, {"mask": replace(mask, window_layers=None)}
        yield drafts, {"mask": replace(mask, window=1)}
        yield drafts, {"mask": replace(mask, window=2)}
    yield drafts, {"mask": replace(mask, soft_cap=None)}
    if mask.custom is None:
        yield drafts, {"mask": replace(mask, causal=True)}
    else:
        yield drafts, {"mask": Mask(soft_cap=mask.soft_cap)}
        yield drafts, {"mask": replace(mask, custom=0)}
    for name in names:
        if getattr(case, name) != getattr(_PLAIN, name):
            yield drafts, {name: getattr(_PLAIN, name)}
    for fewer in (case.spare_pages // 2, case.spare_pages - 1):
        if fewer > _PLAIN.spare_pages:
            yield drafts, {"spare_pages": fewer}


def _shorter(case: Case, drafts: Sequence[Draft]) -> Changes:
    """Each request shorter: down to the borders of a page, to half, by one; stored tokens or new ones."""
    for i, draft in enumerate(drafts):
        for j, r in enumerate(draft.requests):
            for shorter in _shorter_requests(r, case.page_size):
                requests = [*draft.requests[:j], shorter, *draft.requests[j + 1 :]]
                yield from _limited(case, [*drafts[:i], draft._replace(requests=requests), *drafts[i + 1 :]])


def _shorter_together(case: Case, drafts: Sequence[Draft]) -> Changes:
    """A request shorter by as many stored tokens in every step that it is in."""
    stored: dict[int, list[int]] = {}
    for draft in drafts:
        for r in draft.requests:
            stored.setdefault(r.uid, []).append(r.stored_len - r.prefix_len)
    for uid, lengths in stored.items():
        for cut in dict.fromkeys((min(lengths), min(lengths) // 2, case.page_size, 1)):
            if len(lengths) > 1 and 0 < cut <= min(lengths):
                shorter = [[_cut(r, cut) if r.uid == uid else r for r in d.requests] for d in drafts]
                changed = [d._replace(requests=rs) for d, rs in zip(drafts, shorter, strict=True)]
                yield from _limited(case, changed)


def _cut(r: AnyRequest, tokens: int) -> AnyRequest:
    if isinstance(r, KernelRequest):
        return replace(r, kv_len=r.kv_len - tokens)
    return replace(r, cached_len=r.cached_len - tokens)


def _limited(case: Case, drafts: Sequence[Draft]) -> Changes:
    """With the page table as it is, and with one that just fits."""
    yield drafts, {}
    if case.max_seq_len is not None:
        yield drafts, {"max_seq_len": _longest(drafts)}


def _shorter_requests(r: AnyRequest, p: int) -> Iterator[AnyRequest]:
    if r.prefix_of is not None:
        yield replace(r, prefix_of=None, prefix_len=0)
        yield replace(r, prefix_len=p)
    for kv_len in (0, 1, 2, p - 1, p, p + 1, 2 * p, 2 * p + 1, r.kv_len // 2, r.kv_len - 2, r.kv_len - 1):
        if not 0 <= kv_len < r.kv_len:
            continue
        if isinstance(r, KernelRequest):
            yield replace(r, kv_len=kv_len, qo_len=min(r.qo_len, kv_len))
            yield replace(r, kv_len=kv_len)
        elif kv_len:
            stored = {kv_len - 1, kv_len - min(r.extend_len, kv_len), min(r.cached_len, kv_len - 1)}
            for cached in sorted(stored, reverse=True):
                yield replace(r, cached_len=cached, extend_len=kv_len - cached)
    for qo_len in (0, 1, 2, r.qo_len // 2, r.qo_len - 1):
        if not 0 <= qo_len < r.qo_len:
            continue
        if isinstance(r, KernelRequest):
            yield replace(r, qo_len=qo_len)
        elif qo_len:
            yield replace(r, cached_len=r.kv_len - qo_len, extend_len=qo_len)


def _plainer_steps(case: Case, drafts: Sequence[Draft]) -> Changes:
    yield [draft._replace(phase="decode", kind="decode") for draft in drafts], {}
    for i, draft in enumerate(drafts):
        for plain in (
            draft._replace(phase="decode", kind="decode"),
            draft._replace(phase="prefill", kind="prefill"),
        ):
            yield [*drafts[:i], plain, *drafts[i + 1 :]], {}
    order: dict[int, int] = {}
    for draft in drafts:
        for r in draft.requests:
            order.setdefault(r.uid, len(order))
    yield [_renamed(draft, order) for draft in drafts], {}
    if not case.session:
        yield [_renamed(draft, {r.uid: i for i, r in enumerate(draft.requests)}) for draft in drafts], {}


def _renamed(draft: Draft, uids: Mapping[int, int]) -> Draft:
    return draft._replace(
        requests=[
            replace(r, uid=uids[r.uid], prefix_of=None if r.prefix_of is None else uids[r.prefix_of])
            for r in draft.requests
        ],
        finished=[uids[uid] for uid in draft.finished],
    )
