"""`Plan`: the host part of a plan, with the checks that FlashInfer's C++ planners make."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from fakes import cuda, recorder, releases
from fakes.flashinfer.arrays import first, on_host, words
from fakes.flashinfer.schedule import Schedule, check_scratch, needs_no_split, plan_decode, plan_prefill
from fakes.flashinfer.staging import Staged
from fakes.modes import UndefinedRead, WouldCrash, illegal_access

Kernel = Literal["cuda_core", "fa2", "fa3"]

_tokens = itertools.count(1)

COMPILED = {torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2}
GROUPS = {
    "0.6.6": (1, 2, 3, 4, 8),
    "0.7.2": (1, 2, 3, 4, 6, 8, 16),
    "0.7.4": (1, 2, 3, 4, 6, 8, 16),
}
"""Group sizes that the CUDA-core decode kernel is built for."""


_made: weakref.WeakValueDictionary[int, Plan] = weakref.WeakValueDictionary()


@dataclass(slots=True, weakref_slot=True)
class Plan:
    """What a plan leaves on the host: never read again from the arrays that it was made of.

    `qo`, `kv` are the indptr arrays as the planner read them; `kv_lens` is what fa3 computes with (fa2 and CUDA cores
    derive lengths on the device). `capped`, `windowed`: whether the kernel was built with a soft cap, a window.
    """

    kernel: Kernel
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    qo: list[int]
    kv: list[int]
    capped: bool
    windowed: bool
    window_left: int = -1
    kv_lens: list[int] | None = None
    graph: bool = False
    total_rows: int = 0
    fixed_split: int = -1
    disable_split: bool = False
    q_dtype: torch.dtype = torch.float16
    kv_dtype: torch.dtype = torch.float16
    qo_last: int = 0
    scratch: bool = False
    """Whether a run writes to the float workspace."""
    call: int | None = None
    at: Any = None
    token: int = field(default_factory=lambda: next(_tokens))
    read: Any = None
    """Spans read last, with the bytes that they were read from."""
    pool_checked: int | None = None
    """Pages of the pool that the page ids were compared with."""
    warned: Any = None
    """Mark of the batch that findings about this plan's use were recorded for."""
    staged: Staged | None = None
    """Its way to the device, while that is asynchronous."""
    _schedule: Schedule | None = None

    def __post_init__(self) -> None:
        _made[self.token] = self

    def held_as(self, token: int) -> Plan | None:
        """The plan that a kernel launched with this one follows when it finds `token` in the int workspace.

        A kernel of graph mode follows any later plan whose arrays lie where its own do; else None.
        """
        if token == self.token:
            return self
        later = _made.get(token) if self.graph else None
        if later is None or later._arrays != self._arrays:
            return None
        return later

    @property
    def _arrays(self) -> tuple[Any, ...]:
        """What decides where a plan of graph mode has its arrays in the int workspace."""
        return (
            self.kernel,
            self.graph,
            self.batch_size,
            self.num_qo_heads,
            self.num_kv_heads,
            self.head_dim,
            self.total_rows,
        )

    @property
    def batch_size(self) -> int:
        return len(self.qo) - 1

    @property
    def is_cut(self) -> bool:
        """Whether there are tiles that a planner cut: kernels of single calls cut what they are given, all of it."""
        return self.batch_size > 0

    def schedule(self) -> Schedule:
        if self._schedule is None:
            pages = [b - a for a, b in itertools.pairwise(self.kv)]
            if self.kernel == "cuda_core":
                self._schedule = plan_decode(
                    pages,
                    num_qo_heads=self.num_qo_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    page_size=self.page_size,
                    graph=self.graph,
                )
            else:
                self._schedule = plan_prefill(
                    [b - a for a, b in itertools.pairwise(self.qo)],
                    pages,
                    num_qo_heads=self.num_qo_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    page_size=self.page_size,
                    total_rows=self.total_rows,
                    graph=self.graph,
                    window_left=self.window_left,
                    fixed_split=self.fixed_split,
                    disable_split=self.disable_split,
                )
        return self._schedule

    def may_split(self) -> bool:
        if self.disable_split and not self.graph:
            return False
        pages = [b - a for a, b in itertools.pairwise(self.kv)]
        return self.graph or self.fixed_split > 0 or not needs_no_split(pages, self.page_size)


def check_compiled(*dtypes: torch.dtype) -> None:
    """A kernel must exist for these dtypes. Strict mode takes float32 as well.

    Raises:
        KeyError: the dtype, as FlashInfer's code generator does.
    """
    for dtype in dtypes:
        if dtype in COMPILED:
            continue
        record = recorder.current()
        if dtype is torch.float32 and record is not None and record.extended:
            continue
        raise KeyError(dtype)


