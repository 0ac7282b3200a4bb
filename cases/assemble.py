"""From drawn bytes to a valid case: every byte is an index, and lengths are cut to what the limits leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

from cases.lengths import chunked_cached, lengths, prefill_cached, query_len
from cases.mix import LevelMix, WindowLayers
from cases.model import AnyRequest, Case, Heads, KernelRequest, Kind, Mask, Request, Step
from cases.settings import Settings
from cases.wanted import Wanted

_LENGTH_BITS = 5
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1

_TWO_LENDERS, _LARGE_UIDS = 128, 64
"""Bits of `extra`."""
_FOR_TWO_LENDERS = 4
_UIDS_APART = 1 << 16

Draw = Callable[[int], bytes]
"""Draws so many bytes: the lengths of a later batch."""
_Span = tuple[int, int, int]
"""One request of a batch: uid, stored (engine) or query (kernel) tokens, kv_len."""


class Assembler:
    """Builds the cases of one level, mix and wish."""

    def __init__(self, mix: LevelMix, wanted: Wanted) -> None:
        self.mix = mix
        self.wanted = wanted
        self.settings = Settings(mix, wanted)

    def build(self, requests: bytes, indices: bytes, draw: Draw) -> Case:
        """One case from a byte per request and a byte per setting."""
        chosen = self.settings.read(indices)
        long = chosen["page_size"] >= self.mix.long_page_size
        batches = (_KernelBatches if self.wanted.level == "kernel" else _EngineBatches)(
            self.mix, self.wanted, chosen, long
        )
        steps = batches.steps(requests[: self.mix.long_max_requests if long else None], draw)
        qo, kv = chosen["heads"]
        if long and kv > 1:
            qo, kv = qo // kv, 1
        kv_dtype = chosen["kv_dtype"]
        k_scale, v_scale = chosen["kv_scales"] if kv_dtype is not None else (1.0, 1.0)
        longest = max(r.kv_len for step in steps for r in step.requests)
        return Case(
            steps=steps,
            level=self.wanted.level,
            heads=_head_record(qo, kv, *chosen["head_dims"]),
            num_layers=self.mix.num_layers,
            dtype=chosen["dtype"],
            kv_dtype=kv_dtype,
            k_scale=k_scale,
            v_scale=v_scale,
            page_size=chosen["page_size"],
            layout=chosen["layout"],
            placement=chosen["placement"],
            spare_pages=1 if long else 2,
            max_seq_len=longest if chosen["table"] == "exact" and longest else None,
            mask=batches.mask,
            sm_scale=chosen["sm_scale"],
            values=chosen["values"],
            strided=chosen["strided"],
            seed=chosen["seed"],
        )


_head_record = cache(Heads)


@cache
def _mask_record(
    kind: str, window: int | None, soft_cap: float | None, seed: int, layers: tuple[int, ...] | None
) -> Mask:
    if kind == "custom":
        return Mask(causal=False, soft_cap=soft_cap, custom=seed)
    return Mask(causal=kind == "causal", window=window, soft_cap=soft_cap, window_layers=layers)


def window_layers(which: WindowLayers, window: int | None, num_layers: int) -> tuple[int, ...] | None:
    """`Mask.window_layers`: of an engine with one layer, none but all."""
    if window is None or which == "all" or num_layers == 1:
        return None
    return tuple(range(which == "odd", num_layers, 2))


def _fit(wished: Sequence[int], low: int, limit: int) -> list[int]:
    """Lengths of at least `low` (or 0) and at most `limit` in all, each as wished while room is left."""
    room = limit - low * len(wished)
    found: list[int] = []
    for n in wished:
        more = min(max(n - low, 0), room)
        room -= more
        found.append(low + more if n else 0)
    return found


class _Batches:
    """What both levels share: limits, the mask, who borrows whose pages."""

    def __init__(self, mix: LevelMix, wanted: Wanted, chosen: dict[str, Any], long: bool) -> None:
        self.wanted = wanted
        self.chosen = chosen
        self.page_size: int = chosen["page_size"]
        self.limit = mix.long_token_limit if long else mix.token_limit
        self.max_requests = mix.long_max_requests if long else mix.max_requests
        self.row_limit = mix.row_limit
        window = chosen["window"] if chosen["mask"] != "custom" else None
        seed = chosen["seed"] if chosen["mask"] == "custom" else 0
        layers = window_layers(chosen["window_layers"], window, mix.num_layers)
        self.mask = _mask_record(chosen["mask"], window, chosen["soft_cap"], seed, layers)
        zero = wanted.level == "kernel" and (wanted.rows_without_keys or wanted.empty_requests)
        self.lengths = lengths(self.page_size, window, zero)
        self.next_uid = 0

    def wished(self, indices: bytes, low: int) -> tuple[list[int], list[int]]:
        """kv_len and split of each request; fewer of them where all are to hold a shared page."""
        if self.chosen["prefix"] != "own" and len(indices) > 1 and 2 * (low + self.page_size) <= self.limit:
            low += self.page_size
            indices = indices[: self.limit // low]
        found = _fit([self.lengths[b & _LENGTH_MASK] for b in indices], low, self.limit)
        return found, [b >> _LENGTH_BITS for b in indices]

    def new_uids(self, count: int) -> range:
        apart = _UIDS_APART if self.chosen["extra"] & _LARGE_UIDS else 1
        first = self.next_uid
        self.next_uid += count * apart
        return range(first, self.next_uid, apart)

    def lender(self, index: int, count: int) -> int:
        """Whose pages a request borrows: those of the first, or of the first of its half."""
        half = -(-count // 2)
        two = count >= _FOR_TWO_LENDERS and self.chosen["extra"] & _TWO_LENDERS
        return half if two and index >= half else 0

    def shared(self, stored: int, owner_stored: int) -> int:
        """Tokens that a request borrows from its lender."""
        if self.chosen["prefix"] == "own":
            return 0
        pages = min(stored, owner_stored) // self.page_size
        return (min(pages, 1) if self.chosen["prefix"] == "one_page" else pages) * self.page_size


class _EngineBatches(_Batches):
    def steps(self, indices: bytes, draw: Draw) -> tuple[Step, ...]:
        kind = self.chosen["batch"]
        spans = self._batch(kind, indices)
        steps = [self._step(kind, spans)]
        for op in self.chosen["later"]:
            if op == "again":
                spans = self._batch(kind, draw(len(spans)))
                steps.append(self._step(kind, spans))
            elif op == "join":
                spans = self._join(spans)
                steps.append(self._step("mixed", spans))
            else:
                spans = self._grown(op, spans)
                steps.append(self._step("chunked" if op == "chunk" else op, spans))
        return tuple(steps)

    @property
    def _drafts(self) -> int:
        return 2 + self.chosen["extra"] % 3

    def _batch(self, kind: str, indices: bytes) -> list[_Span]:
        drafts = self._drafts
        low = {"verify": drafts + 1, "draft_extend": 2}.get(kind, 1)
        kv_lens, splits = self.wished(indices, low)
        room = self.row_limit - len(kv_lens)
        spans: list[_Span] = []
        for i, (uid, kv, split) in enumerate(zip(self.new_uids(len(kv_lens)), kv_lens, splits, strict=True)):
            if kind in ("decode", "ones") or (kind == "mixed" and (i == 0 or (i > 1 and split % 2))):
                cached = kv - 1
            elif kind == "verify":
                cached = kv - drafts
            elif kind == "draft_extend":
                cached = kv - min(1 + split % 4, kv - 1)
            elif kind == "chunked":
                cached = chunked_cached(split, kv, self.page_size)
            else:
                cached = prefill_cached(split, kv, self.page_size)
            if self.chosen["prefix"] != "own" and kind != "verify":
                cached = max(cached, min(self.page_size, kv - 1))
            cached = max(cached, kv - 1 - room)
            room -= kv - 1 - cached
            spans.append((uid, cached, kv))
        return spans

    def _grown(self, op: str, spans: list[_Span]) -> list[_Span]:
        """The same requests a few tokens on; the last of them leave where the limit asks for it."""
        new = 1 if op == "decode" else self._drafts
        back = 1 if op == "verify" else 0
        while len(spans) > 1 and sum(kv - back + new for *_, kv in spans) > self.limit:
            spans = spans[:-1]
        stored = [(uid, min(kv - back, self.limit - new)) for uid, _, kv in spans]
        return [(uid, cached, cached + new) for uid, cached in stored]

    def _join(self, spans: list[_Span]) -> list[_Span]:
        leaves = len(spans) > 1 or self.max_requests == 1
        staying = spans[1:] if leaves else spans
        stay = self._grown("decode", staying) if staying else []
        while len(stay) > 1 and sum(kv for *_, kv in stay) >= self.limit:
            stay = stay[:-1]
        stay = [(uid, min(cached, self.limit - 2), min(kv, self.limit - 1)) for uid, cached, kv in stay]
        room = self.limit - sum(kv for *_, kv in stay)
        extra: int = self.chosen["extra"]
        kv = min(self.lengths[extra & _LENGTH_MASK], room)
        cached = prefill_cached(extra >> _LENGTH_BITS, kv, self.page_size)
        (uid,) = self.new_uids(1)
        return [*stay, (uid, max(cached, kv - self.row_limit + len(stay)), kv)]

    def _step(self, batch: str, spans: list[_Span]) -> Step:
        requests: list[AnyRequest] = []
        for i, (uid, cached, kv) in enumerate(spans):
            lender = self.lender(i, len(spans))
            owner, owner_stored, _ = spans[lender]
            shared = self.shared(cached, owner_stored) if i != lender else 0
            requests.append(_request(cached, kv - cached, uid, owner if shared else None, shared))
        kinds: dict[str, Kind] = {
            "decode": "decode",
            "chunked": "chunked",
            "verify": "verify",
            "draft_extend": "draft_extend",
            "mixed": "mixed" if len(spans) > 1 else "prefill",
        }
        kind = kinds.get(batch, "prefill")
        return Step(tuple(requests), "decode" if kind == "decode" else "prefill", kind)


class _KernelBatches(_Batches):
    def steps(self, indices: bytes, draw: Draw) -> tuple[Step, ...]:
        steps = [self._step(indices)]
        for _ in self.chosen["later"]:
            steps.append(self._step(draw(len(steps[0].requests))))
        return tuple(steps)

    def _step(self, indices: bytes) -> Step:
        decode = self.chosen["batch"] == "decode"
        keyless = self.wanted.rows_without_keys
        kv_lens, splits = self.wished(indices, 1)
        room = self.row_limit - len(kv_lens)
        spans: list[tuple[int, int]] = []
        for wished, split in zip(kv_lens, splits, strict=True):
            kv = wished
            qo = 1 if decode else query_len(split, kv)
            if not kv and not keyless:
                qo, kv = (0, 0) if self.wanted.empty_requests and not decode else (1, 1)
            elif not qo and not self.wanted.empty_requests:
                qo = 1
            if qo > kv and self.mask.causal and not keyless:
                qo = kv
            qo = min(qo, 1 + room)
            room -= max(qo - 1, 0)
            spans.append((qo, kv))
        if not any(qo for qo, _ in spans):
            spans[0] = (1, spans[0][1] if keyless else max(1, spans[0][1]))
        return self._request_step(spans, decode)

    def _request_step(self, spans: list[tuple[int, int]], decode: bool) -> Step:
        uids = self.new_uids(len(spans))
        requests: list[AnyRequest] = []
        for i, (uid, (qo, kv)) in enumerate(zip(uids, spans, strict=True)):
            lender = self.lender(i, len(spans))
            shared = self.shared(kv, spans[lender][1]) if i != lender else 0
            requests.append(_kernel_request(qo, kv, uid, uids[lender] if shared else None, shared))
        return Step(tuple(requests), "decode" if decode else "prefill", "decode" if decode else "prefill")


@lru_cache(maxsize=1 << 15)
def _request(cached: int, extend: int, uid: int, prefix_of: int | None, prefix_len: int) -> Request:
    return Request(cached, extend, uid, prefix_of, prefix_len)


@lru_cache(maxsize=1 << 15)
def _kernel_request(qo: int, kv: int, uid: int, prefix_of: int | None, prefix_len: int) -> KernelRequest:
    return KernelRequest(qo, kv, uid, prefix_of, prefix_len)
