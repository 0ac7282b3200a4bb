"""FlashAttention 3's forward operator, which both entry points of `flash_attn` call.

Sources: the operator's messages as they stand in sglang-kernel 0.4.6's binary; its public C++ entry point for
the order of checks and for how windows and lengths are simplified; measurements on a GPU where the contract
says so.
"""

from __future__ import annotations

import numpy as np
import torch

from fakes import attend, cuda, modes, recorder
from fakes.loaded import Range, without_unloaded
from fakes.recorder import Attended, Call, Span
from fakes.sgl_kernel import append, checks, loads, readings, tails
from fakes.sgl_kernel.arguments import Forward, Shape
from fakes.sgl_kernel.masking import Visible, visible
from fakes.sgl_kernel.pages import UNREADABLE, Keys

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]

_ROUNDS_TO = {torch.float8_e4m3fn: torch.bfloat16}


def forward(args: Forward, call: Call | None) -> Results:
    """Check, read, attend, round.

    Returns:
        out and LSE (float32, natural log, `[heads, rows]`, or `[batch, heads, rows]` without `cu_seqlens_q`),
        then the split buffers: None unless `num_splits` asks for more than one.

    Raises:
        RuntimeError: what the operator refuses, in its words.
        UndefinedRead: `cu_seqlens_q` leads past the rows of q.
    """
    shape = checks.check(args)
    mask = visible(
        args.causal,
        args.window,
        seqlen_q=shape.seqlen_q,
        seqlen_k=shape.seqlen_k,
        head_dim=shape.dim,
        paged=args.page_table is not None,
    )
    rows = args.q.shape[0] if args.cu_seqlens_q is not None else shape.batch * shape.seqlen_q
    checks.check_scheduler(args, shape, mask)
    bounds = readings.query_bounds(args, shape, rows)
    lens = readings.key_lengths(args, shape)
    readings.planned_lengths(args, shape, lens)
    reading = (readings.keys if args.k_new is None else append.append)(args, shape, lens)
    spans = tuple(Span(*bound, slots) for bound, slots in zip(bounds, reading.slots, strict=True))
    q = cuda.host(args.q)
    flat_q = q if args.cu_seqlens_q is not None else q.reshape(rows, shape.heads, shape.dim)
    if call is not None:
        call.attended = Attended(
            q=flat_q,
            k=cuda.host(args.k),
            v=cuda.host(args.v),
            layout=reading.layout,
            page_size=reading.page_size,
            spans=spans,
            causal=mask.causal,
            window_left=mask.left,
            window_right=-1 if mask.causal else mask.right,
            soft_cap=args.soft_cap,
            scale=args.scale,
            appended=args.k_new is not None,
        ).kept()
    if args.k.numel() == 0 and rows:
        # The launch is skipped: zeros, and an LSE of the other sign than an empty request's beside others.
        exact, exact_lse = np.zeros((rows, shape.heads, shape.dim_v)), np.full((rows, shape.heads), np.inf)
    else:
        exact, exact_lse = _attend(args, shape, flat_q, spans, reading, mask)
    if args.cu_seqlens_q is None:
        exact = exact.reshape(shape.batch, shape.seqlen_q, shape.heads, shape.dim_v)
        exact_lse = exact_lse.reshape(shape.batch, shape.seqlen_q, shape.heads).transpose(0, 2, 1)
    else:
        exact_lse = exact_lse.T
    out_dtype = _ROUNDS_TO.get(args.q.dtype, args.q.dtype)
    given = (args.q, args.k, args.v, *(t for t in (args.k_new, args.v_new) if t is not None))
    if args.out is None:
        out = attend.rounded(np.ascontiguousarray(exact), out_dtype, of=given)
    else:
        out = attend.rounded(exact, out_dtype, cuda.host(args.out), attend.uncovered(spans, rows), of=given)
    lse = attend.rounded(np.ascontiguousarray(exact_lse), torch.float32, of=given)
    if args.num_splits <= 1:
        return out, lse, None, None
    # Scratch of the split kernel, handed out by the operator.
    parts = (args.num_splits, *lse.shape)
    return out, lse, torch.full((*parts, shape.dim_v), torch.nan), torch.full(parts, torch.nan)


