"""What a run reached: in how many cases each setting, kind of batch and border length stood at least once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from cases.model import Case, Request

GROUPS = (
    "level",
    "phase",
    "kind",
    "steps",
    "requests",
    "page_size",
    "group_size",
    "heads",
    "head_dim",
    "dtype",
    "kv_dtype",
    "layout",
    "placement",
    "values",
    "mask",
    "kv_len",
    "qo_len",
    "prefix",
    "session",
    "strided",
)
_WIDTH = 110
Label = tuple[str, str]


class Reached:
    """Counts of cases by group and label. `add` costs some 30 microseconds."""

    def __init__(self) -> None:
        self.cases = 0
        self.counts: Counter[Label] = Counter()

    def add(self, case: Case) -> None:
        self.cases += 1
        labels = set(_settings(case))
        for step in case.steps:
            labels.update(_BATCH[step.phase, step.kind])
            labels.add(("requests", str(len(step.requests))))
            for r in step.requests:
                labels.update(
                    _lengths(r.kv_len, r.qo_len, case.page_size, case.mask.window, case.max_seq_len)
                )
                if r.prefix_of is not None:
                    labels.add(("prefix", "shared pages"))
                if isinstance(r, Request) and r.cached_len and r.extend_len > 1:
                    labels.add(("prefix", "cached tokens before new ones"))
        if case.session:
            labels.update(("session", event) for event in _events(case))
        self.counts.update(labels)

    def merge(self, other: Reached) -> None:
        """Add what another run reached."""
        self.cases += other.cases
        self.counts.update(other.counts)

    def count(self, group: str, label: object) -> int:
        """Cases that reached `label` of `group`."""
        return self.counts[group, str(label)]

    def to_dict(self) -> dict[str, object]:
        """Plain data, for a report: {"cases": n, "reached": {group: {label: cases}}}."""
        reached = {group: dict(self._group(group)) for group in GROUPS}
        return {"cases": self.cases, "reached": {group: found for group, found in reached.items() if found}}

    @classmethod
    def from_dict(cls, cases: int, reached: Mapping[str, Mapping[str, int]]) -> Reached:
        made = cls()
        made.cases = cases
        for group, found in reached.items():
            for label, count in found.items():
                made.counts[group, label] = count
        return made

    def table(self) -> str:
        """Aligned text, a line or more per group."""
        wide = max(len(group) for group in GROUPS)
        lines = [f"{'cases':{wide}}  {self.cases}"]
        for group in GROUPS:
            head = group
            line = ""
            for label, count in self._group(group):
                cell = f"{label}: {count}"
                if line and wide + 4 + len(line) + len(cell) > _WIDTH:
                    lines.append(f"{head:{wide}}  {line}")
                    head, line = "", ""
                line += f"{'  ' if line else ''}{cell}"
            if line:
                lines.append(f"{head:{wide}}  {line}")
        return "\n".join(lines)

    def _group(self, group: str) -> list[tuple[str, int]]:
        found = [(label, n) for (name, label), n in self.counts.items() if name == group]
        return sorted(found, key=lambda item: _order(group, item[0]))


def _events(case: Case) -> set[str]:
    """What happens in a session."""
    found: set[str] = set()
    live: dict[int, int] = {}
    gone: set[int] = set()
    for step in case.steps:
        for uid in step.finished:
            del live[uid]
            gone.add(uid)
        computed = {r.uid: r.kv_len for r in step.requests}
        for r in step.requests:
            if r.uid not in live:
                found.add("comes back" if r.uid in gone else "comes")
                if r.prefix_of is not None:
                    found.add(
                        "borrows of one who computes"
                        if r.prefix_of in computed
                        else "borrows of one who waits"
                    )
                if r.stored_len > r.prefix_len:
                    found.add("brings tokens along")
            elif r.stored_len < live[r.uid]:
                found.add("steps back")
        if step.finished:
            found.add("leaves")
        if live.keys() - computed.keys():
            found.add("waits")
        live |= computed
        gone -= computed.keys()
    return found


def _order(group: str, label: str) -> tuple[int, int, str]:
    if group == "kv_len":
        return (1, _BORDERS.index(label), "")
    return (0, int(label), "") if label.isdigit() else (2, 0, label)


def _settings(case: Case) -> frozenset[Label]:
    mask, heads = case.mask, case.heads
    return _setting_labels(
        ("level", case.level),
        ("steps", len(case.steps)),
        ("page_size", case.page_size),
        ("group_size", heads.group_size),
        ("heads", f"{heads.num_qo_heads}/{heads.num_kv_heads}"),
        ("head_dim", f"{heads.head_dim_qk}/{heads.head_dim_vo}"),
        ("dtype", case.dtype),
        ("kv_dtype", case.kv_dtype or "that of q"),
        ("layout", case.layout),
        ("placement", case.placement),
        ("values", case.values),
        ("strided", "yes" if case.strided else "no"),
        ("mask", "custom" if mask.custom is not None else "causal" if mask.causal else "full"),
        ("mask", "window" if mask.window is not None else ""),
        ("mask", "window in some layers" if mask.window_layers is not None else ""),
        ("mask", "soft cap" if mask.soft_cap is not None else ""),
        ("mask", "own scale" if case.sm_scale is not None else ""),
    )


@lru_cache(maxsize=1 << 14)
def _setting_labels(*labels: tuple[str, object]) -> frozenset[Label]:
    return frozenset((group, str(label)) for group, label in labels if label != "")


_BATCH = {
    (phase, kind): (("phase", phase), ("kind", kind))
    for phase, kinds in (
        ("decode", ("decode",)),
        ("prefill", ("prefill", "chunked", "mixed", "verify", "draft_extend")),
    )
    for kind in kinds
}

_BORDERS = (
    "0",
    "1",
    "P-1",
    "P",
    "P+1",
    "2P-1",
    "2P",
    "2P+1",
    "multiple of P from 2P on",
    "two pages and more",
    "W-1",
    "W",
    "W+1",
    "W+P",
    "beyond W",
    "limit",
)


@lru_cache(maxsize=1 << 15)
def _lengths(
    kv_len: int, qo_len: int, page_size: int, window: int | None, limit: int | None
) -> frozenset[Label]:
    """Border classes of one request; P-1 to 2P+1 count from page size 2 on, where they differ."""
    found = {str(kv_len)} if kv_len < 2 else set[str]()
    p = page_size
    if p > 1:
        borders = {p - 1: "P-1", p: "P", p + 1: "P+1", 2 * p - 1: "2P-1", 2 * p: "2P", 2 * p + 1: "2P+1"}
        found |= {name for n, name in borders.items() if n == kv_len}
        if kv_len >= 2 * p and kv_len % p == 0:
            found.add("multiple of P from 2P on")
    if kv_len > p:
        found.add("two pages and more")
    if window is not None:
        borders = ((window - 1, "W-1"), (window, "W"), (window + 1, "W+1"), (window + p, "W+P"))
        found |= {name for n, name in borders if n == kv_len}
        if kv_len > window:
            found.add("beyond W")
    if kv_len == limit:
        found.add("limit")
    rows = "0" if not qo_len else "1" if qo_len == 1 else "kv_len" if qo_len == kv_len else "more than one"
    if qo_len > kv_len:
        rows = "more than kv_len"
    return frozenset({("kv_len", name) for name in found} | {("qo_len", rows)})
