"""What FlashAttention 3's forward operator refuses, in its order and its words."""

from __future__ import annotations

from typing import NoReturn

import torch

from fakes import cuda, recorder
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.masking import Visible

_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e4m3fn)
_MAX_HEAD_DIM = 256


def check(args: Forward) -> Shape:
    """Sizes of a call that the operator accepts.

    Raises:
        RuntimeError: the first check that fails.
    """
    q, k, v = args.q, args.k, args.v
    _dtypes(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        _on_cuda(name, tensor)
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        refuse("Input tensor must have contiguous last dimension")
    if args.page_table is not None:
        _on_cuda("page_table", args.page_table)
        if args.page_table.dtype != torch.int32:
            refuse("page_table must have dtype torch.int32")
        if args.page_table.stride(-1) != 1:
            refuse("page_table must have contiguous last dimension")
    if args.cu_seqlens_q is not None:
        _cumulative("cu_seqlens_q", args.cu_seqlens_q)
        if args.max_seqlen_q is None:
            refuse("max_seqlen_q must be provided if cu_seqlens_q is provided")
    if args.cu_seqlens_k is not None:
        _cumulative("cu_seqlens_k", args.cu_seqlens_k)
        if args.max_seqlen_k is None:
            refuse("max_seqlen_k must be provided if cu_seqlens_k is provided")
    shape = _sizes(args)
    _shapes(args, shape)
    _lengths(args, shape)
    _head_dims(args, shape)
    _optional(args, shape)
    return shape


def refuse(message: str) -> NoReturn:
    raise RuntimeError(message)


def _on_cuda(name: str, tensor: torch.Tensor) -> None:
    if not cuda.on_device(tensor):
        refuse(f"{name} must be on CUDA")


def _cumulative(name: str, tensor: torch.Tensor) -> None:
    _on_cuda(name, tensor)
    if not tensor.is_contiguous():
        refuse(f"{name} must be contiguous")
    if tensor.dtype != torch.int32:
        refuse(f"{name} must have dtype torch.int32")


def _dtypes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    record = recorder.current()
    extended = q.dtype == torch.float32 and record is not None and record.extended  # ours, not the library's
    if q.dtype not in _FLOATS and not extended:
        refuse("FlashAttention only supports fp16, bf16, and fp8_e4m3 data type")
    if k.dtype != q.dtype:
        refuse("query and key must have the same dtype")
    if v.dtype != q.dtype:
        refuse("query and value must have the same dtype")


def _sizes(args: Forward) -> Shape:
    q, k, v = args.q, args.k, args.v
    if args.cu_seqlens_q is None:
        batch, seqlen_q = q.shape[0], q.shape[1]
    else:
        batch, seqlen_q = args.cu_seqlens_q.shape[0] - 1, int(args.max_seqlen_q or 0)
    if args.page_table is not None:
        batch_k, seqlen_k = args.page_table.shape[0], args.page_table.shape[1] * k.shape[1]
    elif args.cu_seqlens_k is not None:
        batch_k, seqlen_k = args.cu_seqlens_k.shape[0] - 1, int(args.max_seqlen_k or 0)
    else:
        batch_k, seqlen_k = k.shape[0], k.shape[1]
    if args.kv_batch_idx is None and batch != batch_k:
        refuse("batch_size must be equal to batch_size_k")
    shape = Shape(batch, batch_k, seqlen_q, seqlen_k, q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1])
    if shape.dim > _MAX_HEAD_DIM:
        refuse(f"FlashAttention forward only supports head dimension at most {_MAX_HEAD_DIM}")
    if shape.heads % shape.heads_k:
        refuse("Number of heads in key/value must divide number of heads in query")
    if shape.dim_v != shape.dim:
        wide = 128 < shape.dim <= 192 and 96 < shape.dim_v <= 128
        if not wide and not (shape.dim <= 64 and shape.dim_v <= 512):
            refuse(
                "If V headdim is different from Q/K dim, we only support Q/K headdim in (128, 192] "
                "and V headdim in (96, 128], or (Q/K <= 64 and V <= 512)."
            )
        if shape.dim_v > 256 and args.q.dtype == torch.float8_e4m3fn:
            refuse("HeaddimV > 256 requires fp16 and bf16 data type")
    return shape


def _shapes(args: Forward, s: Shape) -> None:
    q, k, v = args.q, args.k, args.v
    if args.cu_seqlens_q is None:
        _shape(q, (s.batch, s.seqlen_q, s.heads, s.dim), "q", "(batch_size, seqlen_q, num_heads, head_size)")
    else:
        _shape(q, (q.shape[0], s.heads, s.dim), "q", "(total_q, num_heads, head_size)")
    if args.page_table is not None:
        outer, words = (k.shape[0], k.shape[1]), "num_pages, page_size"
    elif args.cu_seqlens_k is not None:
        outer, words = (k.shape[0],), "total_k"
    else:
        outer, words = (s.batch_k, s.seqlen_k), "batch_size_k, seqlen_k"
    _shape(k, (*outer, s.heads_k, s.dim), "k", f"({words}, num_heads_k, head_size)")
    _shape(v, (*outer, s.heads_k, s.dim_v), "v", f"({words}, num_heads_k, head_size_v)")
    if args.page_table is not None and args.page_table.dim() != 2:
        refuse("page_table must have shape (batch_size_k, max_num_pages_per_seq)")


def _shape(tensor: torch.Tensor, expected: tuple[int, ...], name: str, words: str) -> None:
    if tuple(tensor.shape) != expected:
        refuse(f"{name} must have shape {words}")