def _attend(
    args: Forward,
    shape: Shape,
    q: torch.Tensor,
    spans: tuple[Span, ...],
    reading: Keys,
    mask: Visible,
) -> tuple[np.ndarray, np.ndarray]:
    lost = {i for i in reading.lost if spans[i].q_end > spans[i].q_start}  # no block reads keys for no rows
    if reading.lost:
        num_slots = args.k.shape[0] * args.k.shape[1]
        read = {i: loads.within(shape, spans[i], mask, num_slots) for i in lost if reading.layout != "ragged"}
        lost -= {i for i, span in read.items() if span is not None}
        nothing = np.empty(0, dtype=np.int64)
        spans = tuple(
            read.get(i) or Span(s.q_start, s.q_end, nothing) if i in reading.lost else s
            for i, s in enumerate(spans)
        )
    if lost:
        _look_outside(args, reading, lost)
    k, v = cuda.host(args.k), cuda.host(args.v)
    if reading.zeros:
        k, v = (torch.cat((t, t.new_zeros(reading.zeros, *t.shape[1:]))) for t in (k, v))
    k_scale, v_scale = _scales(args, shape)
    sinks = None if args.sinks is None else cuda.host(args.sinks).to(torch.float64).numpy()
    out, lse = attend.attend(
        q,
        k,
        v,
        spans,
        layout=reading.layout,
        scale=args.scale,
        causal=mask.causal,
        window_left=mask.left,
        window_right=mask.right,
        soft_cap=max(args.soft_cap, 0.0),
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks,
    )
    if np.isnan(out.sum()):

        def again(i: int, rows: slice, keys: Range) -> tuple[np.ndarray, np.ndarray]:
            span = spans[i]
            seen = attend.seen(span.q_end - span.q_start, len(span.slots), mask.left, mask.right)
            return attend.attend(
                q[span.q_start + rows.start : span.q_start + rows.stop],
                k,
                v,
                (Span(0, rows.stop - rows.start, span.slots[slice(*keys)]),),
                layout=reading.layout,
                scale=args.scale,
                soft_cap=max(args.soft_cap, 0.0),
                custom=[seen[rows, slice(*keys)]],
                k_scale=k_scale[i : i + 1] if isinstance(k_scale, np.ndarray) else k_scale,
                v_scale=v_scale[i : i + 1] if isinstance(v_scale, np.ndarray) else v_scale,
                sinks=sinks,
            )

        without_unloaded(
            spans,
            out,
            lse,
            group=shape.heads // shape.heads_k,
            ranges=lambda span: loads.ranges(shape, span, mask),
            again=again,
        )
    if np.isnan(lse).any():
        for span in spans:  # a sum of weights that is NaN counts as none
            part = lse[span.q_start : span.q_end]
            part[np.isnan(part)] = -np.inf
    tails.spoil(out, args, shape, spans, reading, mask)
    for index in lost:  # keys from outside the pool: no error, no number
        out[spans[index].q_start : spans[index].q_end] = np.nan
        lse[spans[index].q_start : spans[index].q_end] = -np.inf
    return out, lse


def _look_outside(args: Forward, reading: Keys, lost: set[int]) -> None:
    """Say that keys of these requests are read from outside of the cache.

    Raises:
        RuntimeError: from too far away to find any memory.
    """
    slots = np.concatenate([reading.slots[index] for index in sorted(lost)])
    slots = slots[slots >= (UNREADABLE + 1) * reading.page_size]  # what no page number led to
    distance = int(np.abs(slots).max(initial=0)) * args.k.stride(1) * args.k.element_size()
    if distance > modes.FAR:
        raise modes.illegal_access(f"a key is read {distance >> 30} GiB from the cache")
    recorder.reads_foreign(f"request {min(lost)} reads keys outside of the cache")


def _scales(args: Forward, shape: Shape) -> tuple[float | np.ndarray, float | np.ndarray]:
    """Descaling of keys (with that of q) and values; both are ignored unless q itself is fp8."""
    if args.q.dtype != torch.float8_e4m3fn:
        return 1.0, 1.0
    ones = np.ones((shape.batch, shape.heads_k))
    q, k, v = (
        ones if scale is None else cuda.host(scale).to(torch.float64).numpy()
        for scale in (args.q_descale, args.k_descale, args.v_descale)
    )
    return q * k, v
