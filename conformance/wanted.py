"""Which cases to draw for a backend: what it declares, as the strategies take it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from backends.contract import Capabilities
from cases.wanted import Wanted


def wanted_by(capabilities: Capabilities) -> Wanted:
    """Cases that a backend declares."""
    c = capabilities
    return Wanted(
        level=c.level,
        phases=c.phases,
        dtypes=c.dtypes,
        kv_dtypes=c.kv_dtypes,
        page_sizes=c.page_sizes,
        layouts=c.layouts,
        head_dims=c.head_dims,
        group_sizes=c.group_sizes,
        non_causal=c.non_causal and c.level == "kernel",
        window=c.window,
        layer_windows=c.layer_windows and c.level == "engine",
        soft_cap=c.soft_cap,
        custom_mask=c.custom_mask and c.level == "kernel",
        rows_without_keys=c.rows_without_keys,
        empty_requests=c.empty_requests,
        strided=c.strided,
        variants=c.variants,
    )


def wanted_by_any(capabilities: Sequence[Capabilities]) -> Wanted:
    """Cases that at least one of several backends of one level may declare."""
    return reduce(_either, map(wanted_by, capabilities))


def _either(a: Wanted, b: Wanted) -> Wanted:
    return Wanted(
        level=a.level,
        phases=a.phases | b.phases,
        dtypes=a.dtypes | b.dtypes,
        kv_dtypes=a.kv_dtypes | b.kv_dtypes,
        page_sizes=None if a.page_sizes is None or b.page_sizes is None else a.page_sizes | b.page_sizes,
        layouts=a.layouts | b.layouts,
        head_dims=None if a.head_dims is None or b.head_dims is None else a.head_dims | b.head_dims,
        group_sizes=None if a.group_sizes is None or b.group_sizes is None else a.group_sizes | b.group_sizes,
        non_causal=a.non_causal or b.non_causal,
        window=a.window or b.window,
        layer_windows=a.layer_windows or b.layer_windows,
        soft_cap=a.soft_cap or b.soft_cap,
        custom_mask=a.custom_mask or b.custom_mask,
        rows_without_keys=a.rows_without_keys or b.rows_without_keys,
        empty_requests=a.empty_requests or b.empty_requests,
        strided=a.strided or b.strided,
        variants=tuple(dict.fromkeys(a.variants + b.variants)) if a.variants and b.variants else (),
    )