def _lengths(args: Forward, s: Shape) -> None:
    for name, tensor in (("seqused_q", args.seqused_q), ("seqused_k", args.seqused_k)):
        if tensor is None:
            continue
        if tensor.dtype != torch.int32:
            refuse(f"{name} must have dtype int32")
        _on_cuda(name, tensor)
        if not tensor.is_contiguous():
            refuse(f"{name} must be contiguous")
        _shape(tensor, (s.batch,), name, "(batch_size)")


def _head_dims(args: Forward, s: Shape) -> None:
    unit = 16 if args.q.dtype == torch.float8_e4m3fn else 8
    if s.dim % unit:
        refuse(f"head_size should be a multiple of {unit}")
    if s.dim_v % unit:
        refuse(f"head_size_v should be a multiple of {unit}")


def _optional(args: Forward, s: Shape) -> None:
    if args.out is not None:
        expected = torch.bfloat16 if args.q.dtype == torch.float8_e4m3fn else args.q.dtype
        if args.out.dtype != expected:
            refuse(
                "For FP16/BF16 input, output must have the same dtype as inputs. "
                "For FP8 input, output must have dtype BF16"
            )
        _on_cuda("out", args.out)
        if args.out.stride(-1) != 1:
            refuse("Output tensor must have contiguous last dimension")
        if args.cu_seqlens_q is None:
            words = "(batch_size, seqlen_q, num_heads, head_size_v)"
        else:
            words = "(total_q, num_heads, head_size_v)"
        _shape(args.out, (*args.q.shape[:-1], s.dim_v), "out", words)
    if args.k_new is not None:
        _new_keys(args, args.k_new, s)
    if args.kv_batch_idx is not None:
        _on_cuda("kv_batch_idx", args.kv_batch_idx)
        if not args.kv_batch_idx.is_contiguous():
            refuse("kv_batch_idx must be contiguous")
        if args.kv_batch_idx.dtype != torch.int32:
            refuse("kv_batch_idx must have dtype int32")
    if args.num_splits > 256:
        refuse("num_splits > 256 not supported")
    if args.q.dtype == torch.float8_e4m3fn:
        _descales(args, s)
    if args.sinks is not None:
        if args.sinks.dtype != torch.bfloat16:
            refuse("sinks must have dtype bfloat16")
        _on_cuda("sinks", args.sinks)
        _shape(args.sinks, (s.heads,), "sinks", "(num_heads)")
        if not args.sinks.is_contiguous():
            refuse("sinks must be contiguous")


def _new_keys(args: Forward, k_new: torch.Tensor, s: Shape) -> None:
    v_new = args.v_new
    if v_new is None:
        refuse("If k_new is supplied, v_new must also be passed in")
    if args.seqused_k is None:
        refuse("If k_new is supplied, seqlens_k must also be passed in")
    if s.seqlen_q > s.seqlen_k:
        refuse("If k_new is supplied, it must have seqlen <= the seqlen of the KV cache")
    if args.cu_seqlens_k_new is not None:
        _cumulative("cu_seqlens_k_new", args.cu_seqlens_k_new)
    if k_new.dtype != args.q.dtype:
        refuse("k_new must have the same dtype as query")
    if v_new.dtype != args.q.dtype:
        refuse("v_new must have the same dtype as query")
    _on_cuda("k_new", k_new)
    _on_cuda("v_new", v_new)
    if k_new.stride(-1) != 1:
        refuse("k_new tensor must have contiguous last dimension")
    if v_new.stride(-1) != 1:
        refuse("v_new tensor must have contiguous last dimension")
    if args.cu_seqlens_k_new is None:
        outer, words = (s.batch, k_new.shape[1]), "batch_size, seqlen_k_new"
    else:
        outer, words = (k_new.shape[0],), "total_k_new"
        _shape(args.cu_seqlens_k_new, (s.batch + 1,), "cu_seqlens_k_new", "(batch_size + 1)")
    _shape(k_new, (*outer, s.heads_k, s.dim), "k_new", f"({words}, num_heads_k, head_size)")
    _shape(v_new, (*outer, s.heads_k, s.dim_v), "v_new", f"({words}, num_heads_k, head_size_v)")


def _descales(args: Forward, s: Shape) -> None:
    scales = (("q_descale", args.q_descale), ("k_descale", args.k_descale), ("v_descale", args.v_descale))
    for name, scale in scales:
        if scale is None:
            continue
        _on_cuda(name, scale)
        _shape(scale, (s.batch, s.heads_k), name, "(batch_size, num_heads_k)")
        if scale.dtype != torch.float32:
            refuse(
                f"expected scalar type Float but found {str(scale.dtype).removeprefix('torch.').capitalize()}"
            )


def metadata_size(batch: int, mask: Visible) -> int:
    """Integers in a scheduler's metadata: vectors over the batch, rounded up to 4 each, and a semaphore."""
    vectors = 2 + (not mask.local) + (mask.causal or mask.local)
    return 1 + -(-batch // 4) * 4 * vectors


def check_scheduler(args: Forward, s: Shape, mask: Visible) -> None:
    """The metadata must have the size that this call's mask and batch ask for."""
    metadata = args.scheduler_metadata
    if metadata is None:
        return
    _on_cuda("scheduler_metadata", metadata)
    _shape(metadata, (metadata_size(s.batch, mask),), "scheduler_metadata", "(metadata_size)")
    if not metadata.is_contiguous():
        refuse("scheduler_metadata must be contiguous")
    if metadata.dtype != torch.int32:
        refuse("scheduler_metadata must have dtype int32")
