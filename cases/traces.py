"""Real traces as cases: the batches that a continuous-batching engine would run for them.

The engine is a small one: requests are admitted in order of arrival while the batch and the KV budget have
room; prompts are computed in chunks under a token budget per step, leading blocks that are computed already
are prefix hits; each step is a decode batch, a prefill batch, or both in one; finished requests leave.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from cases.model import MAX_BATCH, MAX_COUNT, MAX_LEN, Case, DType, Heads, Kind, Request, Step
from cases.trace_files import Row, Trace, read_trace
from cases.trace_scaling import Scaled, Scaling, fit

__all__ = ["Engine", "Row", "Scaling", "Trace", "batches", "describe", "fit", "read_trace"]

HEADS = Heads(num_qo_heads=4, num_kv_heads=1)


def batches(
    trace: Trace,
    *,
    page_size: int = 16,
    token_limit: int = 256,
    kv_budget: int = 1920,
    max_batch: int = 16,
    chunk_tokens: int = 128,
    mixed_share: float = 0.5,
    occupancy: float = 20.0,
    steps_per_case: int = 1,
    heads: Heads = HEADS,
    dtype: DType = "float16",
    seed: int = 0,
) -> Iterator[Case]:
    """The batches of a trace, one step or several to a case. Deterministic.

    Args:
        trace: as `read_trace` gives it.
        page_size: slots in a page of the KV cache.
        token_limit: most tokens of one request (its kv_len); three quarters of it for the input.
        kv_budget: most tokens that all running requests may come to, shared pages counted for each.
        max_batch: most running requests.
        chunk_tokens: most prompt tokens in a step.
        mixed_share: part of the steps with prompt tokens in which the other requests decode too.
        occupancy: requests that would run on average if nothing bounded them; it sets how fast the trace's
            time passes (`Scaling`). More than `max_batch` keeps the engine full.
        steps_per_case: consecutive steps in one case; 1 gives every batch a case of its own.
        heads: head counts and widths of every case.
        dtype: dtype of every case.
        seed: seeds the mixture of steps and the cases' own seeds.

    Raises:
        ValueError: a limit leaves no room for a single request.
    """
    counts = {"page_size": page_size, "max_batch": max_batch, "chunk_tokens": chunk_tokens}
    for name, count in (counts | {"steps_per_case": steps_per_case}).items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    for name, limit, most in (
        ("token_limit", token_limit, MAX_LEN),
        ("page_size", page_size, MAX_COUNT),
        ("max_batch", max_batch, MAX_BATCH),
    ):
        if limit > most:
            raise ValueError(f"{name} must be at most {most}, got {limit}")
    if token_limit > kv_budget:
        raise ValueError(f"kv_budget {kv_budget} cannot hold one request of token_limit {token_limit}")
    scaling = fit(trace, page_size=page_size, token_limit=token_limit, occupancy=occupancy)
    engine = Engine(
        scaling,
        kv_budget=kv_budget,
        max_batch=max_batch,
        chunk_tokens=chunk_tokens,
        mixed_share=mixed_share,
        seed=seed,
    )
    steps = engine.run(scaling.apply(row) for row in trace.rows)
    index = 0
    while group := tuple(islice(steps, steps_per_case)):
        yield Case(
            steps=group,
            heads=heads,
            dtype=dtype,
            page_size=page_size,
            placement="scattered",
            max_seq_len=token_limit,
            seed=(seed + index) % (1 << 32),
        )
        index += 1


@dataclass(slots=True)
class _Running:
    """A request in the engine. `copies`: which physical copy of each leading block it holds."""

    uid: int
    scaled: Scaled
    hit: int
    stored: int
    copies: list[int] = field(default_factory=list[int])

    @property
    def prompt_left(self) -> int:
        return self.scaled.input_len - self.stored

    @property
    def finished(self) -> bool:
        # the step that ends the prompt gives the first token; the last token is never stored
        return self.stored >= self.scaled.input_len + self.scaled.output_len - 1


class Engine:
    """The scheduler, without a model. Its prefix cache keeps every block that was computed."""

    def __init__(
        self,
        scaling: Scaling,
        *,
        kv_budget: int,
        max_batch: int,
        chunk_tokens: int,
        mixed_share: float,
        seed: int,
    ) -> None:
        self._scaling = scaling
        self._kv_budget = kv_budget
        self._max_batch = max_batch
        self._chunk_tokens = chunk_tokens
        self._mixed_share = mixed_share
        self._rng = random.Random(seed)  # noqa: S311 - no secret
        self._running: list[_Running] = []
        self._waiting: deque[_Running] = deque()
        self._cache: dict[int, int] = {}
        self._num_copies = 0

    def run(self, requests: Iterable[Scaled]) -> Iterator[Step]:
        """Serve requests that come in order of arrival, until the last one is done."""
        coming = deque(_Running(uid, scaled, 0, 0) for uid, scaled in enumerate(requests))
        now = 0.0
        while coming or self._waiting or self._running:
            if not self._waiting and not self._running:
                now = max(now, coming[0].scaled.arrival)
            while coming and coming[0].scaled.arrival <= now:
                self._waiting.append(coming.popleft())
            yield self._step()
            now += self._scaling.seconds_per_step

    def _step(self) -> Step:
        prompts = self._prompts()
        new = dict(prompts)
        decoding = [r for r in self._running if r.prompt_left <= 0]
        if not prompts or (decoding and self._rng.random() < self._mixed_share):
            new |= {r.uid: 1 for r in decoding}
        batch = [r for r in self._running if r.uid in new]
        step = self._record(batch, new, prompts)
        for r in batch:
            r.stored += new[r.uid]
            self._keep_blocks(r)
        self._running = [r for r in self._running if not r.finished]
        return step

    def _prompts(self) -> dict[int, int]:
        """Prompt tokens of this step by uid, admitting requests while budgets last."""
        left = self._chunk_tokens
        found: dict[int, int] = {}
        for r in self._running:
            take = min(r.prompt_left, left)
            if take > 0:
                found[r.uid] = take
                left -= take
        while left and self._waiting and self._admits(self._waiting[0]):
            r = self._waiting.popleft()
            self._reuse_blocks(r)
            self._running.append(r)
            found[r.uid] = min(r.prompt_left, left)
            left -= found[r.uid]
        return found

    def _admits(self, r: _Running) -> bool:
        used = sum(other.scaled.input_len + other.scaled.output_len for other in self._running)
        needed = r.scaled.input_len + r.scaled.output_len
        return len(self._running) < self._max_batch and used + needed <= self._kv_budget

    def _reuse_blocks(self, r: _Running) -> None:
        # one token is left to compute, for its logits
        most = (r.scaled.input_len - 1) // self._scaling.block_tokens
        for block in r.scaled.blocks[:most]:
            if block not in self._cache:
                break
            r.copies.append(self._cache[block])
        r.hit = r.stored = len(r.copies) * self._scaling.block_tokens

    def _keep_blocks(self, r: _Running) -> None:
        for block in r.scaled.blocks[len(r.copies) : r.stored // self._scaling.block_tokens]:
            self._num_copies += 1
            r.copies.append(self._num_copies)
            self._cache.setdefault(block, self._num_copies)

    def _record(self, batch: list[_Running], new: dict[int, int], prompts: dict[int, int]) -> Step:
        requests: list[Request] = []
        owners: list[_Running] = []
        for r in batch:
            owner, blocks = None, 0
            for other in owners:
                common = self._common_blocks(r, other)
                if common > blocks:
                    owner, blocks = other, common
            if owner is None:
                owners.append(r)
            shared = blocks * self._scaling.block_tokens
            requests.append(Request(r.stored, new[r.uid], r.uid, owner.uid if owner else None, shared))
        kind = self._kind(batch, prompts)
        return Step(tuple(requests), "decode" if kind == "decode" else "prefill", kind)

    @staticmethod
    def _common_blocks(a: _Running, b: _Running) -> int:
        """Leading blocks of which both hold the same physical copy."""
        count = 0
        for mine, theirs in zip(a.copies, b.copies, strict=False):
            if mine != theirs:
                break
            count += 1
        return count

    @staticmethod
    def _kind(batch: list[_Running], prompts: dict[int, int]) -> Kind:
        if not prompts:
            return "decode"
        if len(prompts) < len(batch):
            return "mixed"
        whole = all(r.stored == r.hit and prompts[r.uid] == r.prompt_left for r in batch)
        return "prefill" if whole else "chunked"


def describe(cases: Iterable[Case]) -> str:
    """What the batches of some cases come to: sizes, lengths, prefix hits and kinds."""
    sizes: list[int] = []
    tokens: list[int] = []
    kv_lens: list[int] = []
    kinds: Counter[str] = Counter()
    shared = cached = 0
    for case in cases:
        for step in case.steps:
            sizes.append(len(step.requests))
            tokens.append(sum(step.kv_lens))
            kv_lens += step.kv_lens
            kinds[step.kind] += 1
            shared += any(r.prefix_of is not None for r in step.requests)
            cached += any(r.stored_len and r.qo_len > 1 for r in step.requests)
    if not sizes:
        return "no batches"
    n = len(sizes)
    return "\n".join(
        (
            f"batches            {n}",
            f"requests a batch   median {median(sizes):g}, {min(sizes)} to {max(sizes)}",
            f"tokens a request   median {median(kv_lens):g}, {min(kv_lens)} to {max(kv_lens)}",
            f"tokens a batch     median {median(tokens):g}, {min(tokens)} to {max(tokens)}",
            f"shared pages       in {shared / n:.0%} of the batches",
            f"stored before new  in {cached / n:.0%} of the batches (a prefix hit or an earlier chunk)",
            f"kinds              {', '.join(f'{kind} {count}' for kind, count in kinds.most_common())}",
        )
    )
