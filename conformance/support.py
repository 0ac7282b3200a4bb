"""Whether a backend declares what a case needs. Declared is tested; what is not declared is not asked."""

from __future__ import annotations

from dataclasses import replace

from backends.contract import Capabilities
from cases.model import Case
from fakes.recorder import Mode


def unsupported(case: Case, capabilities: Capabilities, mode: Mode = "strict") -> str | None:
    """Why a case is not for a backend, in one phrase; None if it is."""
    c, heads, mask = capabilities, case.heads, case.mask
    if case.level != c.level:
        return f"a case of level {case.level}, the backend is of level {c.level}"
    if case.dtype not in c.dtypes:
        return f"dtype {case.dtype}"
    if case.dtype == "float32" and c.library and mode == "faithful":
        return "dtype float32, which the real kernels refuse"
    if case.kv_dtype not in (None, case.dtype) and case.kv_dtype not in c.kv_dtypes:
        return f"KV dtype {case.kv_dtype}"
    if c.page_sizes is not None and case.page_size not in c.page_sizes:
        return f"page size {case.page_size}"
    if case.layout not in c.layouts:
        return f"layout {case.layout}"
    if c.head_dims is not None and (heads.head_dim_qk, heads.head_dim_vo) not in c.head_dims:
        return f"head dims {heads.head_dim_qk}/{heads.head_dim_vo}"
    if c.group_sizes is not None and heads.group_size not in c.group_sizes:
        return f"group size {heads.group_size}"
    if mask.custom is not None and not c.custom_mask:
        return "a custom mask"
    if mask.custom is None and not mask.causal and not c.non_causal:
        return "non-causal attention"
    if mask.window is not None and not c.window:
        return "a sliding window"
    if mask.window_layers is not None and not c.layer_windows:
        return "a window in some layers alone"
    if mask.soft_cap is not None and not c.soft_cap:
        return "a soft cap"
    if case.strided and not c.strided:
        return "strided inputs"
    if c.variants and not all(any(v.holds(part) for v in c.variants) for part in _with_one_mask(case)):
        return "settings that no compiled variant has"
    return _unsupported_step(case, c)


def _with_one_mask(case: Case) -> list[Case]:
    """The case once for each mask that its layers have."""
    if case.mask.window_layers is None:
        return [case]
    masks = dict.fromkeys(case.mask.of_layer(layer) for layer in range(case.num_layers))
    return [replace(case, mask=mask) for mask in masks]


def _unsupported_step(case: Case, c: Capabilities) -> str | None:
    for step in case.steps:
        if case.level == "engine":
            if step.phase not in c.phases:
                return f"phase {step.phase}"
            continue
        if "prefill" not in c.phases and any(n != 1 for n in step.qo_lens):
            return "other than one query row per request"
        if not c.empty_requests and 0 in step.qo_lens:
            return "a request without query rows"
        if not c.rows_without_keys and any(
            kv == 0 or (case.mask.causal and qo > kv)
            for qo, kv in zip(step.qo_lens, step.kv_lens, strict=True)
        ):
            return "rows that see no key"
        if not c.batches_without_keys and not any(step.kv_lens):
            return "a batch without keys"
    return None
