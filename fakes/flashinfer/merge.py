"""Merging attention states (v, s): s is a log-sum-exp in base 2.

Before 0.7.2 two empty states (-inf) give NaN in the pairwise kernels, and the list kernel starts from a
finite sentinel; from 0.7.2 on an empty state is neutral.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fakes import attend as numbers
from fakes import cuda, recorder, releases
from fakes.flashinfer.kernels import SENTINEL
from fakes.flashinfer.wrapper import LIBRARY, poisoned
from fakes.modes import UndefinedRead


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge two states into new tensors: v `[rows, num_heads, head_dim]`, s float32 `[rows, num_heads]`.

    Raises:
        RuntimeError: a tensor on the CPU, not contiguous, of another shape, or v neither fp16 nor bf16.
    """
    with cuda.paused():
        _check(v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
        _record("merge_state", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
        v, s = poisoned(tuple(v_a.shape), v_a.dtype), poisoned(tuple(s_a.shape), torch.float32)
    _pair_kernel(v_a, s_a, v_b, s_b, v, s, None)
    return v, s


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another state into (v, s), in the rows where `mask` (bool `[rows]`) holds, or in all.

    An s of another dtype than float32 is merged in a copy: it keeps its old values.
    """
    with cuda.paused():
        _check(v=v, s=s, v_other=v_other, s_other=s_other)
        record = _record("merge_state_in_place", v=v, s=s, v_other=v_other, s_other=s_other, mask=mask)
        target = s
        if s.dtype is not torch.float32:
            target = cuda.adopt(cuda.host(s).to(torch.float32))
            if record is not None:
                record.find(
                    "fi.merge-dtype",
                    "arrays",
                    "s",
                    f"s is {s.dtype}, must be torch.float32: it is not updated",
                )
    _pair_kernel(v, target, v_other, s_other, v, target, mask)


def merge_states(v: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge lists of states: v `[rows, states, num_heads, head_dim]`, s `[rows, states, num_heads]`."""
    with cuda.paused():
        _check(v=v, s=s)
        if not v.shape[0]:
            _refuse("(status == cudaSuccess)", "MergeStates kernel launch failed: invalid argument")
        _record("merge_states", v=v, s=s)
        rows, _, num_heads, dim = v.shape
        merged, lse = poisoned((rows, num_heads, dim), v.dtype), poisoned((rows, num_heads), torch.float32)
    _list_kernel(v, s, merged, lse)
    return merged, lse


def _check(**tensors: torch.Tensor) -> None:
    """What the library checks of its states: v, s, and for a pair the other v and s.

    Raises:
        RuntimeError: the first check that fails.
    """
    for name, tensor in tensors.items():
        if not cuda.on_device(tensor):
            _refuse(f"({name}.device().device_type == kDLCUDA)", f"{name} must be a CUDA tensor")
        if not cuda.host(tensor).is_contiguous():
            _refuse(f"({name}.IsContiguous())", f"{name} must be contiguous")
    (v_name, v), (s_name, s), *others = tensors.items()
    for name, tensor, rank in ((v_name, v, 3 if others else 4), (s_name, s, 2 if others else 3)):
        if tensor.dim() != rank:
            _refuse(f"({name}.ndim() == {rank})", f"{name} must be a {rank}D tensor")
    for (name, other), (like_name, like) in zip(others, ((v_name, v), (s_name, s)), strict=False):
        if other.shape != like.shape:
            _refuse(f"({like_name}.shape == {name}.shape)", f"{tuple(like.shape)} and {tuple(other.shape)}")
    if v.shape[:-1] != s.shape:
        _refuse(f"({v_name}.size == {s_name}.size)", f"{tuple(v.shape)} and {tuple(s.shape)}")
    record = recorder.current()
    if v.dtype in _BUILT or (v.dtype is torch.float32 and record is not None and record.extended):
        return
    raise RuntimeError(f"failed to dispatch data type {v.dtype}")


_BUILT = (torch.float16, torch.bfloat16)


def _refuse(condition: str, words: str) -> None:
    raise RuntimeError(f"Check failed: {condition} is false: {words}")


def _record(name: str, **arguments: Any) -> recorder.Recorder | None:
    record = recorder.current()
    if record is not None:
        record.call(LIBRARY, name, "merge", 0, arguments)
    return record


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """Values as the kernel reads them: by the dtype of the first v, whatever their own.

    Raises:
        UndefinedRead: they end before the kernel does.
    """
    if tensor.dtype is dtype:
        return _exact(tensor)
    if tensor.element_size() < dtype.itemsize:
        raise UndefinedRead(f"a v of {tensor.dtype} is read as {dtype}, past its end")
    words = cuda.host(tensor).reshape(-1).view(dtype)[: tensor.numel()]
    return words.reshape(tensor.shape).to(torch.float64).numpy()


def _exact(tensor: torch.Tensor) -> np.ndarray:
    record = recorder.current()
    known = None if record is None else record.exact_of(tensor)
    return known if known is not None else cuda.host(tensor).detach().to(torch.float64).numpy()


@cuda.kernel
def _pair_kernel(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v: torch.Tensor,
    s: torch.Tensor,
    mask: torch.Tensor | None,
) -> None:
    a, b = _exact(s_a), _exact(s_b)
    with np.errstate(invalid="ignore"):
        top = np.maximum(a, b)
        if releases.at_least(LIBRARY, "0.7.2"):
            top = np.where(np.isneginf(top), 0.0, top)
        weight_a, weight_b = np.exp2(a - top), np.exp2(b - top)
        total = weight_a + weight_b
        divisor = np.where(total == 0.0, 1.0, total)
        merged = (weight_a[..., None] * _exact(v_a) + weight_b[..., None] * _like(v_b, v_a.dtype)) / divisor[
            ..., None
        ]
    with np.errstate(divide="ignore"):
        lse = np.log2(total) + top
    untouched = None if mask is None else ~cuda.host(mask).numpy().astype(np.bool_)
    given = (v_a, s_a, v_b, s_b)
    numbers.rounded(merged, v.dtype, cuda.host(v), untouched, of=given)
    numbers.rounded(lse, torch.float32, cuda.host(s), untouched, of=given)


def _thread_rows(v: torch.Tensor) -> int:
    """Thread rows of the list kernel: several share a query row where there are at least as many states as rows.

    Measured on an H200 with 0.6.6: one row of three empty states of 128 bf16 numbers sums to a weight of 8.
    """
    rows, count, _, dim = v.shape
    if count < rows:
        return 1
    return 128 * max(16 // v.element_size(), dim // 32) // dim


@cuda.kernel
def _list_kernel(v: torch.Tensor, s: torch.Tensor, merged: torch.Tensor, lse: torch.Tensor) -> None:
    states, logs = _exact(v), _exact(s)
    count = logs.shape[1]
    if count == 1 < len(logs):  # of a single row, one state goes through the kernel for many
        result, total = np.array(states[:, 0]), np.array(logs[:, 0])
    elif releases.at_least(LIBRARY, "0.7.2"):
        top = logs.max(axis=1, initial=-np.inf)
        top = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp2(logs - top[:, None])
        weight = weights.sum(axis=1)
        result = (weights[..., None] * states).sum(axis=1) / np.where(weight == 0.0, 1.0, weight)[..., None]
        with np.errstate(divide="ignore"):
            total = np.log2(weight) + top
    else:  # each row of threads starts from a state of weight 1 at the sentinel
        top = logs.max(axis=1, initial=SENTINEL)
        weights = np.exp2(logs - top[:, None])
        first = np.exp2(SENTINEL - top) * _thread_rows(cuda.host(v))
        weight = weights.sum(axis=1) + (first if count else 0.0)
        weight = np.where(weight == 0.0, 1.0, weight)
        result = (weights[..., None] * states).sum(axis=1) / weight[..., None]
        total = np.log2(weight) + top
    numbers.rounded(result, merged.dtype, cuda.host(merged), of=(v, s))
    numbers.rounded(total, torch.float32, cuda.host(lse), of=(v, s))
