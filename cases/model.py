"""`Case`: one question to an attention backend, as plain data with every validity rule.

Tensors are a pure function of a case (`cases.tensors`), so a case replays, shrinks and travels as text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Annotated, Literal, cast

from pydantic import ConfigDict, Discriminator, Field, Tag
from pydantic.dataclasses import dataclass

from cases.limits import check_size
from cases.session_rules import check_session

DType = Literal["float16", "bfloat16", "float32"]
KVDType = Literal["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"]
Level = Literal["engine", "kernel"]
Layout = Literal["NHD", "HND"]
Phase = Literal["prefill", "decode"]
Kind = Literal["prefill", "chunked", "decode", "mixed", "verify", "draft_extend"]
Placement = Literal["sequential", "reversed", "scattered"]
ValueKind = Literal["needles", "zero_q", "constant_v", "one_hot_v", "extreme", "low", "random"]

MAX_LEN = 1 << 20
"""Longest `kv_len` that a case may ask for, in tokens."""
MAX_SPARE_PAGES = 1 << 16
MAX_COUNT = 4096
"""Most heads, slots of a page and dims of a head."""

MAX_BATCH = 4096
MAX_LAYERS = 64
MAX_UID = (1 << 63) - 1
MIN_SCALE, MAX_SCALE = 1e-6, 1e6
"""Of what multiplies a score or a value: beyond, float32 comes to its ends."""

_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
_Length = Annotated[int, Field(ge=0, le=MAX_LEN)]
_Uid = Annotated[int, Field(ge=0, le=MAX_UID)]
_Scale = Annotated[float, Field(ge=MIN_SCALE, le=MAX_SCALE)]
_Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_Layer = Annotated[int, Field(ge=0, lt=MAX_LAYERS)]


@dataclass(frozen=True, config=_CONFIG)
class Heads:
    """Head counts and widths. Query head h reads KV head h // group_size."""

    num_qo_heads: _Count = 1
    num_kv_heads: _Count = 1
    head_dim_qk: _Count = 64
    head_dim_vo: _Count = 64

    def __post_init__(self) -> None:
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads {self.num_qo_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )

    @property
    def group_size(self) -> int:
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True, config=_CONFIG)
class Mask:
    """Which keys a query row sees, and what happens to its scores.

    Causal is aligned bottom right: row i of a request sees keys 0 .. kv_len - qo_len + i.
    `window` is the number of keys visible, the row's own included (None: all of them); it counts back from the
    row's own key, so with `causal=False` it bounds the left side only.
    `window_layers`: the layers that have the window, while the others see all keys (None: all layers have it).
    `soft_cap` c replaces a score s by c * tanh(s / c). `custom` is the seed of a random boolean mask over
    (qo_len, kv_len) that replaces `causal` and `window`; None: no such mask.
    """

    causal: bool = True
    window: Annotated[int, Field(ge=1, le=MAX_LEN)] | None = None
    soft_cap: Annotated[float, Field(ge=MIN_SCALE, le=1e4)] | None = None
    custom: Annotated[int, Field(ge=0, le=MAX_UID)] | None = None
    window_layers: Annotated[tuple[_Layer, ...], Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.window_layers is not None:
            if self.window is None:
                raise ValueError("window_layers without a window")
            if list(self.window_layers) != sorted(set(self.window_layers)):
                raise ValueError(f"window_layers {list(self.window_layers)} do not rise")
        if self.custom is not None and (self.window is not None or self.causal):
            raise ValueError("a custom mask stands alone: causal must be false and window null")

    def of_layer(self, layer: int) -> Mask:
        """The mask of one layer, without `window_layers`."""
        if self.window_layers is None:
            return self
        return _in_layer(self, has_window=layer in self.window_layers)


@cache
def _in_layer(mask: Mask, *, has_window: bool) -> Mask:
    return replace(mask, window=mask.window if has_window else None, window_layers=None)


@dataclass(frozen=True, config=_CONFIG)
class Request:
    """One request as an engine sees it: `extend_len` new tokens behind `cached_len` stored ones.

    `uid` names it across steps. With `prefix_of` its first `prefix_len` tokens stand in the pages of that request
    of the same step (whole pages, all of them cached by both).
    """

    cached_len: _Length = 0
    extend_len: Annotated[int, Field(ge=1, le=MAX_LEN)] = 1
    uid: _Uid = 0
    prefix_of: _Uid | None = None
    prefix_len: _Length = 0

    @property
    def qo_len(self) -> int:
        return self.extend_len

    @property
    def kv_len(self) -> int:
        """Tokens in the KV cache after this step (`device_len` of an engine)."""
        return self.cached_len + self.extend_len

    @property
    def stored_len(self) -> int:
        """Tokens whose K and V stand in the pool before the backend is called."""
        return self.cached_len


@dataclass(frozen=True, config=_CONFIG)
class KernelRequest:
    """One request as a kernel sees it: `qo_len` query rows over `kv_len` keys, independent of each other.

    `qo_len > kv_len` gives rows that see no key under a causal mask; either may be 0. All keys stand in the pool.
    """

    qo_len: _Length = 1
    kv_len: _Length = 1
    uid: _Uid = 0
    prefix_of: _Uid | None = None
    prefix_len: _Length = 0

    @property
    def stored_len(self) -> int:
        return self.kv_len


AnyRequest = Request | KernelRequest


def _request_tag(value: object) -> str:
    keys = cast("dict[str, object]", value) if isinstance(value, dict) else getattr(value, "__dict__", {})
    return "kernel" if "qo_len" in keys or "kv_len" in keys else "engine"


_TaggedRequest = Annotated[
    Annotated[Request, Tag("engine")] | Annotated[KernelRequest, Tag("kernel")],
    Discriminator(_request_tag),
]


@dataclass(frozen=True, config=_CONFIG)
class Step:
    """One batch. `phase` is what a hybrid dispatches on; `kind` says which sort of prefill batch it is.

    `finished`: of a session, uids that leave before this batch; who is in neither keeps its row and its pages.
    """

    requests: Annotated[tuple[_TaggedRequest, ...], Field(min_length=1, max_length=MAX_BATCH)]
    phase: Phase = "prefill"
    kind: Kind = "prefill"
    finished: tuple[_Uid, ...] = ()

    def __post_init__(self) -> None:
        if (self.phase == "decode") != (self.kind == "decode"):
            raise ValueError(f"phase {self.phase} does not go with kind {self.kind}")
        repeated = [uid for uid, count in Counter(r.uid for r in self.requests).items() if count > 1]
        if repeated:
            raise ValueError(f"uid {repeated[0]} stands twice in one step")
        if self.phase == "decode" and any(r.qo_len != 1 for r in self.requests):
            name = "extend_len" if isinstance(self.requests[0], Request) else "qo_len"
            raise ValueError(f"a decode step computes one token per request: every {name} must be 1")
        if self.kind == "verify" and len({r.qo_len for r in self.requests}) > 1:
            raise ValueError("a verify step checks equally many draft tokens per request")

    @property
    def num_rows(self) -> int:
        """Query rows of the whole batch."""
        return sum(r.qo_len for r in self.requests)

    @property
    def qo_lens(self) -> tuple[int, ...]:
        return tuple(r.qo_len for r in self.requests)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(r.kv_len for r in self.requests)


@dataclass(frozen=True, config=_CONFIG)
class Case:
    """One question: shapes, placement, mask, batches and the seed that fills them.

    Args:
        level: "engine" (a `Backend`: `Request`s) or "kernel" (a kernel-level adapter: `KernelRequest`s).
        kv_dtype: dtype of the KV cache; None means `dtype`. fp8 is dequantised by `k_scale` and `v_scale`.
        page_size: slots in a page. layout: NHD `[pages, page_size, heads, dim]` or HND
            `[pages, heads, page_size, dim]`.
        max_seq_len: columns of the page table, in tokens; None leaves one page beyond the longest request.
        spare_pages: pages that no request ever owns.
        strided: q, k and v are slices of one fused tensor, as a projection leaves them.
        sm_scale: factor on q . k; None means head_dim_qk ** -0.5.
        session: one pool and one page table live through all steps: what a step stored is what a later one reads
            (else each step finds what it needs, whatever the ones before it did). Then a request stays until a step
            names it in `finished`, may wait while others compute, and may borrow the pages of any that is there;
            `prefix_of` stands where it is admitted and holds as long as it stays. Tokens that it has then and does
            not borrow come from elsewhere, say from another host.

    Raises:
        ValueError: (pydantic's `ValidationError`) the first rule that is broken, in one sentence.
    """

    steps: Annotated[tuple[Step, ...], Field(min_length=1, max_length=64)]
    level: Level = "engine"
    heads: Heads = Heads()
    num_layers: Annotated[int, Field(ge=1, le=MAX_LAYERS)] = 2
    dtype: DType = "float16"
    kv_dtype: KVDType | None = None
    k_scale: _Scale = 1.0
    v_scale: _Scale = 1.0
    page_size: _Count = 1
    layout: Layout = "NHD"
    placement: Placement = "sequential"
    spare_pages: Annotated[int, Field(ge=1, le=MAX_SPARE_PAGES)] = 2
    max_seq_len: Annotated[int, Field(ge=1, le=2 * MAX_LEN)] | None = None
    mask: Mask = Mask()
    sm_scale: _Scale | None = None
    values: ValueKind = "needles"
    strided: bool = False
    seed: Annotated[int, Field(ge=0, lt=1 << 32)] = 0
    session: bool = False

    def __post_init__(self) -> None:
        longest = max(max(step.kv_lens) for step in self.steps)
        if self.max_seq_len is not None and self.max_seq_len < longest:
            raise ValueError(f"max_seq_len {self.max_seq_len} is below the longest kv_len {longest}")
        if longest > MAX_LEN:
            raise ValueError(f"kv_len {longest} is above the limit of {MAX_LEN} tokens")
        if self.kv_dtype not in (None, self.dtype) and not self.stored_as_fp8:
            raise ValueError(f"kv_dtype {self.kv_dtype} is neither dtype {self.dtype} nor an fp8 type")
        if self.level == "engine" and not self.mask.causal:
            raise ValueError(
                "a case of level engine is causal; non-causal and custom masks are for level kernel"
            )
        if not self.stored_as_fp8 and (self.k_scale, self.v_scale) != (1.0, 1.0):
            raise ValueError("k_scale and v_scale belong to an fp8 KV cache")
        self._check_window_layers()
        self._check_kinds()
        check_size(self)
        if self.session:
            check_session(self)
            return
        lengths: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            self._check_step(index, step, lengths)
            lengths |= {r.uid: r.kv_len for r in step.requests}

    def _check_window_layers(self) -> None:
        layers = self.mask.window_layers
        if layers is None:
            return
        if self.level != "engine":
            raise ValueError("window_layers is for a case of level engine")
        if layers[-1] >= self.num_layers:
            raise ValueError(f"window_layers names layer {layers[-1]}, num_layers is {self.num_layers}")
        if len(layers) == self.num_layers:
            raise ValueError("window_layers names every layer: leave it out")

    def _check_kinds(self) -> None:
        wanted = Request if self.level == "engine" else KernelRequest
        for index, step in enumerate(self.steps):
            for r in step.requests:
                if type(r) is not wanted:
                    raise ValueError(
                        f"step {index}, uid {r.uid}: a case of level {self.level} holds {wanted.__name__}s only"
                    )

    def _check_step(self, index: int, step: Step, lengths: dict[int, int]) -> None:
        if step.finished:
            raise ValueError(f"step {index}: finished belongs to a session")
        by_uid = {r.uid: r for r in step.requests}
        for r in step.requests:
            where = f"step {index}, uid {r.uid}"
            if isinstance(r, Request) and r.cached_len > lengths.get(r.uid, r.cached_len):
                raise ValueError(
                    f"{where}: cached_len {r.cached_len} is more than the {lengths[r.uid]} tokens it had before"
                )
            if r.prefix_of is None:
                if r.prefix_len:
                    raise ValueError(f"{where}: prefix_len without prefix_of")
                continue
            owner = by_uid.get(r.prefix_of)
            if owner is None or owner is r:
                raise ValueError(f"{where}: prefix_of {r.prefix_of} is no other request of this step")
            if owner.prefix_of is not None:
                raise ValueError(f"{where}: prefix_of {r.prefix_of} borrows itself; name the owner")
            if r.prefix_len % self.page_size or not r.prefix_len:
                raise ValueError(
                    f"{where}: prefix_len {r.prefix_len} is no positive multiple of page_size {self.page_size}"
                )
            if r.prefix_len > min(r.stored_len, owner.stored_len):
                raise ValueError(f"{where}: prefix_len {r.prefix_len} exceeds what both requests have stored")

    @property
    def stored_as_fp8(self) -> bool:
        return self.kv_dtype is not None and self.kv_dtype.startswith("float8")

    @property
    def cache_dtype(self) -> KVDType:
        return self.kv_dtype or self.dtype

    @property
    def scale(self) -> float:
        return self.sm_scale if self.sm_scale is not None else float(self.heads.head_dim_qk) ** -0.5

    @property
    def table_width(self) -> int:
        """Columns of the page table, in tokens."""
        if self.max_seq_len is not None:
            return self.max_seq_len
        return max(max(step.kv_lens) for step in self.steps) + self.page_size
