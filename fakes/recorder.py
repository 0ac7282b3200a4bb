"""What the fakes saw: every library call, what it computed, and every rule that it broke.

`recording()` opens a `Recorder`; the fakes write to the one that is open. Without one they still compute, in faithful
mode, and record nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch

from fakes import cuda
from fakes.cuda import watch

Mode = Literal["strict", "faithful"]
Op = Literal["create", "plan", "attend", "merge", "append"]
"""What an entry point does. "append": it stores keys and values."""

MAX_RECORDED = 1 << 20
"""Integer tensors of up to this many elements are copied into the record."""


def storage_of(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor, or the device tensor that it is an alias of, lies in."""
    return cuda.host(tensor).untyped_storage().data_ptr()


@dataclass(slots=True, frozen=True)
class TensorRecord:
    """An argument as it was when the call was made. `values` is a copy, for integer and bool tensors only."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    on_device: bool
    data_ptr: int
    values: np.ndarray | None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRecord:
        plain = cuda.host(tensor)
        copied = plain.dtype in _COPIED and plain.numel() <= MAX_RECORDED
        return cls(
            dtype=plain.dtype,
            shape=tuple(plain.shape),
            stride=plain.stride(),
            on_device=cuda.on_device(tensor),
            data_ptr=plain.data_ptr(),
            values=plain.detach().numpy().copy() if copied else None,
        )


_COPIED = {torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool}


@dataclass(slots=True, frozen=True)
class Span:
    """One request of one attention call, as the library reads the arguments.

    `q_start`, `q_end`: its rows of the q handed over. `slots`: int64 `[kv_len]`, its keys in order, each as
    `page * page_size + offset` of the cache handed over (a row of k for ragged calls).
    """

    q_start: int
    q_end: int
    slots: np.ndarray


@dataclass(slots=True, frozen=True)
class Attended:
    """One attention computation, decoded. Tensors are host aliases of what was handed over, or copies (`kept`).

    `layout` is NHD, HND or "ragged". `window_left`, `window_right`: keys visible on either side of the row's own
    position (-1: all). `soft_cap` 0: none. `custom`: one bool `[qo_len, kv_len]` a span, or None. `scale` is the factor
    on q . k beside `k_scale`, which dequantises k as `v_scale` does v. `appended`: the call itself wrote new keys to k
    and v before it read them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    layout: str
    page_size: int
    spans: tuple[Span, ...]
    causal: bool
    window_left: int
    window_right: int
    soft_cap: float
    scale: float
    custom: tuple[np.ndarray, ...] | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    appended: bool = False

    def kept(self) -> Attended:
        """What goes on record: tensors that the open recorder does not know are copied, for they may be overwritten."""
        own = frozenset[int]() if current() is None else _open[-1].lasting
        if not own or _open[-1].muted:
            return self
        strangers = {
            name: tensor.detach().clone()
            for name, tensor in (("q", self.q), ("k", self.k), ("v", self.v))
            if storage_of(tensor) not in own
        }
        return replace(self, **strangers) if strangers else self


@dataclass(slots=True, frozen=True)
class Stored:
    """Where a call put new tokens. `k`: host alias of the cache of keys, 4-D, in `layout`; `slots`: int64 `[tokens]`,
    each as `page * page_size + offset` of it."""

    k: torch.Tensor
    layout: str
    page_size: int
    slots: np.ndarray


@dataclass(slots=True)
class Call:
    """One call of a public entry point.

    `name` is dotted and public (`BatchDecodeWithPagedKVCacheWrapper.plan`). `owner` numbers the wrapper object
    (0: a function); `plan` is the index of the plan call that a run executes. `arguments` holds each public
    parameter that was given, tensors as `TensorRecord`. `at` is the recorder's mark at that moment.
    """

    index: int
    library: str
    name: str
    op: Op
    owner: int
    arguments: dict[str, Any]
    at: Any
    plan: int | None = None
    attended: Attended | None = None
    stored: Stored | None = None


@dataclass(slots=True, frozen=True)
class Finding:
    """Something that the real library would silently get wrong. `kind` says which check owns it."""

    rule: str
    kind: Literal["arrays", "order"]
    argument: str
    message: str
    at: Any
    call: int
    request: int | None = None


@dataclass(slots=True, frozen=True)
class Wait:
    """The host waited for the device: what made it wait, and the line of the program that did."""

    what: str
    where: str
    at: Any


