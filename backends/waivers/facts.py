"""What a waiver's predicate may ask about a case."""

from __future__ import annotations

from typing import Any

from cases.model import Case, Request, Step


def facts(case: Case) -> dict[str, Any]:
    """The facts of a case by name.

    Beside the settings of the case: the longest lengths, and which unusual things happen in any of its requests.
    `layer_windows`: some layers have the window, others have none. `rows_without_keys`: a row sees no key at all;
    `rows_before_keys`: one of a request that has keys, since there are more rows than keys under a causal mask;
    `requests_without_keys`: kv_len is 0 and there are rows; `empty_requests`: qo_len is 0.
    """
    heads, mask = case.heads, case.mask
    requests = [r for step in case.steps for r in step.requests]
    before = mask.causal and any(0 < r.kv_len < r.qo_len for r in requests)
    without = any(r.qo_len and not r.kv_len for r in requests)
    return {
        "level": case.level,
        "dtype": case.dtype,
        "kv_dtype": case.cache_dtype,
        "page_size": case.page_size,
        "layout": case.layout,
        "placement": case.placement,
        "values": case.values,
        "strided": case.strided,
        "num_layers": case.num_layers,
        "num_qo_heads": heads.num_qo_heads,
        "num_kv_heads": heads.num_kv_heads,
        "group_size": heads.group_size,
        "head_dim_qk": heads.head_dim_qk,
        "head_dim_vo": heads.head_dim_vo,
        "causal": mask.causal,
        "window": mask.window,
        "layer_windows": mask.window_layers is not None,
        "soft_cap": mask.soft_cap,
        "custom_mask": mask.custom is not None,
        "num_steps": len(case.steps),
        "max_requests": max(len(step.requests) for step in case.steps),
        "max_qo_len": max(r.qo_len for r in requests),
        "max_kv_len": max(r.kv_len for r in requests),
        "decode": any(step.phase == "decode" for step in case.steps),
        "prefill": any(step.phase == "prefill" for step in case.steps),
        "shared_prefix": any(r.prefix_len for r in requests),
        "rows_without_keys": without or before,
        "rows_before_keys": before,
        "requests_without_keys": without,
        "empty_requests": any(not r.qo_len for r in requests),
    }


NAMES = frozenset(facts(Case((Step((Request(),)),))))
"""Every fact."""
