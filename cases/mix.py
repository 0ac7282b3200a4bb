"""The mix of cases that strategies draw from: a committed file of weights, checked when it is read.

Every table lists its values from the simplest on, each with a whole-number weight; shrinking walks towards
the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from cases.errors import CaseError, check_json, explain, read_text
from cases.model import DType, KVDType, Layout, Placement, ValueKind

MIX_FILE = Path(__file__).with_name("mix.json")

BatchKind = Literal["decode", "prefill", "ones", "chunked", "mixed", "verify", "draft_extend"]
"""What the first batch is. "ones": a prefill batch in which every request computes one token."""
Later = Literal["decode", "again", "chunk", "verify", "join"]
"""How a batch follows the one before it.

"decode": every request decodes one token. "again": other requests, equally many, in a batch of the first one's kind.
"chunk": every request computes a few tokens more. "verify": every request computes its last token anew and drafts
behind it. "join": the first request leaves, a new one is prefilled, the others decode."""
Prefix = Literal["own", "one_page", "all_pages"]
"""How much of the first request's stored pages the others share."""

WindowLayers = Literal["all", "even", "odd"]
"""Which layers have the window, where there is one."""

_T = TypeVar("_T")
_Table = Annotated[tuple[tuple[_T, Annotated[int, Field(ge=1)]], ...], Field(min_length=1)]
_Count = Annotated[int, Field(ge=1)]
_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, config=_CONFIG)
class LevelMix:
    """Limits and weights of one level.

    `token_limit`: most keys in one batch (the sum of kv_len); `row_limit`: most query rows. From
    `long_page_size` on a case may hold `long_token_limit` keys in `long_max_requests` requests over one KV
    head, so that lengths of two pages are reached.
    """

    max_requests: Annotated[int, Field(ge=1, le=64)]
    token_limit: Annotated[int, Field(ge=64, le=65536)]
    long_page_size: _Count
    long_max_requests: Annotated[int, Field(ge=1, le=64)]
    long_token_limit: Annotated[int, Field(ge=64, le=65536)]
    row_limit: Annotated[int, Field(ge=64, le=65536)]
    page_size: _Table[_Count]
    heads: _Table[tuple[_Count, _Count]]
    head_dims: _Table[tuple[_Count, _Count]]
    dtype: _Table[DType]
    kv_dtype: _Table[KVDType | None]
    kv_scales: _Table[tuple[float, float]]
    batch: _Table[BatchKind]
    later: _Table[tuple[Later, ...]]
    prefix: _Table[Prefix]
    placement: _Table[Placement]
    layout: _Table[Layout]
    table: _Table[Literal["spare", "exact"]]
    values: _Table[ValueKind]
    strided: _Table[bool]
    sm_scale: _Table[float | None]
    mask: _Table[Literal["causal", "full", "custom"]]
    window: _Table[_Count | None]
    window_layers: _Table[WindowLayers]
    soft_cap: _Table[float | None]
    num_layers: _Count


Action = Literal["decode", "admit", "join", "chunk", "finish", "hit", "verify", "resume"]
"""What happens next in a session (`cases.schedule.Schedule`). "join": a request is admitted, the others decode."""


@dataclass(frozen=True, config=_CONFIG)
class SessionMix:
    """Limits and weights of sessions; what is not named here is drawn as for engine cases.

    `token_limit`: most tokens that the live requests, `max_live` at most, have in all. `max_actions`: of one session.
    """

    max_live: Annotated[int, Field(ge=1, le=64)]
    max_actions: Annotated[int, Field(ge=1, le=64)]
    token_limit: Annotated[int, Field(ge=8, le=65536)]
    actions: _Table[Action]
    page_size: _Table[_Count]
    heads: _Table[tuple[_Count, _Count]]
    head_dims: _Table[tuple[_Count, _Count]]


@dataclass(frozen=True, config=_CONFIG)
class Mix:
    engine: LevelMix
    kernel: LevelMix
    session: SessionMix

    def __post_init__(self) -> None:
        for name, known in (("batch", ("decode", "prefill")), ("later", ((), ("again",)))):
            for value, _ in getattr(self.kernel, name):
                if value not in known:
                    raise ValueError(f"kernel.{name} holds {value!r}, which only the engine level has")


def load_mix(path: str | Path = MIX_FILE) -> Mix:
    """Read a mix.

    Raises:
        CaseError: one sentence that names the file, the place and the rule.
    """
    text = read_text(path)
    check_json(text, str(path))
    try:
        return TypeAdapter(Mix).validate_json(text)
    except ValidationError as error:
        raise CaseError(f"{path}: {explain(error, _known_keys)}") from None


@cache
def default_mix() -> Mix:
    """The committed mix."""
    return load_mix()


def _known_keys(loc: Sequence[str | int]) -> list[str]:
    kind: Any = Mix if not loc else SessionMix if loc[0] == "session" else LevelMix
    return [f.name for f in fields(kind)]


def spread(table: Sequence[tuple[_T, int]], size: int) -> tuple[_T, ...]:
    """`size` values in the table's order, each about as often as its weight says and at least once.

    Raises:
        CaseError: there are more values than places.
    """
    if len(table) > size:
        raise CaseError(f"a table of the mix holds {len(table)} values, at most {size} fit")
    total = sum(weight for _, weight in table)
    counts = [max(1, round(weight * size / total)) for _, weight in table]
    while sum(counts) != size:
        step = 1 if sum(counts) < size else -1
        counts[counts.index(max(counts))] += step
    return tuple(value for (value, _), count in zip(table, counts, strict=True) for _ in range(count))