@dataclass(slots=True)
class Recorder:
    """The record of one execution. `at` is set by the harness (which batch, which layer) and copied into calls."""

    mode: Mode = "strict"
    at: Any = None
    muted: bool = False
    """Calls are still numbered, but neither their arguments are copied nor findings looked for."""
    calls: list[Call] = field(default_factory=list[Call])
    findings: list[Finding] = field(default_factory=list[Finding])
    waits: list[Wait] = field(default_factory=list[Wait])
    lasting: frozenset[int] = frozenset()
    """Addresses of storages that stay as they are while the record is read; none: all of them."""
    foreign: list[str] = field(default_factory=list[str])
    """Reads of memory that no argument describes, in words: what lies there decides the result."""
    _exact: dict[int, tuple[torch.Tensor, np.ndarray]] = field(
        default_factory=dict[int, tuple[torch.Tensor, np.ndarray]]
    )

    @property
    def strict(self) -> bool:
        """Whether findings are wanted now."""
        return self.mode == "strict" and not self.muted

    @property
    def extended(self) -> bool:
        """Whether the fakes take what the real kernels refuse and state as their extension: float32."""
        return self.mode == "strict"

    def call(
        self,
        library: str,
        name: str,
        op: Op,
        owner: int,
        arguments: dict[str, Any],
        plan: int | None = None,
    ) -> Call:
        """Record a call before it is carried out, with a snapshot of its arguments."""
        seen: dict[str, Any] = {}
        if not self.muted:
            seen = {
                key: TensorRecord.of(value) if isinstance(value, torch.Tensor) else value
                for key, value in arguments.items()
                if value is not None
            }
        entry = Call(len(self.calls), library, name, op, owner, seen, self.at, plan)
        self.calls.append(entry)
        return entry

    def find(
        self,
        rule: str,
        kind: Literal["arrays", "order"],
        argument: str,
        message: str,
        request: int | None = None,
    ) -> None:
        """Record a broken rule against the latest call; does nothing in faithful mode."""
        if self.strict:
            self.findings.append(
                Finding(rule, kind, argument, message, self.at, len(self.calls) - 1, request)
            )

    def keep_exact(self, result: torch.Tensor, exact: np.ndarray) -> None:
        """Remember the unrounded float64 values of a contiguous result. `exact` has its shape."""
        self._exact[result.untyped_storage().data_ptr()] = (result, exact)

    def knows(self, *tensors: torch.Tensor) -> bool:
        """Whether nothing was lost in these numbers before: they are the harness's own, or exact values are kept."""
        return not self.lasting or all(
            storage_of(t) in self.lasting or not t.numel() or self.exact_of(t) is not None for t in tensors
        )

    def exact_of(self, tensor: torch.Tensor) -> np.ndarray | None:
        """Unrounded values behind a result or a view of one; None if it is no such tensor or was changed since."""
        plain = cuda.host(tensor)
        kept = self._exact.get(plain.untyped_storage().data_ptr())
        if kept is None:
            return None
        result, exact = cuda.host(kept[0]), kept[1]
        if plain is result:
            return exact if _is_rounded(exact, plain) else None
        offset = plain.storage_offset() - result.storage_offset()
        if plain.dtype != result.dtype or offset < 0 or not plain.numel():
            return None
        last = offset + sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))
        if last >= result.numel():
            return None
        flat = np.ascontiguousarray(exact).reshape(-1)
        view = np.lib.stride_tricks.as_strided(
            flat[offset:], tuple(plain.shape), tuple(8 * s for s in plain.stride())
        )
        return view if _is_rounded(view, plain) else None


def _is_rounded(exact: np.ndarray, tensor: torch.Tensor) -> bool:
    """Whether a tensor still holds these values, rounded to its dtype; any NaN equals any."""
    rounded = torch.from_numpy(np.ascontiguousarray(exact)).to(tensor.dtype)
    if tensor.element_size() == 2 and torch.equal(rounded.view(torch.int16), tensor.view(torch.int16)):
        return True  # torch compares integers faster than halves
    return torch.equal(rounded, tensor) or torch.equal(rounded.nan_to_num(), tensor.detach().nan_to_num())


_open: list[Recorder] = []


class resumed:  # noqa: N801 - used like the function `recording`
    """Let the fakes write to this recorder. Recorders nest; the innermost one is written to."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> Recorder:
        _open.append(self._recorder)
        return self._recorder

    def __exit__(self, *_: object) -> None:
        _open.pop()


def recording(mode: Mode = "strict") -> AbstractContextManager[Recorder]:
    """Open a new recorder for the fakes."""
    return resumed(Recorder(mode=mode))


def reads_foreign(why: str) -> None:
    """Say that the library reads memory that no argument describes, and goes on with what it finds."""
    if _open:
        _open[-1].foreign.append(why)


def current() -> Recorder | None:
    """The open recorder, if any."""
    return _open[-1] if _open else None


class _OpenRecorder:
    """Hands what a simulated device notices to the recorder that is open."""

    @property
    def wants_hazards(self) -> bool:
        return bool(_open) and _open[-1].strict

    @property
    def wants_waits(self) -> bool:
        return bool(_open) and not _open[-1].muted

    def hazard(self, hazard: watch.Hazard) -> None:
        _open[-1].find(hazard.rule, "order", hazard.argument, hazard.message)

    def host_waits(self, wait: watch.HostWait) -> None:
        _open[-1].waits.append(Wait(wait.what, wait.where, _open[-1].at))


watch.watchers.append(_OpenRecorder())
