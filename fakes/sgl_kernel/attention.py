"""`sgl_kernel.attention` of sglang-kernel 0.4.6: merging two partial attentions."""

from __future__ import annotations

import numpy as np
import torch

from fakes import attend, cuda, modes, recorder
from fakes.sgl_kernel.checks import refuse
from fakes.sgl_kernel.findings import find, strict

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@cuda.kernel
def merge_state_v2(
    v_a: torch.Tensor,
    s_a: torch.Tensor,
    v_b: torch.Tensor,
    s_b: torch.Tensor,
    v_merged: torch.Tensor | None = None,
    s_merged: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One attention state out of two over disjoint keys.

    Args:
        v_a, v_b: contiguous `[rows, num_qo_heads, head_dim_vo]`, fp16, bf16 or float32.
        s_a, s_b: contiguous `[rows, num_qo_heads]`, natural-log LSE (FlashAttention's, transposed).
            Infinity of either sign is an empty state; two empty states give NaN.
        v_merged, s_merged: written where given.

    Returns:
        v_merged in the dtype of v_a, s_merged float32.

    Raises:
        RuntimeError: a tensor on the CPU, not contiguous, of another rank or shape, or a head dim that does
            not divide into 16-byte packs.
    """
    given = dict(locals())
    record = recorder.current()
    if record is not None:
        record.call("sgl_kernel", "merge_state_v2", "merge", 0, given)
    s_a, s_b = _single(s_a), _single(s_b)
    dtype = v_a.dtype if v_merged is None else v_merged.dtype
    _check(v_a, s_a, v_b, s_b, dtype)
    exact, exact_lse = _merged(
        _values(v_a, dtype, "v_a"), _exact(s_a), _values(v_b, dtype, "v_b"), _exact(s_b)
    )
    of = (v_a, s_a, v_b, s_b)
    v = attend.rounded(exact, dtype, None if v_merged is None else cuda.host(v_merged), of=of)
    s = attend.rounded(exact_lse, torch.float32, None if s_merged is None else cuda.host(s_merged), of=of)
    return v, s


def _merged(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    s_a, s_b = (np.where(np.isinf(s), -np.inf, s) for s in (s_a, s_b))
    top = np.fmax(s_a, s_b)
    if strict():
        for row, head in np.argwhere(np.isneginf(top))[:1].tolist():
            find(
                "merge.empty",
                "s_a",
                f"s_a[{row}, {head}] and s_b[{row}, {head}] are both infinite (empty): merged they give NaN",
            )
    with np.errstate(invalid="ignore"):  # two empty states: -inf - -inf
        weight_a, weight_b = np.exp(s_a - top), np.exp(s_b - top)
        total = weight_a + weight_b
        v = v_a * (weight_a / total)[..., None] + v_b * (weight_b / total)[..., None]
        return v, np.log(total) + top


def _single(s: torch.Tensor) -> torch.Tensor:
    if s.dtype == torch.float32:
        return s
    return cuda.adopt(s.to(torch.float32)) if cuda.on_device(s) else s.to(torch.float32)


def _exact(tensor: torch.Tensor) -> np.ndarray:
    record = recorder.current()
    known = None if record is None else record.exact_of(tensor)
    return cuda.host(tensor).to(torch.float64).numpy() if known is None else known


def _values(v: torch.Tensor, dtype: torch.dtype, name: str) -> np.ndarray:
    """Values as the kernel reads them: by the dtype of the result, whatever their own."""
    if v.dtype == dtype:
        return _exact(v)
    find("merge.dtype", name, f"{name} is {v.dtype}, the result {dtype}: its bytes are read as the latter")
    if v.element_size() < dtype.itemsize:
        raise modes.UndefinedRead(f"{name} is {v.dtype} and read as {dtype}, past its end")
    words = cuda.host(v).reshape(-1).view(dtype)[: v.numel()]
    return words.reshape(v.shape).to(torch.float64).numpy()


def _check(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor, dtype: torch.dtype
) -> None:
    for name, tensor in (("v_a", v_a), ("s_a", s_a), ("v_b", v_b), ("s_b", s_b)):
        if not cuda.on_device(tensor):
            refuse(f"{name} must be a CUDA tensor")
        if not tensor.is_contiguous():
            refuse(f"{name} must be contiguous")
    for name, tensor, rank in (("v_a", v_a, 3), ("s_a", s_a, 2), ("v_b", v_b, 3), ("s_b", s_b, 2)):
        if tensor.dim() != rank:
            refuse(f"{name} must be a {rank}D tensor")
    for one, a, other, b in (("v_a", v_a, "v_b", v_b), ("s_a", s_a, "s_b", s_b)):
        for axis, (size, expected) in enumerate(zip(a.shape, b.shape, strict=True)):
            if size != expected:
                refuse(
                    f"{one}.size({axis}) is {size}, {other}.size({axis}) is {expected}: they must be equal"
                )
    if s_a.shape != v_a.shape[:2]:
        refuse(f"s_a has shape {tuple(s_a.shape)}, v_a {tuple(v_a.shape)}: LSE must be [rows, heads]")
    if dtype not in _FLOATS:
        refuse(f"Unsupported data type of O: {str(dtype).removeprefix('torch.')}")
    pack = 16 // dtype.itemsize
    if v_a.shape[2] % pack:
        refuse(f"headsize must be multiple of pack_size:{pack}")
