"""What FlashInfer's paged kernels compute right: shapes, masks, layouts, dtypes, lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fakes.contract.check import Requests, requests
from fakes.contract.paged_fi import (
    DECODE,
    KERNELS,
    OLD,
    PREFILL,
    Kernel,
    attend,
    bind,
    both,
    caches,
    causal,
    make,
    plan,
    rule,
    shapes,
    worst,
)
from fakes.contract.rule import RIGHT, Lab, Observation, Rule, judge, refused, value

LENS = ([40, 17, 5], [7, 3, 5])
"""KV and query lengths of an ordinary batch; decode takes one row of each request."""


def _right(
    lab: Lab, kernel: Kernel, r: Requests, *, run: Any = None, layout: str = "NHD", **options: Any
) -> Observation:
    mask = {k: options[k] for k in ("window_left",) if k in options}
    if "logits_soft_cap" in options:
        mask["soft_cap"] = options["logits_soft_cap"]
    got = attend(lab, kernel, r, run=run, layout=layout, **options)
    return both(got, r.expected(causal=causal(kernel), **mask))


def _plain(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS)))


def _unread(lab: Lab, kernel: Kernel) -> Observation:
    seen = []
    for page_size in (1, 16, 64):
        for poison in (float("nan"), float("inf")):
            r = requests(**shapes(kernel, *LENS), page_size=page_size, poison=poison)
            seen.append(_right(lab, kernel, r))
    return worst(*seen)


def _windows(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    return worst(*(_right(lab, kernel, r, window_left=w) for w in (0, 1, 4, 15, 16, 40)))


def _caps(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    return worst(*(_right(lab, kernel, r, logits_soft_cap=cap) for cap in (1.0, 30.0)))


def _dims(lab: Lab, kernel: Kernel) -> Observation:
    return worst(*(_right(lab, kernel, requests(**shapes(kernel, *LENS), dim=dim)) for dim in (64, 128, 256)))


def _host_arrays(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS)), host=True)


def _fp8(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS), kv_dtype=torch.float8_e4m3fn)
    wide = replace(r, k=[k.float() * 0.5 for k in r.k], v=[v.float() * 2.0 for v in r.v])
    return both(
        attend(lab, kernel, r, run={"k_scale": 0.5, "v_scale": 2.0}), wide.expected(causal=causal(kernel))
    )


def _hnd(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS)), layout="HND")


def _stacked(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    stacked = torch.stack(caches(lab, r), dim=1)
    return judge(wrapper.run(r.q.to(lab.device), stacked), r.expected(causal=causal(kernel))[0])


def _strided(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    fused = torch.cat((r.q, r.q.flip(1)), dim=1).to(lab.device)
    return judge(wrapper.run(fused[:, : r.q.shape[1]], caches(lab, r)), r.expected(causal=causal(kernel))[0])


def _lse_form(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    _, lse = wrapper.run(r.q.to(lab.device), caches(lab, r), return_lse=True)
    right = lse.dtype is torch.float32 and tuple(lse.shape) == (r.q.shape[0], r.q.shape[1])
    return Observation("right" if right else "wrong", f"{lse.dtype} {tuple(lse.shape)}")


def _group(lab: Lab, kernel: Kernel, heads: tuple[int, int]) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS), heads=heads))


def _groups(lab: Lab, kernel: Kernel) -> Observation:
    return worst(
        *(
            _group(lab, kernel, heads)
            for heads in ((5, 1), (7, 1), (14, 2), (28, 4), (16, 1), (8, 2), (6, 2), (8, 8))
        )
    )


def _again(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    q, cache = r.q.to(lab.device), caches(lab, r)
    first, *others = [wrapper.run(q, cache) for _ in range(5)]
    return Observation("value", "bit-equal" if all(torch.equal(first, o) for o in others) else "different")


def _mates(lab: Lab) -> Observation:
    r = requests([3000, 16, 5, 700])
    alone = replace(r, q=r.q[1:2], pages=r.pages[1:2], k=r.k[1:2], v=r.v[1:2], qo_lens=[1], kv_lens=[16])
    same = torch.equal(attend(lab, "tensor_core", r)[0][1:2], attend(lab, "tensor_core", alone)[0])
    return Observation("value", "bit-equal" if same else "different")


def _long_prefill(lab: Lab) -> Observation:
    kv_lens = [100_000] + [17] * 63
    return _right(lab, "fa2", requests(kv_lens, [1] * 64, heads=(1, 1), dim=64))


def _longest(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests([131_072], [1], heads=(1, 1), dim=64))


def _float32(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS), dtype=torch.float32))


def _wrong_q_dtype(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    out = wrapper.run(r.q.to(lab.device, torch.float16), caches(lab, r))
    return judge(out, r.expected(causal=causal(kernel))[0])


def _planned_two_dtypes(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS)), q_data_type=torch.float16)


def _wrong_kv_dtype(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS), kv_dtype=torch.float16)
    return _right(lab, kernel, r, kv_data_type=torch.bfloat16)


def _default_dtypes(lab: Lab, kernel: Kernel) -> Observation:
    return _right(lab, kernel, requests(**shapes(kernel, *LENS)), no_dtypes=True)


def _per_kernel(
    name: str,
    cause: str,
    probe: Any,
    kernels: tuple[Kernel, ...] = KERNELS,
    old: Any = RIGHT,
    new: Any = None,
) -> tuple[Rule, ...]:
    return tuple(rule(f"{name}.{kernel}", cause, bind(probe, kernel), old, new) for kernel in kernels)


RULES = (
    *_per_kernel(
        "numbers",
        "Attention of ragged requests on scattered pages; LSE in base 2, its error within 1e-3 nats.",
        _plain,
    ),
    *_per_kernel("unread-slots", "Slots that no request owns are never read into a result.", _unread),
    *_per_kernel("window-left", "window_left = w lets w + 1 keys be seen, the row's own included.", _windows),
    *_per_kernel("soft-cap", "A soft cap c given to plan replaces a score s by c * tanh(s / c).", _caps),
    *_per_kernel("head-dims", "Kernels exist for head dims 64, 128 and 256.", _dims),
    *_per_kernel("host-arrays", "Index arrays on the CPU are copied to the device by plan.", _host_arrays),
    *_per_kernel(
        "fp8-kv", "e4m3 K and V are dequantised by k_scale and v_scale of run.", _fp8, (*DECODE, "fa2")
    ),
    *_per_kernel("hnd", "The HND layout has heads before slots in a page.", _hnd),
    *_per_kernel("stacked-cache", "One tensor [pages, 2, page, heads, dim] holds K and V.", _stacked),
    *_per_kernel("strided-q", "Strides of q are read.", _strided),
    *_per_kernel("lse-form", "LSE is float32 [rows, num_qo_heads].", _lse_form),
    *_per_kernel(
        "group-sizes", "Tiles of packed rows hold any group size.", _groups, ("tensor_core", *PREFILL)
    ),
    *(
        rule(
            f"group-size.cuda_core.{q}-{kv}",
            "CUDA-core decode is compiled for a few group sizes only.",
            bind(_group, "cuda_core", (q, kv)),
            refused("RuntimeError", "Unsupported group_size"),
        )
        for q, kv in ((5, 1), (7, 1), (14, 2), (28, 4))
    ),
    rule(
        "group-size.cuda_core.16-1",
        "Group size 16 was added to CUDA-core decode after 0.6.6.",
        bind(_group, "cuda_core", (16, 1)),
        refused("RuntimeError", "Unsupported group_size"),
        RIGHT,
    ),
    *(
        rule(
            f"group-size.cuda_core.{q}-{kv}",
            "Group sizes 1, 3 and 4 are compiled.",
            bind(_group, "cuda_core", (q, kv)),
            RIGHT,
        )
        for q, kv in ((8, 2), (6, 2), (8, 8))
    ),
    *_per_kernel("repeatable", "The same call gives the same bits.", _again, old=value("bit-equal")),
    rule(
        "batch-mates.tensor_core",
        "A request's tiles do not depend on its batch mates at these lengths.",
        _mates,
        value("bit-equal"),
    ),
    rule("long-and-short.fa2", "One request of 100,000 tokens among 63 of 17.", _long_prefill, RIGHT),
    *_per_kernel("longest", "131,072 tokens.", _longest, ("tensor_core", "fa2")),
    *_per_kernel(
        "float32",
        "No kernel is generated for float32.",
        _float32,
        ("tensor_core", "fa2"),
        refused("KeyError", "torch.float32"),
    ),
    *_per_kernel(
        "q-dtype",
        "run compares q's dtype with the planned one.",
        _wrong_q_dtype,
        old=refused("ValueError", "does not match the q_data_type"),
    ),
    Rule(
        "flashinfer.two-dtypes.fa3",
        "flashinfer",
        "plan generates a kernel for q and KV of two 16-bit dtypes, and that build fails.",
        {OLD: refused("RuntimeError", "Ninja build failed")},
        "one NVIDIA H200, flashinfer-python 0.6.6, torch 2.11.0+cu130, 2026-11-29",
        bind(_planned_two_dtypes, "fa3"),
    ),
    *_per_kernel(
        "kv-dtype",
        "run compares k's dtype with the planned one.",
        _wrong_kv_dtype,
        old=refused("ValueError", "does not match the kv_data_type"),
    ),
    *_per_kernel(
        "default-dtype",
        "Without dtypes plan assumes float16.",
        _default_dtypes,
        old=refused("ValueError", "does not match the q_data_type"),
    ),
)
