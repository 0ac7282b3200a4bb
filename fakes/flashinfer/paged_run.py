"""The launch behind `run` of the paged wrappers: what the compiled kernel makes of its arguments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fakes import cuda, recorder
from fakes.flashinfer import rules, spans
from fakes.flashinfer.arrays import words
from fakes.flashinfer.kernels import Launch, execute
from fakes.flashinfer.masks import unpacked
from fakes.flashinfer.plans import Plan
from fakes.flashinfer.wrapper import Wrapper, cache_record, plan_in, report_overwritten
from fakes.recorder import Call


def set_late(
    wrapper: Any, window_left: int, logits_soft_cap: float | None, sm_scale: float | None
) -> tuple[str, ...]:
    """Replace the plan's values, as `forward` does; say which come too late for the compiled kernel."""
    wrapper._window_left = window_left
    wrapper._logits_soft_cap = logits_soft_cap or 0.0
    wrapper._sm_scale = sm_scale
    plan: Plan | None = wrapper._plan_info
    if plan is None:
        return ()
    late = []
    if (window_left >= 0) != plan.windowed:
        late.append("window_left")
    if (wrapper._logits_soft_cap > 0) != plan.capped:
        late.append("logits_soft_cap")
    return tuple(late)


def record_run(
    wrapper: Wrapper, q: torch.Tensor, cache: Any, plan: Plan, op: str = "run", **given: Any
) -> Call | None:
    """Record the call, with findings about what `forward` set too late."""
    record = recorder.current()
    if record is None:
        return None
    call = wrapper._record(op, "attend", {"q": q, "paged_kv_cache": cache_record(cache), **given}, plan)
    late: tuple[str, ...] = getattr(wrapper, "_late", ())
    if late and record.strict and plan.warned is None:
        for name in late:
            rules.order(
                record,
                f"fi.late-{name.replace('_', '-')}",
                name,
                f"{name} at forward() is not what plan() compiled the kernel for: give it to plan()",
            )
    for name in ("sinks",):
        if given.get(name) is not None and record.strict:
            record.find("fi.ignored", "arrays", name, f"{name} is not read by backend {wrapper._backend}")
    return call


def launch_of(
    wrapper: Any,
    plan: Plan,
    call: Call | None,
    k: torch.Tensor,
    q_scale: Any,
    k_scale: Any,
    v_scale: Any,
    *,
    causal: bool,
    layout: str | None = None,
) -> Launch:
    """Freeze a launch. Window and soft cap work as far as the planned kernel was built with them."""
    window, tile_window, blind = -1, -1, False
    given: int = wrapper._window_left
    if plan.windowed:
        window = given
        blind = plan.kernel == "fa3" and given < 0
    elif given >= 0 and plan.kernel == "fa2":
        tile_window = given
    cap = wrapper._logits_soft_cap if plan.capped else 0.0
    scale = wrapper._sm_scale if wrapper._sm_scale is not None else k.shape[-1] ** -0.5
    if plan.capped and cap == 0.0:
        scale = 0.0  # cap * tanh(score / cap) for a cap of 0
    form: str = layout or wrapper._kv_layout
    return Launch(
        plan=plan,
        call=call,
        layout=form,
        page_size=k.shape[2] if form == "HND" else k.shape[1] if form == "NHD" else 1,
        causal=causal,
        window_left=max(window, -1),
        soft_cap=float(cap),
        scale=float(scale),
        k_scale=1.0 if k_scale is None else float(k_scale),
        v_scale=1.0 if v_scale is None else float(v_scale),
        q_scale=1.0 if q_scale is None else float(q_scale),
        tile_window=tile_window,
        blind=blind,
    )


def _check_pool(launch: Launch, kv_indptr: torch.Tensor, indices: torch.Tensor, num_pages: int) -> None:
    """Strict mode's finding about page ids, once for a plan and pool."""
    record = rules.strict()
    plan = launch.plan
    if record is None or plan.pool_checked == num_pages:
        return
    plan.pool_checked = num_pages
    count = plan.kv[-1]
    if plan.kernel != "fa3":
        starts = words(kv_indptr)
        count = int(starts[min(plan.batch_size, starts.size - 1)]) if starts.size else 0
    rules.pool(record, "paged_kv_indices", indices, max(count, 0), num_pages, launch.page_size)


def with_plan(
    launch: Launch, int_workspace: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
) -> Launch | None:
    """The launch with the plan that the workspace holds now; None, and NaN in `out` and `lse`, if it holds none."""
    plan = plan_in(int_workspace, launch.plan)
    if plan is None:
        report_overwritten()
        out.fill_(float("nan"))
        if lse is not None:
            lse.fill_(float("nan"))
        return None
    if launch.call is not None:
        launch.call.plan = plan.call  # of a replayed run: the plan that it executes now
    return launch if plan is launch.plan else replace(launch, plan=plan)


@cuda.kernel
def paged_kernel(
    launch: Launch,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qo_indptr: torch.Tensor | None,
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    int_workspace: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    mask: torch.Tensor | None = None,
    mask_indptr: torch.Tensor | None = None,
) -> None:
    """Read the arrays where they lie now, attend, write `out` and `lse`."""
    out, lse = cuda.host(out), None if lse is None else cuda.host(lse)
    found = with_plan(launch, int_workspace, out, lse)
    if found is None:
        return
    launch, plan = found, found.plan
    k, v = cuda.host(k), cuda.host(v)
    _check_pool(launch, kv_indptr, indices, k.shape[0])
    read = spans.paged(
        plan,
        qo_indptr,
        kv_indptr,
        indices,
        last_page_len,
        page_size=launch.page_size,
        num_pages=k.shape[0],
        num_rows=q.shape[0],
        slot_bytes=k.stride(2 if launch.layout == "HND" else 1) * k.element_size(),
        window=launch.first_window,
    )
    custom: list[np.ndarray] | None = None
    if mask is not None and mask_indptr is not None:
        custom = unpacked(cuda.host(mask), words(mask_indptr), read)
    execute(launch, read, cuda.host(q), k, v, out, lse, custom)
