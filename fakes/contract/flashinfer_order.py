"""Plan and run out of step: rows, heads, pages, stale plans, late options, workspaces, graph mode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fakes import cuda
from fakes.contract.check import Requests, requests
from fakes.contract.paged_fi import (
    DECODE,
    KERNELS,
    PREFILL,
    Kernel,
    arrays,
    attend,
    bind,
    both,
    caches,
    causal,
    ints,
    make,
    plan,
    rule,
    shapes,
    workspace,
)
from fakes.contract.rule import RIGHT, UNDEFINED, WRONG, Lab, Observation, judge, refused, value

LENS = ([40, 17, 5], [7, 3, 5])


def _rows(lab: Lab, kernel: Kernel, extra: int) -> Observation:
    """Q with more or fewer rows than planned; the rows that exist of both are judged."""
    r = requests(**shapes(kernel, *LENS))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    q = torch.cat((r.q, r.q[: max(extra, 0)]))[: len(r.q) + extra]
    out = wrapper.run(q.to(lab.device), caches(lab, r))
    if len(out) != len(q):
        return Observation("wrong", f"{len(out)} rows for {len(q)} of q")
    known = min(len(q), len(r.q))
    return judge(out[:known], r.expected(causal=causal(kernel))[0][:known])


def _planned_heads(lab: Lab, kernel: Kernel, heads: int) -> Observation:
    r = requests([40, 37], [1, 1] if kernel in DECODE else [30, 5])
    got = attend(lab, kernel, r, heads=(heads, 2))
    return both(got, r.expected(causal=causal(kernel)))


def _planned_page_size(lab: Lab, kernel: Kernel, page_size: int) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    return both(attend(lab, kernel, r, page_size=page_size), r.expected(causal=causal(kernel)))


def _no_plan(lab: Lab, kernel: Kernel) -> Observation:
    r = requests(**shapes(kernel, *LENS))
    return judge(make(lab, kernel).run(r.q.to(lab.device), caches(lab, r)), r.expected()[0])


def _grown(r: Requests, lens: list[int]) -> Requests:
    """The same requests, shorter: as they were before they grew."""
    k, v = [k[:n] for k, n in zip(r.k, lens, strict=True)], [v[:n] for v, n in zip(r.v, lens, strict=True)]
    pages = [p[: -(-n // r.page_size)] for p, n in zip(r.pages, lens, strict=True)]
    return replace(r, k=k, v=v, pages=pages, kv_lens=lens)


def _stale(lab: Lab, kernel: Kernel) -> Observation:
    r = requests([9, 20, 33, 6], [1] * 4)
    wrapper = make(lab, kernel)
    lab.mark(0)
    plan(lab, wrapper, kernel, _grown(r, [4, 4, 4, 4]))
    lab.mark(1)
    return judge(wrapper.run(r.q.to(lab.device), caches(lab, r)), r.expected(causal=causal(kernel))[0])


def _late(lab: Lab, kernel: Kernel, expected: dict[str, Any], **forward: Any) -> Observation:
    r = requests(**shapes(kernel, [90, 50], [20, 40]))
    wrapper = make(lab, kernel)
    plan(lab, wrapper, kernel, r)
    if kernel in PREFILL:
        forward["causal"] = True
    out = wrapper.forward(r.q.to(lab.device), caches(lab, r), **forward)
    return judge(out, r.expected(causal=causal(kernel), **expected)[0])


def _late_window(lab: Lab, kernel: Kernel) -> Observation:
    windowed = _late(lab, kernel, {"window_left": 8}, window_left=8).kind == "right"
    plain = _late(lab, kernel, {}, window_left=8).kind == "right"
    return Observation("value", "windowed" if windowed else "ignored" if plain else "neither")


def _scratch(lab: Lab, kernel: Kernel, size: int) -> Observation:
    """Planning alone: one request of 131,072 tokens is split over blocks that meet in the workspace."""
    r = requests([1], [1])
    pages = 131_072 // r.page_size
    wrapper = make(lab, kernel, workspace=workspace(lab, size))
    plan(
        lab,
        wrapper,
        kernel,
        r,
        given={"indptr": ints([0, pages]), "indices": ints(range(pages)), "last_page_len": ints([16])},
    )
    return Observation("right", "planned")


def _graph_wrapper(lab: Lab, batch: int, pages: int) -> Any:
    buffers = (torch.zeros(n, dtype=torch.int32, device=lab.device) for n in (batch + 1, pages, batch))
    return lab.library.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(workspace(lab), *buffers, "NHD")


def _graph(lab: Lab, replan: bool) -> Observation:
    r = requests([40, 70])
    wrapper = _graph_wrapper(lab, 2, 64)
    lab.mark(0)
    plan(lab, wrapper, "cuda_core", _grown(r, [20, 5]))
    q, cache = r.q.to(lab.device), caches(lab, r)
    wrapper.run(q, cache)
    lab.mark(1)
    if replan:
        plan(lab, wrapper, "cuda_core", r)
    return judge(wrapper.run(q, cache), r.expected()[0])


def _graph_replayed(lab: Lab, replan: bool) -> Observation:
    r = requests([40, 70])
    wrapper = _graph_wrapper(lab, 2, 64)
    lab.mark(0)
    plan(lab, wrapper, "cuda_core", _grown(r, [20, 5]))
    q, cache = r.q.to(lab.device), caches(lab, r)
    wrapper.run(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = wrapper.run(q, cache)
    lab.mark(1)
    if replan:
        plan(lab, wrapper, "cuda_core", r)
    graph.replay()
    torch.cuda.synchronize()
    return judge(out, r.expected()[0])


def _graph_batch(lab: Lab) -> Observation:
    plan(lab, _graph_wrapper(lab, 2, 64), "cuda_core", requests([20, 5, 9]))
    return Observation("right", "planned")


def _graph_indices(lab: Lab) -> Observation:
    plan(lab, _graph_wrapper(lab, 2, 3), "cuda_core", requests([40, 70]))
    return Observation("right", "planned")


def _shared(lab: Lab, kernel: Kernel, interleaved: bool) -> Observation:
    """Two wrappers over one int workspace: plan a, plan b, run a; or plan a, run a, plan b, run b."""
    a, b = requests(**shapes(kernel, *LENS)), requests(**shapes(kernel, [900, 5], [2, 60]), seed=1)
    first, second = make(lab, kernel), make(lab, kernel)
    second.reset_workspace_buffer(second._float_workspace_buffer, first._int_workspace_buffer)
    plan(lab, first, kernel, a)
    if interleaved:
        plan(lab, second, kernel, b)
    out = first.run(a.q.to(lab.device), caches(lab, a)).cpu()
    seen = judge(out, a.expected(causal=causal(kernel))[0])
    if interleaved:
        return seen
    plan(lab, second, kernel, b)
    other = judge(second.run(b.q.to(lab.device), caches(lab, b)), b.expected(causal=causal(kernel))[0])
    return seen if seen.kind != "right" else other


def _two_plans(lab: Lab, kernel: Kernel, waited: bool) -> Observation:
    """Two plans behind a busy stream: the second rewrites memory that the first still copies from, unless waited."""
    r = requests(**shapes(kernel, *LENS))
    other = requests(**shapes(kernel, [900, 700, 5], [2, 60, 1]), seed=1)
    wrapper = make(lab, kernel)
    q, cache = r.q.to(lab.device), caches(lab, r)
    torch.cuda.synchronize()
    if cuda.current() is None:  # simulated copies count as running until they are waited for
        busy = torch.randn(8192, 8192, device=lab.device)
        for _ in range(20):
            busy = busy @ busy * 1e-4
    plan(lab, wrapper, kernel, r, host=True)
    out = wrapper.run(q, cache)
    if waited:
        torch.cuda.synchronize()
    plan(lab, wrapper, kernel, other, host=True)
    torch.cuda.synchronize()
    return judge(out, r.expected(causal=causal(kernel))[0])


def _mask_of(r: Requests, seed: int = 3) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    seen = [torch.rand(n, m, generator=random) < 0.6 for n, m in zip(r.qo_lens, r.kv_lens, strict=True)]
    for mask in seen:
        mask[:, 0] = True
    return seen


def _masked(lab: Lab, *, drop: int = 0, then_causal: bool = False, **options: Any) -> Observation:
    r = requests([5, 7], [2, 3])
    masks = _mask_of(r)
    flat = torch.cat([m.reshape(-1) for m in masks])
    wrapper = lab.library.BatchPrefillWithPagedKVCacheWrapper(workspace(lab), "NHD", backend="fa2")
    plan(lab, wrapper, "fa2", r, custom_mask=flat[: len(flat) - drop].to(lab.device), **options)
    if then_causal:
        wrapper.run(r.q.to(lab.device), caches(lab, r))
        plan(lab, wrapper, "fa2", r, causal=True)
        return judge(wrapper.run(r.q.to(lab.device), caches(lab, r)), r.expected(causal=True)[0])
    out = wrapper.run(r.q.to(lab.device), caches(lab, r))
    if drop:
        return Observation("value", "accepted")
    parts = [
        replace(r, q=r.q[r.rows(i)], k=[r.k[i]], v=[r.v[i]], qo_lens=[r.qo_lens[i]], kv_lens=[r.kv_lens[i]])
        for i in (0, 1)
    ]
    expected = torch.cat([part.expected(mask=mask)[0] for part, mask in zip(parts, masks, strict=True)])
    return judge(out, expected)


def _end_forward(lab: Lab, kernel: Kernel) -> Observation:
    wrapper = make(lab, kernel)
    wrapper.end_forward()
    return Observation("value", "no effect")


def _positional(lab: Lab) -> Observation:
    r = requests([20, 5])
    a = arrays(r)
    wrapper = make(lab, "cuda_core")
    wrapper.plan(
        *(a[n].to(lab.device) for n in ("indptr", "indices", "last_page_len")),
        8,
        2,
        128,
        16,
        "NONE",
        -1,
        None,
        torch.bfloat16,
    )
    return judge(wrapper.run(r.q.to(lab.device), caches(lab, r)), r.expected()[0])


ROWS = refused("ValueError")

RULES = (
    *(
        rule(
            f"q-rows-more.{kernel}",
            "Work is cut by the plan; 0.7.4 compares rows with the plan. CUDA cores also start blocks for the surplus "
            "rows, which read past the plan: right for one and two requests, wrong for three and four.",
            bind(_rows, kernel, len(LENS[0]) if kernel in DECODE else 3),
            UNDEFINED if kernel == "cuda_core" else RIGHT,
            ROWS,
            finding="fi.q-rows",
        )
        for kernel in KERNELS
    ),
    *(
        rule(
            f"q-rows-fewer.{kernel}",
            "Work is cut by the plan; 0.7.4 compares rows with the plan.",
            bind(_rows, kernel, -1),
            RIGHT,
            ROWS,
            finding="fi.q-rows",
        )
        for kernel in ("tensor_core", "fa2")
    ),
    rule(
        "q-rows-fewer.cuda_core",
        "CUDA-core decode compares only more rows than requests.",
        bind(_rows, "cuda_core", -1),
        RIGHT,
        finding="fi.q-rows",
    ),
    *(
        rule(
            f"planned-heads-16.{kernel}",
            "The head count is q's own; the plan cut enough tiles.",
            bind(_planned_heads, kernel, 16),
            RIGHT,
            finding="fi.planned-heads",
        )
        for kernel in ("tensor_core", "fa2")
    ),
    rule(
        "planned-heads-4.tensor_core",
        "One tile holds a whole group.",
        bind(_planned_heads, "tensor_core", 4),
        RIGHT,
        finding="fi.planned-heads",
    ),
    rule(
        "planned-heads-4.fa2",
        "Half as many packed rows were cut into tiles: the last rows are not computed.",
        bind(_planned_heads, "fa2", 4),
        WRONG,
        finding="fi.planned-heads",
    ),
    *(
        rule(
            f"planned-page-size-{size}.{kernel}",
            "The cache's own shape counts.",
            bind(_planned_page_size, kernel, size),
            RIGHT,
            finding="fi.planned-page-size",
        )
        for size in (8, 32)
        for kernel in DECODE
    ),
    *(
        rule(
            f"no-plan.{kernel}",
            "run reads what plan left.",
            bind(_no_plan, kernel),
            refused("AttributeError", "_cached_q_data_type"),
        )
        for kernel in KERNELS
    ),
    *(
        rule(
            f"stale-plan.{kernel}",
            "The plan's own copies of the arrays are read.",
            bind(_stale, kernel),
            WRONG,
            finding="fi.stale-plan",
        )
        for kernel in KERNELS
    ),
    *(
        rule(
            f"late-soft-cap.{kernel}",
            "A soft cap is compiled into the planned kernel.",
            bind(_late, kernel, {"soft_cap": 1.0}, logits_soft_cap=1.0),
            WRONG,
            finding="fi.late-logits-soft-cap",
        )
        for kernel in KERNELS
    ),
    *(
        rule(
            f"late-soft-cap-plain.{kernel}",
            "So one at forward() is ignored.",
            bind(_late, kernel, {}, logits_soft_cap=1.0),
            RIGHT,
            finding="fi.late-logits-soft-cap",
        )
        for kernel in KERNELS
    ),
    *(
        rule(
            f"late-window.{kernel}",
            "A window is compiled into the planned kernel.",
            bind(_late, kernel, {"window_left": 8}, window_left=8),
            WRONG,
            finding="fi.late-window-left",
        )
        for kernel in PREFILL
    ),
    rule(
        "late-window-is.fa2",
        "One at forward() only moves the first tile of keys.",
        bind(_late_window, "fa2"),
        value("neither"),
    ),
    rule("late-window-is.fa3", "One at forward() is not read.", bind(_late_window, "fa3"), value("ignored")),
    *(
        rule(
            f"workspace-{size}.{kernel}",
            "Parts of a long request meet in the float workspace.",
            bind(_scratch, kernel, size),
            refused("RuntimeError", "Buffer overflow when allocating memory for batch_"),
        )
        for size in (1 << 10, 1 << 20)
        for kernel in ("cuda_core", "fa2")
    ),
    rule("workspace-1024.fa3", "fa3 does not split requests.", bind(_scratch, "fa3", 1 << 10), RIGHT),
    rule("graph-replan", "The wrapper's buffers are filled anew.", bind(_graph, True), RIGHT),
    rule(
        "graph-stale",
        "The wrapper's buffers hold the last plan.",
        bind(_graph, False),
        WRONG,
        finding="fi.stale-plan",
    ),
    rule(
        "graph-replan-replayed",
        "A replay reads the wrapper's buffers.",
        bind(_graph_replayed, True),
        RIGHT,
        device="full",
    ),
    rule(
        "graph-stale-replayed",
        "A replay reads the wrapper's buffers.",
        bind(_graph_replayed, False),
        WRONG,
        device="full",
        finding="fi.stale-plan",
    ),
    rule(
        "graph-batch-size",
        "Buffers are sized at construction.",
        _graph_batch,
        refused("ValueError", "The batch size should be fixed in cudagraph mode"),
    ),
    rule(
        "graph-indices",
        "Buffers are sized at construction.",
        _graph_indices,
        refused("ValueError", "The size of indices should be less than or equal to the allocated buffer"),
    ),
    *(
        rule(
            f"two-plans.{kernel}",
            "Both plans are staged in the same pinned memory.",
            bind(_two_plans, kernel, False),
            WRONG,
            finding="fi.staging-in-flight",
        )
        for kernel in ("cuda_core", "fa2")
    ),
    *(
        rule(
            f"two-plans-waited.{kernel}",
            "The first plan's copy is done before the second is staged.",
            bind(_two_plans, kernel, True),
            RIGHT,
        )
        for kernel in ("cuda_core", "fa2")
    ),
    *(
        rule(
            f"shared-int-workspace.{kernel}",
            "The second plan overwrites the first one's schedule.",
            bind(_shared, kernel, True),
            WRONG,
            finding="fi.plan-overwritten",
        )
        for kernel in ("cuda_core", "fa2")
    ),
    *(
        rule(
            f"shared-int-workspace-in-turn.{kernel}",
            "Each plan is run before the next is made.",
            bind(_shared, kernel, False),
            RIGHT,
        )
        for kernel in ("cuda_core", "fa2")
    ),
    rule("custom-mask", "A boolean mask per request.", _masked, RIGHT),
    rule(
        "custom-mask-causal",
        "causal is not looked at beside a custom mask.",
        bind(_masked, causal=True),
        RIGHT,
    ),
    rule(
        "custom-mask-short",
        "The mask's size is not compared.",
        bind(_masked, drop=5),
        value("accepted"),
        finding="fi.mask-size",
    ),
    rule(
        "custom-mask-then-causal", "A plan without a mask removes it.", bind(_masked, then_causal=True), RIGHT
    ),
    *(
        rule(
            f"end-forward.{kernel}",
            "0.7.2 removed it.",
            bind(_end_forward, kernel),
            value("no effect"),
            refused("AttributeError", "end_forward"),
        )
        for kernel in ("cuda_core", "fa2")
    ),
    rule(
        "plan-positional",
        "0.6.6 has o_data_type behind kv_data_type; the arguments before keep their places.",
        _positional,
        RIGHT,
    ),
)
