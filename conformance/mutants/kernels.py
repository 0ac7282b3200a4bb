"""Faults of a kernel library and of the calls of it: index arithmetic, tiles, masks, options, scales."""

# A planted class extends one that is known at run time only, so its members have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false, reportUnknownParameterType=false
from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from conformance.mutants.mutant import mutant
from conformance.mutants.planting import asks, attended


@mutant(
    "idx_mul_wraps",
    base="kernel:fa-kvcache",
    check="values",
    why="slot times stride is computed in too few bits (12 here, 32 in the reports)",
    issue="flashinfer#3130, vllm#47671",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            stride = k.shape[-1] * k.shape[-2] if kw["layout"] == "NHD" else k.shape[-1]
            wrapped = [replace(s, slots=(s.slots * stride % (1 << 12)) // stride) for s in spans]
            return original(q, k, v, wrapped, **kw)

        return attend

    return attended(cls, make)


@mutant(
    "mask_offset_wraps",
    base="kernel:fi-prefill",
    check="values",
    why="offsets into the packed custom mask are computed in too few bits (5 here, 31 in the report)",
    issue="flashinfer#1290",
    tokens=40,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            if kw.get("custom") is not None:
                kw["custom"] = [
                    np.take(m.reshape(-1), np.arange(m.size) % 32, mode="clip").reshape(m.shape)
                    if m.size
                    else m
                    for m in kw["custom"]
                ]
            return original(q, k, v, spans, **kw)

        return attend

    return attended(cls, make)


@mutant(
    "mask_flat_no_check",
    base="kernel:fi-prefill",
    check="metadata",
    why="the custom mask is handed over transposed; its size fits and nobody looks at its shape",
    issue="flashinfer#3176",
    tokens=4,
)
def _(cls: type[Any]) -> type[Any]:
    def change(self: Any, call: Any) -> Any:
        if call.custom_mask is None:
            return call
        return replace(call, custom_mask=[m.t().contiguous().view(m.shape) for m in call.custom_mask])

    return asks(cls, change)


@mutant(
    "stale_tile",
    base="kernel:fa-kvcache",
    check="values",
    why="the tail of a tile of keys still holds the request before, and is not masked",
    issue="flashinfer#1046",
    requests=2,
    tokens=3,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            if kw.get("custom") is not None or kw.get("causal"):
                return original(q, k, v, spans, **kw)
            stale = [
                replace(s, slots=np.concatenate([s.slots, before.slots[len(s.slots) :]]))
                for s, before in zip(spans[1:], spans, strict=False)
            ]
            return original(q, k, v, [*spans[:1], *stale], **kw)

        return attend

    return attended(cls, make)


@mutant(
    "softmax_over_tile",
    base="kernel:fa-kvcache",
    check="values",
    why="the softmax's denominator counts the padding lanes of the last tile of keys",
    issue="flashinfer#3716",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            out, lse = original(q, k, v, spans, **kw)
            for s in spans:
                padding = -len(s.slots) % 16
                rows = slice(s.q_start, s.q_end)
                with np.errstate(all="ignore"):
                    whole = np.logaddexp(lse[rows], math.log(padding) if padding else -np.inf)
                    share = np.where(np.isneginf(lse[rows]), 0.0, np.exp(lse[rows] - whole))
                out[rows] *= share[..., None]
            return out, lse

        return attend

    return attended(cls, make)


@mutant(
    "window_tile_granular",
    base="kernel:fi-prefill",
    check="values",
    why="the window is applied to whole tiles of 16 keys",
    issue="sglang#31501",
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            left = kw.get("window_left", -1)
            if left >= 0:
                kw["window_left"] = left + 15
            return original(q, k, v, spans, **kw)

        return attend

    return attended(cls, make)


@mutant(
    "late_window_ignored",
    base="kernel:fi-prefill",
    check="metadata",
    why="plan is not told the window; forward is, too late",
    issue="sglang#31501",
)
def _(cls: type[Any]) -> type[Any]:
    return _late(cls, "window")


@mutant(
    "late_soft_cap_ignored",
    base="kernel:fi-decode",
    check="metadata",
    why="plan is not told the soft cap; forward is, and ignores it",
    issue="sglang#33915",
)
def _(cls: type[Any]) -> type[Any]:
    return _late(cls, "soft_cap")


def _late(cls: type[Any], option: str) -> type[Any]:
    """The option goes to the older `forward` instead of `plan`."""
    argument = {"window": "window_left", "soft_cap": "logits_soft_cap"}[option]

    class Late(cls):
        def attend(self, call: Any) -> Any:
            run = self.wrapper.run

            def forward(q: Any, kv: Any, **kw: Any) -> Any:
                del self.wrapper.run  # forward_return_lse calls it
                given = getattr(call, option)
                if given is None:
                    return run(q, kv, **kw)
                late = {argument: given - 1 if option == "window" else given, "causal": call.causal}
                if "decode" in type(self.wrapper).__name__.lower():
                    del late["causal"]
                return self.wrapper.forward_return_lse(q, kv, sm_scale=call.scale, **late)

            self.wrapper.run = forward
            try:
                return super().attend(replace(call, **{option: None}))
            finally:
                vars(self.wrapper).pop("run", None)

    return Late


@mutant(
    "fp8_tail64",
    base="kernel:fi-prefill",
    check="values",
    why="the last 64 bytes of each fp8 row of V are dropped",
    issue="flashinfer#4976",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            out, lse = original(q, k, v, spans, **kw)
            if v.element_size() == 1:
                out[..., -64:] = 0.0
            return out, lse

        return attend

    return attended(cls, make)


@mutant(
    "v_scale_ignored",
    base="kernel:fi-decode",
    check="values",
    why="v_scale is not passed to run",
    issue="flashinfer#1023, flashinfer#4979",
    tokens=1,
)
def _(cls: type[Any]) -> type[Any]:
    return asks(cls, lambda self, call: replace(call, v_scale=1.0))


@mutant(
    "k_scale_ignored",
    base="kernel:fi-prefill",
    check="values",
    why="k_scale is not passed to run",
    issue="flashinfer#1023",
)
def _(cls: type[Any]) -> type[Any]:
    return asks(cls, lambda self, call: replace(call, k_scale=1.0))


@mutant(
    "chunk_not_tile_multiple",
    base="kernel:fi-ragged",
    check="values",
    why="keys beyond the last whole tile of 16 are lost when there is more than one tile",
    issue="flashinfer#1206",
    tokens=20,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            out, lse = original(q, k, v, spans, **kw)
            for s in spans:
                n = len(s.slots)
                if n > 16 and n % 16 and kw.get("custom") is None:
                    whole = [replace(s, slots=s.slots[: n // 16 * 16])]
                    short, _ = original(q, k, v, whole, **kw)
                    out[s.q_start : s.q_end] = short[s.q_start : s.q_end]
            return out, lse

        return attend

    return attended(cls, make)


@mutant(
    "rows_beyond_one_tile",
    base="kernel:fi-prefill",
    check="values",
    why="query rows beyond the first tile of 16 are computed as if they were the last of it",
    issue="flashinfer#3871",
    tokens=20,
)
def _(cls: type[Any]) -> type[Any]:
    def make(original: Any) -> Any:
        def attend(q: Any, k: Any, v: Any, spans: Any, **kw: Any) -> Any:
            out, lse = original(q, k, v, spans, **kw)
            for s in spans:
                if s.q_end - s.q_start > 16:
                    out[s.q_start + 16 : s.q_end] = out[s.q_start + 15]
            return out, lse

        return attend

    return attended(cls, make)
