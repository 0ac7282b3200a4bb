"""Attention of one request without a plan: `single_decode_...` and `single_prefill_with_kv_cache`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch

from fakes import cuda, recorder
from fakes.flashinfer import rules
from fakes.flashinfer.kernels import Launch, execute
from fakes.flashinfer.plans import Plan, check_compiled, check_group
from fakes.flashinfer.wrapper import (
    LIBRARY,
    check_on_device,
    check_positions,
    poisoned,
    refuse_uncomputed,
    resolve_backend,
)
from fakes.recorder import Span


def single_decode_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_tensor_cores: bool = False,
    q_scale: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    return_lse: bool = False,
) -> Any:
    """One query row: q `[num_qo_heads, head_dim]`, k and v `[kv_len, num_kv_heads, head_dim]` or HND.

    Returns out like q, and with `return_lse` the LSE, float32 `[num_qo_heads]`, base 2.
    """
    _check(pos_encoding_mode, kv_layout)
    with cuda.paused():
        if not use_tensor_cores:
            check_group(q.shape[0], k.shape[1] if kv_layout == "NHD" else k.shape[0])
        check_compiled(q.dtype, k.dtype)
        check_on_device(q=q, k=k, v=v)
        out, lse = poisoned(tuple(q.shape), q.dtype), poisoned((q.shape[0],), torch.float32)
        call = _record(
            "single_decode_with_kv_cache",
            q=q,
            k=k,
            v=v,
            kv_layout=kv_layout,
            use_tensor_cores=use_tensor_cores,
            q_scale=q_scale,
            k_scale=k_scale,
            v_scale=v_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            return_lse=return_lse,
        )
        launch = _launch(
            "fa2" if use_tensor_cores else "cuda_core",
            call,
            q.shape[-1],
            False,
            window_left,
            logits_soft_cap,
            sm_scale,
        )
        launch.q_scale, launch.k_scale = q_scale or 1.0, k_scale or 1.0
        launch.v_scale = 1.0 if v_scale is None else v_scale
    _kernel(launch, kv_layout == "NHD", q, k, v, out, lse, None)
    return (out, lse) if return_lse else out


def single_prefill_with_kv_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale_q: torch.Tensor | None = None,
    scale_k: torch.Tensor | None = None,
    scale_v: torch.Tensor | None = None,
    o_dtype: torch.dtype | None = None,
    custom_mask: torch.Tensor | None = None,
    packed_custom_mask: torch.Tensor | None = None,
    causal: bool = False,
    kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE",
    use_fp16_qk_reduction: bool = False,
    sm_scale: float | None = None,
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Any:
    """Rows of one request. q `[qo_len, num_qo_heads, head_dim_qk]`, k and v `[kv_len, num_kv_heads, dim]`.

    Returns out `[qo_len, num_qo_heads, head_dim_vo]`, and with `return_lse` the LSE `[qo_len,
    num_qo_heads]`, base 2.
    """
    _check(pos_encoding_mode, kv_layout)
    refuse_uncomputed(
        scale_q=scale_q, scale_k=scale_k, scale_v=scale_v, use_fp16_qk_reduction=use_fp16_qk_reduction
    )
    with cuda.paused():
        masked = custom_mask is not None or packed_custom_mask is not None
        kernel = resolve_backend(backend, q.dtype, k.dtype, masked)
        check_compiled(q.dtype, k.dtype)
        check_on_device(q=q, k=k, v=v)
        out = poisoned((*q.shape[:-1], v.shape[-1]), o_dtype or q.dtype)
        lse = poisoned(tuple(q.shape[:2]), torch.float32)
        call = _record(
            "single_prefill_with_kv_cache",
            q=q,
            k=k,
            v=v,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            causal=causal,
            kv_layout=kv_layout,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            backend=backend,
            return_lse=return_lse,
        )
        kv_len = k.shape[0] if kv_layout == "NHD" else k.shape[1]
        custom = _mask(custom_mask, packed_custom_mask, q.shape[0], kv_len)
        launch = _launch(
            kernel, call, q.shape[-1], causal and not masked, window_left, logits_soft_cap, sm_scale
        )
    _kernel(launch, kv_layout == "NHD", q, k, v, out, lse, custom)
    return (out, lse) if return_lse else out


single_prefill_with_kv_cache_return_lse = functools.partial(single_prefill_with_kv_cache, return_lse=True)


def _check(pos_encoding_mode: str, kv_layout: str) -> None:
    check_positions(pos_encoding_mode)
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")


def _record(name: str, **arguments: Any) -> Any:
    record = recorder.current()
    return None if record is None else record.call(LIBRARY, name, "attend", 0, arguments)


def _mask(
    mask: torch.Tensor | None, packed: torch.Tensor | None, qo_len: int, kv_len: int
) -> list[np.ndarray] | None:
    """The mask as the kernel reads it; what lies past its end is taken as False."""
    if mask is None and packed is None:
        return None
    if packed is not None:
        bits = np.unpackbits(cuda.host(packed).reshape(-1).numpy(), bitorder="little")
    else:
        assert mask is not None
        bits = cuda.host(mask).reshape(-1).numpy()
        record = rules.strict()
        if record is not None:
            rules.mask_size(record, "custom_mask", bits.size, qo_len * kv_len)
    full = np.zeros(qo_len * kv_len, np.bool_)
    full[: bits.size] = bits[: full.size]
    return [full.reshape(qo_len, kv_len)]


def _launch(
    kernel: Any,
    call: Any,
    dim: int,
    causal: bool,
    window_left: int,
    soft_cap: float | None,
    sm_scale: float | None,
) -> Launch:
    plan = Plan(
        kernel=kernel,
        num_qo_heads=1 << 30,
        num_kv_heads=1,
        head_dim=dim,
        page_size=1,
        qo=[0],
        kv=[0],
        capped=bool(soft_cap),
        windowed=window_left >= 0,
    )
    return Launch(
        plan=plan,
        call=call,
        layout="ragged",
        page_size=1,
        causal=causal,
        window_left=max(window_left, -1),
        soft_cap=soft_cap or 0.0,
        scale=sm_scale if sm_scale is not None else dim**-0.5,
    )


@cuda.kernel
def _kernel(
    launch: Launch,
    tokens_first: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    custom: list[np.ndarray] | None,
) -> None:
    q, k, v, out, lse = (cuda.host(t) for t in (q, k, v, out, lse))
    if q.ndim == 2:
        q, out, lse = q[None], out[None], lse[None]
    if not tokens_first:
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    execute(launch, (Span(0, q.shape[0], np.arange(k.shape[0])),), q, k, v, out, lse, custom)