def check_builds(backend: str, q_dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """An fa3 kernel that mixes two 16-bit dtypes is generated, and its build fails.

    Raises:
        RuntimeError: as FlashInfer's compiler driver does.
    """
    if backend == "fa3" and q_dtype != kv_dtype and q_dtype.itemsize == kv_dtype.itemsize == 2:
        raise RuntimeError(
            f"Ninja build failed. Ninja output: batch_prefill_with_kv_cache of q {q_dtype} and kv {kv_dtype}"
        )


def check_group(num_qo_heads: int, num_kv_heads: int) -> None:
    """CUDA-core decode: the group size must be one that was built.

    Raises:
        RuntimeError: it is not.
    """
    group = num_qo_heads // num_kv_heads
    if group not in GROUPS[releases.selected("flashinfer")]:
        raise RuntimeError(f"Unsupported group_size: {group}")


def read_host(
    qo_indptr: torch.Tensor, kv_indptr: torch.Tensor, batch_size: int
) -> tuple[list[int], list[int]]:
    """The two indptr arrays as the prefill planner reads them: in the width that kv_indptr's dtype compiles.

    Raises:
        UndefinedRead: kv_indptr ends before its batch does.
    """
    if kv_indptr.dtype is torch.int64:  # a 64-bit kernel: int32 row offsets are read two at a time
        qo = words(on_host(qo_indptr), 64)[: batch_size + 1]
        missing = batch_size + 1 - qo.size
        if missing > 0:
            recorder.reads_foreign(f"qo_indptr is read as 64-bit words, of which it has {qo.size}")
        qo = np.concatenate((qo, np.zeros(missing, np.int64)))
        return qo.tolist(), first(words(on_host(kv_indptr), 64), batch_size + 1, "kv_indptr")
    qo = first(words(on_host(qo_indptr)), batch_size + 1, "qo_indptr")
    return qo, first(words(on_host(kv_indptr)), batch_size + 1, "kv_indptr")


def make_prefill(plan: Plan, workspace: torch.Tensor, kv_lens: torch.Tensor) -> None:
    """The fa2 or fa3 planner's own checks. `kv_lens` are the lengths that the Python side computed.

    Raises:
        RuntimeError: lengths fall, heads do not divide, or the float workspace is too small.
    """
    if plan.num_qo_heads % plan.num_kv_heads:
        raise RuntimeError(
            f"num_qo_heads {plan.num_qo_heads} should be divisible by num_kv_heads {plan.num_kv_heads}"
        )
    if plan.kernel == "fa3":
        plan.kv_lens = first(words(kv_lens), plan.batch_size, "seq_lens")
        for i, length in enumerate(plan.kv_lens):
            if length < 0:
                raise RuntimeError(f"kv_len[{i}]{length} should be non-negative")
            _check_rise("qo_indptr", plan.qo, i)
        return
    for i in range(plan.batch_size):
        _check_rise("qo_indptr", plan.qo, i)
        _check_rise("kv_indptr", plan.kv, i)
    _take_scratch(plan, workspace)


def make_decode(plan: Plan, workspace: torch.Tensor) -> None:
    """The CUDA-core decode planner's own checks.

    Raises:
        RuntimeError: the group size was not built, or the float workspace is too small.
    """
    check_group(plan.num_qo_heads, plan.num_kv_heads)
    if min((b - a for a, b in itertools.pairwise(plan.kv)), default=0) >= 0:
        _take_scratch(plan, workspace)
    else:
        recorder.reads_foreign(
            "kv_indptr falls: a request with less than no pages gets no block, and one block more than there is work "
            "for runs by what the pinned buffer held"
        )


def _take_scratch(plan: Plan, workspace: torch.Tensor) -> None:
    if plan.may_split():
        check_scratch(plan.schedule(), cuda.host(workspace).nbytes)
        plan.scratch = bool(plan.schedule().scratch)


def read_decode_indptr(indptr: torch.Tensor, batch_size: int) -> list[int]:
    """kv_indptr as the CUDA-core planner reads it: one entry more than `last_page_len` has.

    Raises:
        WouldCrash: an array without its leading 0 for one request: the planner divides by what lies behind
        it.
        UndefinedRead: any other array that is too short.
    """
    array = words(on_host(indptr))
    if array.size == 1 and batch_size == 1:
        recorder.reads_foreign("indptr[1] is read, the array has 1 entry")
        if releases.at_least("flashinfer", "0.7.2"):
            raise illegal_access("indptr[1] is read, the array has 1 entry")
        raise WouldCrash(
            "SIGFPE: indptr[1] is read, the array has 1 entry, and the planner divides by the result"
        )
    if array.size < batch_size + 1:
        raise UndefinedRead(
            f"indptr[{array.size}] is read, but the array has {array.size} entries for a batch of "
            f"{batch_size}"
        )
    return array[: batch_size + 1].tolist()


def longest(lengths: torch.Tensor) -> int:
    """Largest length, by the call that the release makes: each fails on no lengths in its own way."""
    if lengths.numel():
        return int(lengths.max())
    return int(lengths.max()) if releases.at_least("flashinfer", "0.7.2") else int(max(lengths))


def _check_rise(name: str, indptr: Sequence[int], i: int) -> None:
    if indptr[i + 1] < indptr[i]:
        raise RuntimeError(f"{name}[{i + 1}]{indptr[i + 1]} - {name}[{i}]{indptr[i]} should be non-negative")
